"""All ranks skip mini-batches without finite gradients, up to a limit, and no weight is damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.torchrun import run_ranks
from tests.integration.training_replay.nonfinite import LAYOUTS, WITHOUT_ADVANTAGE

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(
    sealed_run: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return the results of rank 0; the other rank has the same results."""
    folder = tmp_path_factory.mktemp("nonfinite")
    program = "tests.integration.training_replay.nonfinite"
    run_ranks(program, 2, sealed_run, tiny_model, folder)
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    for name in first:
        for key in ("error", "finite", "touched"):
            assert first[name][key] == second[name][key], (name, key)
    return first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mini_batch_is_skipped_and_the_others_are_trained(found: dict[str, Any], layout: str):
    for case, skipped in (("one", 1), ("one, without clipping", 1), ("three", 3)):
        result = found[f"{layout}: {case}"]
        assert (result["error"], result["finite"], result["touched"]) == (None, True, True)
        metrics = result["metrics"]
        assert metrics["update/skipped"] == skipped
        assert metrics["actor/grad_norm"] > 0
        assert all(value is None or value == value for value in metrics.values()), "a metric is NaN"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mini_batch_without_tokens_is_skipped(found: dict[str, Any], layout: str):
    """An optimizer step would change the weights by weight decay."""
    result = found[f"{layout}: empty"]
    assert (result["error"], result["touched"]) == (None, False)
    metrics = result["metrics"]
    assert (metrics["update/skipped_empty"], metrics["update/skipped"]) == (4, 0)
    assert (metrics["actor/pg_loss"], metrics["actor/grad_norm"], metrics["actor/tokens"]) == (
        None,
        None,
        0,
    )
    assert found[f"{layout}: one"]["metrics"]["update/skipped_empty"] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mini_batch_without_advantages_is_not_skipped(found: dict[str, Any], layout: str):
    """As in verl, weight decay changes the weights although the gradient is 0."""
    result = found[f"{layout}: {WITHOUT_ADVANTAGE}"]
    assert (result["error"], result["touched"]) == (None, True)
    metrics = result["metrics"]
    assert (metrics["update/skipped_empty"], metrics["update/skipped"]) == (0, 0)
    assert metrics["actor/grad_norm"] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_too_many_skips_or_a_forbidden_skip_end_the_run(found: dict[str, Any], layout: str):
    for case, number, reason in (
        ("four", 3, "the last 4 mini-batches had no finite gradients, so"),
        ("not allowed", 0, "skip_nonfinite=False"),
    ):
        result = found[f"{layout}: {case}"]
        assert f"step 0, mini-batch {number}: gradient norm nan" in result["error"]
        assert reason in result["error"]
        assert not result["touched"]
