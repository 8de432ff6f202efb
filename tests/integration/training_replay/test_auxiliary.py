"""A mini-batch's auxiliary loss is the mean over its micro-batches, weighted by their tokens."""

from pathlib import Path

import numpy as np
import pytest

from tests.integration.torchrun import run_ranks
from tests.integration.training_replay.auxiliary import LAYOUTS, alike
from tests.integration.training_replay.sealed import config_of, make_run

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Return the part of the last router's gradient that comes from the loss, for each layout."""
    folder = tmp_path_factory.mktemp("auxiliary")
    make_run(folder / "run", tiny_model, config_of(), 1, routes=False, change=alike)
    program = "tests.integration.training_replay.auxiliary"
    run_ranks(program, 2, folder / "run", tiny_model, folder)
    return dict(np.load(folder / "1.npz"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_the_same_in_every_layout(found: dict[str, np.ndarray], layout: str):
    """The gradient equals autograd's for a single micro-batch, because all samples are equal.

    Each micro-batch then has the same loss, which does not depend on splits, padding, ranks or the
    number of trained tokens. The mean over micro-batches equals this loss.
    """
    expected = found["expected"]
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(
        found[layout], expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max()
    )
