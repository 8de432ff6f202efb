"""Measure the memory of one rank with a small model on CPU, as torch allocates its tensors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.profiler import ProfilerActivity, profile

from operators.training.megatron import checkpoint, parallel
from operators.training.megatron.head import output_weight, without_logits
from operators.training.megatron.model import TrainedModel, build_model
from operators.training.megatron.optimizer import parts
from operators.training.passes.logprobs import logprobs_and_entropy
from pipeline.config.tree import RunConfig
from pipeline.store import open_store
from tests.large_models import FULL
from tests.tiny_models import make_tiny

SAMPLES, LENGTH, VOCABULARY = 8, 128, 2048
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", "float32", {}),
    "qwen2_moe": ("qwen2_moe", "float32", {}),
    "deepseek_v3": ("deepseek_v3", "bfloat16", {}),
    "qwen3_moe, recomputed": ("qwen3_moe", "float32", FULL),
}
"""Family, dtype and override_transformer_config of each case."""


def config_of(name: str) -> RunConfig:
    """Return the settings of a case: micro-batches of 8 samples with 128 tokens each."""
    _, dtype, override = CASES[name]
    megatron = {"dtype": dtype, "override_transformer_config": override}
    return RunConfig.model_validate(
        {
            "data": {"max_prompt_length": LENGTH // 2, "max_response_length": LENGTH // 2},
            "actor_rollout_ref": {
                "model": {"path": "model"},
                "actor": {"ppo_micro_batch_size_per_gpu": SAMPLES, "megatron": megatron},
            },
            "trainer": {"experiment_name": "measured"},
        }
    )


def measure(root: Path) -> dict[str, dict[str, Any]]:
    """Return, for each case, the size in bytes of each part and the model's config.json."""
    found = {}
    for name, (family, _, _) in CASES.items():
        actor = config_of(name).actor_rollout_ref.actor
        folder = make_tiny(root / name, family, vocab_size=VOCABULARY, hidden_size=256)
        parallel.start(actor.megatron)
        model = build_model(folder, actor)
        _pass(model)  # creates the buffers that persist
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            _pass(model)
        assert model.optimizer.step()[0]
        found[name] = {
            **_static(model),
            "pass": _peak(profiler),
            **_checkpoint(root / "store" / name, model),
            "config": json.loads((folder / "config.json").read_text()),
        }
        parallel.stop()
    return found


def _pass(model: TrainedModel) -> None:
    """Run the forward and backward passes of one packed micro-batch."""
    tokens_1T = torch.randint(2, VOCABULARY, (1, SAMPLES * LENGTH))
    ends = torch.arange(0, SAMPLES * LENGTH + 1, LENGTH, dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=LENGTH,
        max_seqlen_kv=LENGTH,
    )
    (chunk,) = model.chunks
    with without_logits(model.chunks):
        positions_1T = torch.arange(LENGTH).repeat(SAMPLES)[None]
        hidden_1TH = chunk(tokens_1T, positions_1T, None, packed_seq_params=packed)
    weight = output_weight(model.chunks)
    assert weight is not None
    group = torch.distributed.group.WORLD
    assert group is not None
    logprobs_T, _ = logprobs_and_entropy(hidden_1TH[0], weight, tokens_1T[0], 1.0, group)
    (-logprobs_T.sum()).backward()


def _checkpoint(folder: Path, model: TrainedModel) -> dict[str, int]:
    """Return the peaks of saving and loading a checkpoint, and the largest fp32 tensor's size."""
    store = open_store(str(folder))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as saving:
        checkpoint.save(store, 1, model)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as loading:
        checkpoint.load(store, 1, model)
    largest = max(parameter.numel() for parameter in model.chunks[0].parameters())
    return {"saving": _peak(saving), "loading": _peak(loading), "largest": 4 * largest}


def _peak(profiler: Any) -> int:
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _static(model: TrainedModel) -> dict[str, int]:
    """Return the sizes of weights, gradient buffers and optimizer state, counting storages once."""
    (chunk,) = model.chunks
    weights = _storages(chunk.parameters())
    buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
    gradients = _storages(buffer.grad_data for buffer in buffers)
    state = {}
    for optimizer in parts(model.optimizer):
        inner: Any = optimizer.optimizer
        groups = [p for group in inner.param_groups for p in group["params"]]
        moments = [t for of_one in inner.state.values() for t in of_one.values()]
        state |= _storages(t for t in (*groups, *moments) if torch.is_tensor(t))
    others = {*weights, *gradients}
    return {
        "weights": sum(weights.values()),
        "gradients": sum(gradients.values()),
        "optimizer state": sum(size for key, size in state.items() if key not in others),
    }


def _storages(tensors: Iterator[torch.Tensor] | Any) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
