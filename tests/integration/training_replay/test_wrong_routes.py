"""Routes that are wrong at their source are refused before a weight is touched."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.torchrun import run_ranks
from tests.integration.training_replay.sealed import config_of, make_run
from tests.integration.training_replay.wrong_routes import (
    FAULTS,
    LAYOUTS,
    PROMPTS,
    STALE,
    exchanged,
    spoiled,
)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 found; the other rank found the same, so no rank waits for another."""
    folder = tmp_path_factory.mktemp("wrong")
    swapped: list[str] = []

    def change(step: int, samples: list[Any]) -> list[Any]:
        if FAULTS[step] == "two exchanged":
            swapped.extend(samples[i].id for i in exchanged(samples))
        return spoiled(step, samples)

    make_run(folder / "run", tiny_model, config_of(), len(FAULTS), prompts=PROMPTS, change=change)
    program = "tests.integration.training_replay.wrong_routes"
    run_ranks(program, 2, folder / "run", tiny_model, folder)
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    for name in first:
        assert first[name]["error"] == second[name]["error"], name
    return {**first, "swapped": swapped}


CASES = [(name, step) for name, (_, steps) in LAYOUTS.items() for step in steps]


@pytest.mark.parametrize(("layout", "step"), [case for case in CASES if case[1] in (0, 1)])
def test_shifted_routes_are_refused_by_every_layer(found: dict[str, Any], layout: str, step: int):
    case = found[f"{layout} {step}"]
    assert f"step {step}: the recorded routes do not fit this model" in case["error"]
    assert "agreement of 4 of 4 layers: layer " in case["error"]
    assert "Nothing of the step was trained" in case["error"]
    assert not case["touched"]


@pytest.mark.parametrize("layout", [name for name, step in CASES if step == 2])
def test_one_exchanged_pair_among_many_samples_is_named(found: dict[str, Any], layout: str):
    case = found[f"{layout} 2"]
    assert "agreement of 2 samples: " in case["error"]
    assert all(id in case["error"] for id in found["swapped"])
    assert "layers" not in case["error"]
    assert not case["touched"]


@pytest.mark.parametrize(("layout", "step"), [case for case in CASES if case[1] >= STALE - 1])
def test_right_routes_are_trained_also_by_another_policy_of_the_run(
    found: dict[str, Any], layout: str, step: int
):
    case = found[f"{layout} {step}"]
    assert (case["error"], case["touched"]) == (None, True)
    assert case["metrics"]["replay/unhealthy"] == 0
    assert case["metrics"]["replay/agreement_layer_min"] > 0.5
    assert case["metrics"]["mismatch/kl_native"] is not None  # the first of an attempt
