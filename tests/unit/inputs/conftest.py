from pathlib import Path

import pytest

from tests.tiny_models import make_tiny
from tests.unit.inputs.small_inputs import write_inputs


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A model's folder, shared by all tests; a test that changes the model must use a copy."""
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen3_moe_dense_first")


@pytest.fixture
def settings(tmp_path, model) -> Path:
    """The settings file of a run with valid inputs."""
    return write_inputs(tmp_path, model)
