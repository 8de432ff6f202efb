"""Measure small models on CPU, and count the weights of large models on the meta device.

    rank_weights.py FOLDER      writes FOLDER/measured.json and FOLDER/found.json

The weights of large models are counted for each pipeline stage of a layout. With torch's fake
process group, one process can act as any rank of any number of ranks.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from operators.training.megatron.model import _make_bridge, _make_chunks
from pipeline.config.rules.layout import expert_tensor_parallel_size
from pipeline.config.tree import RunConfig
from tests.exhaustive import sample_or_all
from tests.integration.training_model.measured import measure
from tests.large_models import LAYOUTS, config_of, hf_config

DUPLICATED = ("linear_q_down_proj", "linear_kv_down_proj")
"""Weights that Transformer Engine copies to each tensor-parallel rank; local layers split them."""


def main() -> None:
    """Measure the small models, then count one rank of each stage of each layout."""
    root = Path(sys.argv[1])
    (root / "measured.json").write_text(json.dumps(measure(root)))
    torch.distributed.destroy_process_group()
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("meta")
    found = {}
    for name, (model, settings) in LAYOUTS.items():
        config = config_of(**settings)
        folder = root / model
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(hf_config(model)))
        found[name] = {stage: of_stage(config, folder, stage) for stage in tried(config)}
    (root / "found.json").write_text(json.dumps(found))


def tried(config: RunConfig) -> list[int]:
    """Return pipeline stages to build: the first two and the last; all in make test-all."""
    stages = list(range(_stages(config)))
    return sample_or_all(sorted({*stages[:2], *stages[-1:]}), stages)


def _stages(config: RunConfig) -> int:
    return config.actor_rollout_ref.actor.megatron.pipeline_model_parallel_size


def of_stage(config: RunConfig, folder: Path, stage: int) -> dict[str, int]:
    """Count the dense weights and the expert weights on the first rank of a pipeline stage.

    Args:
        config: The settings.
        folder: The folder with the model's config.json.
        stage: The pipeline stage.
    """
    actor, world = config.actor_rollout_ref.actor, _ranks(config)
    megatron = actor.megatron
    torch.distributed.init_process_group(
        "fake", rank=stage * (world // _stages(config)), world_size=world, store=FakeStore()
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(megatron),
        create_gloo_process_groups=False,
    )
    counted = {"dense": 0, "experts": 0}
    with torch.device("meta"):  # for norms, which ignore the current CUDA device
        chunks = _make_chunks(_make_bridge(folder, actor, tied=None), changes=[])
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            assert parameter.is_meta
            duplicated = any(part in name for part in DUPLICATED)
            copies = megatron.tensor_model_parallel_size if duplicated else 1
            kind = "experts" if ".experts." in name else "dense"
            counted[kind] += parameter.numel() * copies
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return counted


def _ranks(config: RunConfig) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


if __name__ == "__main__":
    main()
