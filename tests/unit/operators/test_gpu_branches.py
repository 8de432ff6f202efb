"""Every branch that only GPUs take is reached by a test, by fakes where there is no GPU."""

import ast
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import InputError
from tests.paths import ROOT

_TE = "tests/integration/training_model/test_te_layers.py::test_parameters_are_those_on_record"
_HERE = __name__
_ENGINE = "tests/unit/operators/rollout/test_engine_arguments.py"
REACHED = {
    "training/megatron/bridges.py::_get_transformer_layer_spec": _TE,
    "training/megatron/local_layers.py::__init__": _TE,
    "training/megatron/model.py::_make_bridge": _TE,
    "training/megatron/model.py::_make_chunks": _TE,
    "training/megatron/cpu_megatron.py::adapt": f"{_HERE}::test_nothing_is_adapted_on_gpus",
    "training/megatron/optimizer.py::wrap_for_training": f"{_HERE}::test_gpus_refuse_nothing",
    "training/megatron/parallel.py::start": f"{_HERE}::test_ranks_join_over_nccl",
    "training/offload.py::to_host": f"{_HERE}::test_what_leaves_a_gpu_is_pinned",
    "rollout/engine.py::__init__": f"{_ENGINE}::test_an_engine_of_the_other_build",
    "rollout/engine.py::_require_build": f"{_ENGINE}::test_an_engine_of_the_other_build",
    "rollout/engine.py::_start": f"{_ENGINE}::test_on_gpus_the_engine_records_routes_by_itself",
    "rollout/engine.py::load": f"{_HERE}::test_on_gpus_no_experts_are_repacked",
    "rollout/engine.py::name": f"{_HERE}::test_the_engine_says_which_build_it_is",
    "probe.py::all_reduce": f"{_HERE}::test_the_all_reduce_of_gpus_is_over_nccl",
    "probe.py::vllm": f"{_HERE}::test_vllm_on_gpus_is_asked_for_its_argument_for_routes",
}
"""Function with such a branch, and the test that takes it."""

_MARKS = {"ON_CPU", "_on_cpu", "on_cpu"}


def branches() -> Iterator[str]:
    """The functions that ask whether there are GPUs."""
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
    # Another one? Take it in a test by fakes, and list it with that test.
    assert set(branches()) - {"training/megatron/cpu_megatron.py::__torch_function__"} == set(
        REACHED
    )
    for place in REACHED.values():
        path, _, test = place.replace(__name__, f"{__name__.replace('.', '/')}.py").partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), place


def test_nothing_is_adapted_on_gpus(monkeypatch: pytest.MonkeyPatch):
    from operators.training.megatron import cpu_megatron

    monkeypatch.setattr(cpu_megatron, "ON_CPU", False)
    monkeypatch.setattr(cpu_megatron, "_adapted", False)
    monkeypatch.setattr(cpu_megatron, "_send_cuda_calls_to_cpu", lambda: pytest.fail("adapted"))
    cpu_megatron.adapt()
    assert cpu_megatron._adapted is False


def test_ranks_join_over_nccl(monkeypatch: pytest.MonkeyPatch):
    """Each on the GPU of its local rank, of those that the launcher gave to the gang."""
    import torch

    from operators.training.megatron import cpu_megatron, parallel

    called: list[Any] = []

    class JoinedError(Exception):
        pass

    def join(backend: str, *_: Any, **__: Any) -> None:
        called.append(backend)
        raise JoinedError

    monkeypatch.setattr(cpu_megatron, "ON_CPU", False)
    monkeypatch.setattr(torch.cuda, "set_device", called.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "3")
    with pytest.raises(JoinedError):
        parallel.start(SimpleNamespace())
    assert called == [3, "nccl"]


def test_gpus_refuse_nothing(monkeypatch: pytest.MonkeyPatch):
    """What needs CUDA is refused on the CPU alone."""
    from operators.training.megatron import cpu_megatron, optimizer
    from pipeline.config.actor import Actor

    made: Any = SimpleNamespace(scale_loss=None)
    config: Any = SimpleNamespace()
    monkeypatch.setattr(cpu_megatron, "ON_CPU", False)
    monkeypatch.setattr(optimizer, "cuda_problems", lambda _: ["it needs CUDA"])
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda *_: made)
    assert optimizer.wrap_for_training([], config, Actor()) == ([], made)
    monkeypatch.setattr(cpu_megatron, "ON_CPU", True)
    with pytest.raises(InputError, match="it needs CUDA"):
        optimizer.wrap_for_training([], config, Actor())


def test_what_leaves_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch):
    """Pages that the GPU's copy engine reaches; the CPU's own need none."""
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


def engine_on_gpus() -> Any:
    from operators.rollout.engine import RolloutEngine

    engine = object.__new__(RolloutEngine)
    engine._on_cpu = False
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


def test_the_engine_says_which_build_it_is(monkeypatch: pytest.MonkeyPatch):
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"of {package}")
    assert engine_on_gpus().name == "vllm of vllm"


@pytest.mark.parametrize("summed", [3.0, 2.0])
def test_the_all_reduce_of_gpus_is_over_nccl(monkeypatch: pytest.MonkeyPatch, summed: float):
    """The second of two ranks, on the GPU of its local rank; 1 + 2 is 3, or the probe raises."""
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
        with pytest.raises(ValueError, match=r"the sum over 2 ranks is 2.0, not 3.0"):
            probe.all_reduce()


@pytest.mark.parametrize("known", [True, False])
def test_vllm_on_gpus_is_asked_for_its_argument_for_routes(
    monkeypatch: pytest.MonkeyPatch, known: bool
):
    """vLLM from its package index; a release that does not know the argument is a finding."""
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
