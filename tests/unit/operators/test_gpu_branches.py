"""Each branch that is taken only on GPUs has a test that reaches it; fakes replace missing GPUs."""

import ast
import json
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config.actor import Megatron
from pipeline.errors import InputError
from tests.large_models import hf_config
from tests.paths import ROOT

_TE = "tests/integration/training_model/test_te_layers.py::test_parameters_equal_the_recorded_ones"
_HERE = __name__
_ENGINE = "tests/unit/operators/rollout/test_engine_arguments.py"
REACHED = {
    "training/megatron/bridges.py::_get_transformer_layer_spec": _TE,
    "training/megatron/weights.py::__init__": _TE,
    "training/megatron/model.py::_make_bridge": _TE,
    "training/megatron/model.py::_make_chunks": _TE,
    "training/megatron/optimizer.py::wrap_for_training": (
        f"{_HERE}::test_settings_that_need_cuda_are_refused_only_on_the_cpu"
    ),
    "training/megatron/parallel.py::start": f"{_HERE}::test_ranks_join_over_nccl",
    "training/speed.py::memory_peaks": f"{_HERE}::test_the_peaks_of_gpu_memory_are_metrics",
    "training/speed.py::find_devices": f"{_HERE}::test_the_share_of_a_gpus_peak_speed_is_a_metric",
    "training/batches/upload.py::uploaded": f"{_HERE}::test_arrays_are_copied_from_pinned_memory",
    "training/offload.py::to_host": f"{_HERE}::test_copies_of_gpu_tensors_are_pinned",
    "rollout/engine.py::__init__": f"{_ENGINE}::test_a_build_for_another_device_is_refused",
    "rollout/engine.py::_require_build": f"{_ENGINE}::test_a_build_for_another_device_is_refused",
    "rollout/engine.py::_start": f"{_ENGINE}::test_on_gpus_vllm_records_routes_natively",
    "rollout/engine.py::load": f"{_HERE}::test_on_gpus_no_experts_are_repacked",
    "rollout/engine.py::name": f"{_HERE}::test_the_engines_name_contains_the_version_of_its_build",
    "probe.py::all_reduce": f"{_HERE}::test_gpus_all_reduce_over_nccl",
    "probe.py::vllm": f"{_HERE}::test_the_probe_of_vllm_on_gpus_checks_the_argument_for_routes",
}
"""The functions with a GPU branch, each with the test that takes the branch."""

_MARKS = {"ON_CPU", "_on_cpu", "on_cpu", "is_available"}


def branches() -> Iterator[str]:
    """Yield the functions that check for GPUs."""
    for path in sorted((ROOT / "operators").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            names = {
                getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(function)
            }
            texts = {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}
            if names & _MARKS or {"cuda", "nccl"} & texts:
                yield f"{path.relative_to(ROOT / 'operators')}::{function.name}"


def test_each_branch_has_its_test():
    # If this fails, add a test that takes the new branch with fakes, and list both in REACHED.
    found = {place for place in branches() if not place.startswith("cpu/")}
    assert found == set(REACHED)
    for place in REACHED.values():
        path, _, test = place.replace(__name__, f"{__name__.replace('.', '/')}.py").partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), place


def test_megatron_is_not_adapted_on_gpus(monkeypatch: pytest.MonkeyPatch):
    from operators.cpu import without_cuda

    monkeypatch.setattr(without_cuda, "ON_CPU", False)
    monkeypatch.setattr(without_cuda, "_adapted", False)
    monkeypatch.setattr(without_cuda, "_send_cuda_calls_to_cpu", lambda: pytest.fail("adapted"))
    without_cuda.adapt()
    assert without_cuda._adapted is False


def test_ranks_join_over_nccl(monkeypatch: pytest.MonkeyPatch):
    """Each rank selects a GPU by its local rank from the GPUs that are assigned to its gang."""
    import torch

    from operators.cpu import without_cuda
    from operators.training.megatron import parallel

    called: list[Any] = []

    class JoinedError(Exception):
        pass

    def join(backend: str, *_: Any, **__: Any) -> None:
        called.append(backend)
        raise JoinedError

    monkeypatch.setattr(without_cuda, "ON_CPU", False)
    monkeypatch.setattr(torch.cuda, "set_device", called.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "3")
    monkeypatch.setitem(os.environ, "PYTORCH_ALLOC_CONF", "backend:native")
    for tensor_parallel, connections in ((1, None), (2, "1")):
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        with pytest.raises(JoinedError):
            parallel.start(Megatron(tensor_model_parallel_size=tensor_parallel))
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections
    assert called == [3, "nccl"] * 2
    assert os.environ["PYTORCH_ALLOC_CONF"] == "backend:native"  # as the user set it


def test_arrays_are_copied_from_pinned_memory(monkeypatch: pytest.MonkeyPatch):
    """A copy from other memory would wait for the GPU."""
    import torch

    from operators.training.batches.upload import uploaded

    copied: list[Any] = []
    pinned = SimpleNamespace(to=lambda device, non_blocking: copied.append((device, non_blocking)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned)
    uploaded(np.arange(3), torch.device("cuda", 1))
    assert copied == [(torch.device("cuda", 1), True)]
    assert uploaded(np.arange(3), torch.device("cpu")).tolist() == [0, 1, 2]


def test_settings_that_need_cuda_are_refused_only_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """A fake supplies the problem, so the test does not depend on a real setting."""
    from operators.cpu import without_cuda
    from operators.training.megatron import optimizer
    from pipeline.config.actor import Actor

    made: Any = SimpleNamespace(scale_loss=None)
    config: Any = SimpleNamespace()
    monkeypatch.setattr(without_cuda, "ON_CPU", False)
    monkeypatch.setattr(optimizer, "cuda_problems", lambda _: ["it needs CUDA"])
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda *_: made)
    assert optimizer.wrap_for_training([], config, Actor()) == ([], made)
    monkeypatch.setattr(without_cuda, "ON_CPU", True)
    with pytest.raises(InputError, match="it needs CUDA"):
        optimizer.wrap_for_training([], config, Actor())


def test_copies_of_gpu_tensors_are_pinned(monkeypatch: pytest.MonkeyPatch):
    """The GPU's copy engine needs pinned pages; copies of CPU tensors do not."""
    import torch

    from operators.training import offload

    pinned: list[bool] = []
    empty = torch.empty

    def allocate(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(offload, "_bytes", lambda _: torch.zeros(8, dtype=torch.uint8))
    for kind in ("cuda", "cpu"):
        storage: Any = SimpleNamespace(
            nbytes=lambda: 8,
            data_ptr=lambda: 1,
            device=SimpleNamespace(type=kind),
            resize_=lambda _: None,
        )
        tensor: Any = SimpleNamespace(untyped_storage=lambda storage=storage: storage)
        offload.Offloaded(lambda tensor=tensor: [tensor], keep=True).to_host()
    assert pinned == [True, False]


def test_the_peaks_of_gpu_memory_are_metrics(monkeypatch: pytest.MonkeyPatch):
    import torch

    from operators.training.speed import memory_peaks

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4 << 30)
    peaks = memory_peaks()
    assert peaks["perf/max_memory_allocated_gb"] == 3.0
    assert peaks["perf/max_memory_reserved_gb"] == 4.0


def test_the_share_of_a_gpus_peak_speed_is_a_metric(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Two ranks, each with an H100, train on 2,000 tokens in total and spend half of the time on
    updates."""
    import pyarrow as pa
    import torch

    from operators.training.speed import find_devices
    from pipeline.model.flops import forward_flops

    (tmp_path / "config.json").write_text(json.dumps(hf_config("qwen3-30b-a3b")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    devices = find_devices(2, 1, tmp_path)
    assert devices.peak == 989e12
    columns = pa.table({"rows_total": [999, 999]})
    names = ("timing_s/step", "timing_s/train", "timing_s/update_actor", "timing_s/old_log_prob")
    times = dict(zip(names, (10.0, 8.0, 5.0, 2.0), strict=True))
    found = devices.speed(columns, 1, {"perf/total_num_tokens": 2000.0, **times})
    forward = forward_flops(devices.widths, columns["rows_total"].to_numpy())
    assert found["perf/mfu/actor"] == pytest.approx(3 * forward / 5 / (2 * 989e12))
    assert found["perf/mfu/actor_infer"] == pytest.approx(forward / 2 / (2 * 989e12))


def engine_on_gpus() -> Any:
    from operators.rollout.engine import RolloutEngine

    engine = object.__new__(RolloutEngine)
    engine._on_cpu = False
    engine._finish_steps = lambda version: None  # test_steps_in_flight.py
    return engine


def test_on_gpus_no_experts_are_repacked(tmp_path):
    engine, called = engine_on_gpus(), []
    engine._tensors = frozenset()
    engine._llm = SimpleNamespace(
        collective_rpc=lambda what, **_: called.append(what),
        reset_prefix_cache=lambda: True,
        update_weight_version=called.append,
    )
    engine.load(tmp_path, 3)
    assert called == ["reload_weights", "3"]


def test_on_gpus_the_engines_workers_load_some_tensors(tmp_path):
    engine, called = engine_on_gpus(), []
    header = json.dumps({name: {} for name in ("a.b", "a.c", "d.e")}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    engine._tensors = frozenset({"a.b", "a.c", "d.e"})

    def rpc(what, args=(), kwargs=None):
        called.append((what if isinstance(what, str) else what.__name__, args, kwargs))

    engine._llm = SimpleNamespace(
        collective_rpc=rpc,
        reset_prefix_cache=lambda: True,
        update_weight_version=called.append,
    )
    engine.load(tmp_path, 3, {"a.c"})
    engine.load(tmp_path, 4, {"a.c", "d.e"})
    whole = ("reload_weights", (), {"weights_path": str(tmp_path)})
    assert called == [("load_tensors", (str(tmp_path), ["a.b", "a.c"]), None), "3", whole, "4"]


def test_the_engines_name_contains_the_version_of_its_build(monkeypatch: pytest.MonkeyPatch):
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"of {package}")
    assert engine_on_gpus().name == "vllm of vllm"


@pytest.mark.parametrize("summed", [3.0, 2.0])
def test_gpus_all_reduce_over_nccl(monkeypatch: pytest.MonkeyPatch, summed: float):
    """The test acts as the second of two ranks, on the GPU of its local rank. The probe raises an
    error unless the sum of 1 and 2 is 3."""
    import torch

    from operators import probe

    called: list[Any] = []
    full = torch.full

    def on_cpu(size: tuple[int, ...], value: float, device: str) -> torch.Tensor:
        called.append((value, device))
        return full(size, value)

    group = torch.distributed
    monkeypatch.setattr(torch, "full", on_cpu)
    monkeypatch.setattr(torch.cuda, "set_device", called.append)
    monkeypatch.setattr(group, "init_process_group", lambda backend, **_: called.append(backend))
    monkeypatch.setattr(group, "all_reduce", lambda numbers_N: numbers_N.fill_(summed))
    monkeypatch.setattr(group, "destroy_process_group", lambda: called.append("left"))
    monkeypatch.setattr(sys, "argv", ["probe", "all-reduce", "cuda"])
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    if summed == 3:
        assert probe.all_reduce()["backend"] == "nccl"
        assert called == [1, "nccl", (2.0, "cuda"), "left"]
    else:
        with pytest.raises(ValueError, match=r"the sum over 2 ranks is 2.0, expected 3.0"):
            probe.all_reduce()


@pytest.mark.parametrize("known", [True, False])
def test_the_probe_of_vllm_on_gpus_checks_the_argument_for_routes(
    monkeypatch: pytest.MonkeyPatch, known: bool
):
    """On GPUs, vLLM comes from a package index and may be a release without this argument. The
    probe reports such a release."""
    from operators import probe
    from operators.rollout import vllm_environment

    asked: list[dict[str, Any]] = []

    def new(*, model: str, enable_return_routed_experts: bool) -> None:
        asked.append({"model": model, "routes": enable_return_routed_experts})

    def old(*, model: str) -> None:
        asked.append({"model": model})

    platform = SimpleNamespace(is_cpu=lambda: False)
    fakes: dict[str, Any] = {
        "vllm": SimpleNamespace(__version__="0.99"),
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "vllm.engine.arg_utils": SimpleNamespace(EngineArgs=new if known else old),
    }
    monkeypatch.setattr(vllm_environment, "prepare_environment", lambda **_: None)
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    found = probe.vllm()
    assert (found["version"], found["platform"]) == ("0.99", "cuda")
    if known:
        assert found["routes"] is None
        assert asked == [{"model": "", "routes": True}]
    else:
        assert "unexpected keyword argument 'enable_return_routed_experts'" in found["routes"]
        assert not asked
