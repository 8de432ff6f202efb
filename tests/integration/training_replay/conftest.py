"""One tiny model and one sealed run for all tests of a session."""

from pathlib import Path

import pytest

from tests.integration.training_replay.sealed import config_of, make_run
from tests.tiny_models import make_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random Qwen3-MoE model with 4 layers, 16 experts and top-4."""
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="session")
def sealed_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with one sealed step; tests must not write to it."""
    folder = tmp_path_factory.mktemp("sealed")
    make_run(folder, tiny_model, config_of(), steps=1)
    return folder
