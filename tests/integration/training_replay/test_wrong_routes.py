"""The trainer refuses wrong recorded routes before it changes any weights."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.torchrun import run_ranks
from tests.integration.training_replay.sealed import config_of, make_run
from tests.integration.training_replay.wrong_routes import (
    LAYOUTS,
    NAMES,
    PROMPTS,
    STALE,
    spoiled,
)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of rank 0; rank 1 has the same errors, so no rank waits for the other."""
    folder = tmp_path_factory.mktemp("wrong")
    longest: dict[str, str] = {}

    def change(step: int, samples: list[Any]) -> list[Any]:
        longest[NAMES[step]] = max(samples, key=lambda s: len(s.response_tokens_G)).id
        return spoiled(step, samples)

    make_run(folder / "run", tiny_model, config_of(), len(NAMES), prompts=PROMPTS, change=change)
    program = "tests.integration.training_replay.wrong_routes"
    run_ranks(program, 2, folder / "run", tiny_model, folder)
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    for name in first:
        assert first[name]["error"] == second[name]["error"], name
    return {**first, "longest": longest}


CASES = [(name, step) for name, (_, steps) in LAYOUTS.items() for step in steps]


@pytest.mark.parametrize(("layout", "step"), [case for case in CASES if case[1] < STALE - 1])
def test_wrong_routes_are_refused_without_a_native_pass(
    found: dict[str, Any], layout: str, step: int
):
    """If only one sample is wrong, the error names no other sample."""
    case = found[f"{layout} {step}"]
    assert f"step {step}: the recorded routes do not fit this model" in case["error"]
    assert re.search(r"(layers|samples) \(\d+\): ", case["error"])
    if "of one " in NAMES[step]:
        assert f"samples (1): {found['longest'][NAMES[step]]}, " in case["error"]
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
