"""The estimate's weights of each rank against Megatron-core's own model on the meta device."""

import json

import pytest

from pipeline.inputs.sizes.cut import cut_of, rank_weights, stages_of
from pipeline.model.widths import widths_of
from tests.integration.torchrun import run_ranks
from tests.large_models import LAYOUTS, config_of, hf_config

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By layout: for each stage the numbers that Megatron's chunks of its first rank hold."""
    folder = tmp_path_factory.mktemp("rank-weights")
    run_ranks("tests.integration.training_model.rank_weights", 1, folder)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_holds_what_is_estimated(found, layout):
    """Exactly: the dense weights and the experts that Megatron builds there."""
    model, settings = LAYOUTS[layout]
    config, widths = config_of(**settings), widths_of(hf_config(model))
    stages = stages_of(config, widths)
    assert found[layout]
    for number, counted in found[layout].items():
        weights = rank_weights(widths, cut_of(config), stages[int(number)])
        assert {"dense": weights.dense, "experts": weights.experts} == counted
