"""The trainer refuses wrong recorded routes before it changes any weights."""

import json
import re
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
    """Return the results of rank 0; rank 1 has the same errors, so no rank waits for the other."""
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
def test_shifted_routes_fail_in_every_layer(found: dict[str, Any], layout: str, step: int):
    case = found[f"{layout} {step}"]
    assert f"step {step}: the recorded routes do not fit this model" in case["error"]
    assert "agreement too low in 4 of 4 layers: layer " in case["error"]
    assert "The step was not trained" in case["error"]
    assert not case["touched"]


@pytest.mark.parametrize("layout", [name for name, step in CASES if step == 2])
def test_one_swapped_pair_among_many_samples_is_named(found: dict[str, Any], layout: str):
    case = found[f"{layout} 2"]
    assert re.search(r"agreement too low in 2 of \d+ samples: ", case["error"])
    assert all(id in case["error"] for id in found["swapped"])
    assert "layers" not in case["error"]
    assert not case["touched"]


@pytest.mark.parametrize(("layout", "step"), [case for case in CASES if case[1] >= STALE - 1])
def test_correct_routes_are_also_trained_by_a_later_policy(
    found: dict[str, Any], layout: str, step: int
):
    case = found[f"{layout} {step}"]
    assert (case["error"], case["touched"]) == (None, True)
    assert case["metrics"]["replay/unhealthy"] == 0
    assert case["metrics"]["replay/agreement_layer_min"] > 0.5
    assert case["metrics"]["mismatch/kl_native"] is not None  # the first step of an attempt
