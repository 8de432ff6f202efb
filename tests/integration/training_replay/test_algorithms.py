"""Every algorithm in the estimator and loss tables trains a model for two steps on two ranks.

All algorithms train on the same sealed samples.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.integration.torchrun import run_ranks
from tests.integration.training_replay.algorithms import BASE, CASES
from tests.integration.training_replay.sealed import config_of, make_run

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of rank 0; the other rank has the same weights and gradient norms."""
    folder = tmp_path_factory.mktemp("algorithms")
    store = make_run(folder / "run", tiny_model, config_of(), steps=2)
    run_ranks("tests.integration.training_replay.algorithms", 2, store.uri, tiny_model, folder)
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    for case in CASES:
        assert first[case]["digests"] == second[case]["digests"], case
        norms = [
            [step["actor/grad_norm"] for step in of[case]["metrics"]] for of in (first, second)
        ]
        assert norms[0] == norms[1], case
    return first


@pytest.mark.parametrize("case", CASES)
def test_an_algorithm_trains(found: dict[str, Any], case: str):
    """Both steps change the weights, all metrics are finite, and the setting has an effect."""
    assert len(set(found[case]["digests"])) == 3
    for metrics in found[case]["metrics"]:
        assert all(math.isfinite(value) for value in metrics.values() if value is not None)
        assert metrics["actor/grad_norm"] > 0
        assert metrics["update/skipped"] == metrics["update/skipped_empty"] == 0
    if case != BASE:
        assert found[case]["digests"][1] != found[BASE]["digests"][1]
