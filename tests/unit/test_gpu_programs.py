"""The programs that scripts/gpu_hour.py starts put their tensors on the GPU.

Fake tensors replace the GPU. They have shapes and devices but no values, and an operation
that combines tensors on two devices raises an error, as on a GPU.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from benchmarks import training
from tests import tiny_models
from tests.integration.training_model import layouts, passes, round_trip

GPU = torch.device("meta")  # a CPU build of torch cannot index fake tensors on `cuda`
VOCABULARY = 8


class Chunk(torch.nn.Module):
    """A chunk on the fake GPU that mixes tokens, positions, the padding mask and its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_V = torch.nn.Parameter(torch.empty(VOCABULARY, device=GPU))
        self.called = 0

    def forward(
        self,
        tokens_BN: torch.Tensor,
        positions_BN: torch.Tensor,
        _: None,
        labels: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.called += 1
        mixed_BN = tokens_BN + positions_BN
        for further in (labels, padding_mask):
            mixed_BN = mixed_BN if further is None else mixed_BN + further
        return mixed_BN[..., None] * self.weight_V

    def zero_grad_buffer(self) -> None:
        pass


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model on a fake GPU, whose schedule calls the forward step once."""

    def run(model: Any, micro_batches: int, length: int, **how: Any) -> list[Any]:
        output, finish = how["forward_step_func"](iter(range(micro_batches)), model.chunks[0])
        return [finish(output, non_loss_data=True) if how["forward_only"] else finish(output)]

    monkeypatch.setattr(passes, "run", run)
    monkeypatch.setattr(passes, "gather_from_tensor_model_parallel_region", lambda logits: logits)
    monkeypatch.setattr(passes.parallel_state, "get_pipeline_model_parallel_world_size", lambda: 1)
    optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: (True, None, None))
    with FakeTensorMode():
        yield SimpleNamespace(chunks=[Chunk()], optimizer=optimizer)


def test_passes_compute_on_the_models_device(model: Any):
    logits_BNV = passes.forward_logits(model, torch.zeros(1, 4, dtype=torch.int64))
    assert logits_BNV is not None
    assert (logits_BNV.device.type, logits_BNV.shape) == ("cpu", (1, 4, VOCABULARY))
    passes.train(model, torch.zeros(2, 1, 5, dtype=torch.int64))
    assert model.chunks[0].called == 2


def test_padding_is_counted_on_the_models_device(model: Any, monkeypatch: pytest.MonkeyPatch):
    """Fake tensors have no values, so the function ends when it reads the first count."""
    router = SimpleNamespace(local_tokens_per_expert=torch.zeros(16, device=GPU), topk=4)
    monkeypatch.setattr(round_trip, "routers", lambda _: {1: router})
    model.config = SimpleNamespace(tensor_model_parallel_size=1)
    with pytest.raises(DataDependentOutputException):
        round_trip.tokens_counted(model, torch.zeros(1, round_trip.LENGTH, dtype=torch.int64))
    assert model.chunks[0].called == 1


def test_routers_on_a_gpu_are_compared_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    gates = {f"model.layers.{i}.mlp.gate.weight": torch.full((2, 2), i) for i in range(2)}
    # A tensor on a GPU cannot be compared; only its copy on the CPU can.
    on_gpu = SimpleNamespace(weight=SimpleNamespace(cpu=lambda: torch.ones(2, 2).long()))
    monkeypatch.setattr(round_trip, "load_file", lambda _: gates)
    monkeypatch.setattr(round_trip, "routers", lambda _: {0: on_gpu, 1: on_gpu})
    model: Any = None
    assert round_trip.wrong_routers(model, Path()) == [0]


def test_on_gpus_one_attention_backend_serves_all_families(monkeypatch: pytest.MonkeyPatch):
    """All models in a process use the same backend, and not every backend supports float32."""

    def overrides(layout: str) -> dict[str, Any]:
        return layouts.actor_of(layout).megatron.override_transformer_config

    first_stage = {"num_layers_in_first_pipeline_stage": 1}
    monkeypatch.setattr(layouts, "ON_CPU", False)
    assert overrides("tp2") == {"attention_backend": "auto"}
    assert overrides("pp2_uneven") == {"attention_backend": "auto", **first_stage}
    monkeypatch.setattr(layouts, "ON_CPU", True)
    assert (overrides("tp2"), overrides("pp2_uneven")) == ({}, first_stage)


def test_the_test_of_the_engine_imports_no_adapter_for_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """vLLM's GPU build lacks modules that the adapter imports."""
    name = "tests.integration.rollout.test_engine"
    monkeypatch.setitem(sys.modules, "operators.cpu.vllm_build", None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert importlib.import_module(name).SETTINGS.engine_kwargs.vllm["num_gpu_blocks_override"]


class MeasuredError(Exception):
    """Ends the benchmark at its first measurement."""


@pytest.mark.parametrize(
    ("on_cpu", "longest", "hidden"),
    [(True, range(500, 641), 64), (False, range(8_000, 10_241), 1024)],
)
def test_packing_is_measured_with_enough_work_for_the_device(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, longest: range, hidden: int
):
    """With a tiny model or short samples, a GPU would only be busy starting kernels."""
    found: dict[str, Any] = {"hidden_size": 64}

    def measure(model: Path, samples: Any, lengths_S: Any, way: str, budget: int) -> None:
        found.update(model=model, longest=int(lengths_S.max()), budget=budget)
        raise MeasuredError

    def make_tiny(folder: Path, family: str, dtype: torch.dtype, **widths: int) -> Path:
        found.update(widths)
        return folder

    monkeypatch.setattr(training.without_cuda, "ON_CPU", on_cpu)
    monkeypatch.setattr(training, "measure", measure)
    monkeypatch.setattr(tiny_models, "make_tiny", make_tiny)
    monkeypatch.setattr(sys, "argv", ["training"])
    monkeypatch.setattr(training.os, "environ", {})
    with pytest.raises(MeasuredError):
        training.main()
    assert found["longest"] in longest
    assert found["budget"] == 20_480 // (16 if on_cpu else 1)
    assert found["hidden_size"] == hidden
    assert (found["model"] == training.MODEL) == on_cpu
