"""The probe of overridden fields asks the installed Megatron-core and vLLM."""

import io
import json
from typing import Any

import pytest

from operators import probe
from tests.paths import ROOT
from tests.unit.config.settings import ACTOR, MEGATRON, OVERRIDE, ROLLOUT, load

MODEL = ROOT / "examples/addition/model"
FULL = f"{OVERRIDE}.recompute_granularity=full"


@pytest.fixture
def problems(tmp_path, monkeypatch) -> Any:
    def found(*settings: str, folder: str | None = str(MODEL)) -> list[str]:
        config = load(tmp_path, *settings).config
        given = {"settings": config.model_dump(mode="json"), "folder": folder}
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(given)))
        problems: list[str] = probe.overrides()["problems"]
        return problems

    return found


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (f"{OVERRIDE}.moe_router_fusoin=true", "did you mean moe_router_fusion?"),
        (f"{MEGATRON}.override_ddp_config.bucket_sise=1", "did you mean bucket_size?"),
        (f"{ACTOR}.optim.override_optimizer_config.pin_cpu_grads=3", "expected true or false"),
        (f"{ROLLOUT}.engine_kwargs.vllm.block_sise=1", "did you mean block_size?"),
    ],
)
def test_unknown_and_mistyped_fields_are_named(problems, setting, expected):
    (problem,) = problems(setting)
    assert problem.startswith(setting.partition("=")[0])
    assert expected in problem


def test_combinations_that_megatron_refuses_are_named(problems):
    (problem,) = problems(FULL)
    assert f"with {OVERRIDE}): Megatron-core refuses the combination: Using" in problem
    assert problems(FULL, folder=None) == []  # the model is not known
    valid = (f"{OVERRIDE}.recompute_method=uniform", f"{OVERRIDE}.recompute_num_layers=1")
    assert problems(FULL, *valid) == []


@pytest.mark.parametrize(
    "setting",
    [
        f"{ACTOR}.optim.override_optimizer_config.use_precision_aware_optimizer=true",
        f"{OVERRIDE}={{fp8: hybrid, recompute_granularity: selective, "
        "recompute_modules: [layernorm], fp8_recipe: tensorwise}",
    ],
)
def test_refusals_for_lack_of_a_package_do_not_count(problems, setting):
    """The training ranks may have Transformer Engine."""
    assert problems(setting) == []


def test_packages_that_are_not_installed_are_skipped(problems, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert problems(f"{OVERRIDE}.moe_router_fusoin=true") == []
