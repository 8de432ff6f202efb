"""Compare the trainer's peak memory on one GPU with the estimate of `retrace check`.

A mixture-of-experts model with half a billion random weights is trained in bfloat16 for one step on
packed samples, including the optimizer step. PyTorch's allocator reports the peak, so the
comparison leaves out the part of the estimate for CUDA's context and NCCL.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.training import PROMPT, WIDTHS, make_samples, trained
from operators.training.batches.layout import make_layout
from operators.training.batches.step_data import layout_rules
from operators.training.megatron import parallel
from operators.training.rank import make_rank
from pipeline.config.tree import RunConfig
from pipeline.device import choose_device
from pipeline.errors import InputError
from pipeline.inputs.sizes.estimate import RUNTIME, estimate_memory
from tests.tiny_models import make_tiny

SAMPLES, LENGTH = 8, 2048
LEAST = 0.5
"""Minimum of peak / estimate. With a smaller ratio, the estimate would be so high that `retrace
check` would refuse layouts that fit."""


def config(model: Path) -> RunConfig:
    """Return the settings of a run whose step has one mini-batch, in one pack."""
    actor = {
        "ppo_mini_batch_size": SAMPLES,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": SAMPLES * LENGTH,
        "megatron": {"dtype": "bfloat16"},
    }
    return RunConfig.model_validate(
        {
            "data": {
                "train_files": "t.parquet",
                "train_batch_size": SAMPLES,
                "max_prompt_length": PROMPT,
                "max_response_length": LENGTH - PROMPT,
            },
            "actor_rollout_ref": {
                "model": {"path": str(model)},
                "actor": actor,
                "rollout": {"n": 1},
            },
            "trainer": {"experiment_name": "peak", "total_training_steps": 1},
        }
    )


def measure(model: Path, settings: RunConfig) -> int:
    """Train one step, and return the peak memory of tensors in bytes."""
    position = parallel.start(settings.actor_rollout_ref.actor.megatron)
    rank, _ = make_rank(settings, position, model)
    lengths = np.full(SAMPLES, LENGTH)
    samples = make_samples(lengths)
    layout = make_layout(0, np.arange(SAMPLES), lengths - 1, layout_rules(settings, 1))
    ids = dict(enumerate(samples))
    data = SimpleNamespace(
        layout=layout,
        layouts={"update": layout, "log_prob": layout},
        ids=ids,
        samples=samples,
        untrained=frozenset(),
        step=0,
    )
    trained(rank, data)
    rank.optimizer.step()
    peak = torch.cuda.max_memory_allocated()
    parallel.leave()
    return peak


def main() -> int:
    """Print the peak, the estimate and the verdict, and return the exit code."""
    try:
        choose_device("cuda")
    except InputError as error:
        print(f"no measurement: {error}", file=sys.stderr)
        return 2
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29541")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder), "qwen3_moe", dtype=torch.bfloat16, **WIDTHS)
        settings = config(model)
        hf_config = json.loads((model / "config.json").read_text())
        estimate = sum(part.bytes for part in estimate_memory(settings, hf_config).parts) - RUNTIME
        peak = measure(model, settings)
    met = LEAST * estimate <= peak <= estimate
    print(f"peak {peak / 1e9:.2f} GB, estimate {estimate / 1e9:.2f} GB")
    print("met" if met else f"**missed**: peak / estimate is {peak / estimate:.2f}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
