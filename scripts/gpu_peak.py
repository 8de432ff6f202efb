"""The trainer's peak memory on one GPU, against what `retrace check` estimates for it.

A mixture of experts of half a billion random weights takes one step of packed samples in bfloat16:
log-probs, gradients, optimizer. The peak is that of PyTorch's allocator, so the estimate's share of
CUDA's context and NCCL does not count.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.training import PROMPT, make_samples, trained
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
"""An estimate of more than twice the peak refuses what would fit."""
WIDTHS = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def config(model: Path) -> RunConfig:
    """One mini-batch, in one pack."""
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
    """Bytes that tensors took at most during a step."""
    position = parallel.start(settings.actor_rollout_ref.actor.megatron)
    rank, _ = make_rank(settings, position, model)
    lengths = np.full(SAMPLES, LENGTH)
    samples = make_samples(lengths)
    layout = make_layout(0, np.arange(SAMPLES), lengths - 1, layout_rules(settings, 1))
    ids = dict(enumerate(samples))
    data = SimpleNamespace(
        layout=layout,
        logprob_layout=layout,
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
    """Print both and the verdict; the exit code."""
    try:
        choose_device("cuda")
    except InputError as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
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
