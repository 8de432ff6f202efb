"""The estimate against Megatron-core's own models, on the meta device and, small ones, measured."""

import json

import pytest

from pipeline.inputs.sizes.cut import cut_of, rank_weights, stages_of
from pipeline.inputs.sizes.estimate import estimate_memory
from pipeline.model.widths import widths_of
from tests.integration.torchrun import run_ranks
from tests.integration.training_model.measured import CASES, config_of
from tests.large_models import LAYOUTS, hf_config
from tests.large_models import config_of as config_of_large

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """`found`: for each layout and stage the numbers of weights that Megatron's chunks of its first
    rank hold; `measured`: for each small model the bytes of its tensors."""
    folder = tmp_path_factory.mktemp("rank-weights")
    run_ranks("tests.integration.training_model.rank_weights", 1, folder)
    names = ("found", "measured")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_holds_what_is_estimated(found, layout):
    """Exactly: the dense weights and the experts that Megatron builds there."""
    model, settings = LAYOUTS[layout]
    config, widths = config_of_large(**settings), widths_of(hf_config(model))
    stages = stages_of(config, widths)
    assert found["found"][layout]
    for number, counted in found["found"][layout].items():
        weights = rank_weights(widths, cut_of(config), stages[int(number)])
        assert {"dense": weights.dense, "experts": weights.experts} == counted


@pytest.mark.parametrize("case", CASES)
def test_a_small_model_takes_what_is_estimated(found, case):
    """Weights, gradients and optimizer state but for padding; the peak of a pass within 5%,
    recomputed within 10%. Tensors as torch allocates them, on CPU, where attention keeps its
    probabilities."""
    measured = found["measured"][case]
    memory = estimate_memory(config_of(case), measured["config"], local=True)
    estimated = {part.name: part.bytes for part in memory.parts}
    for name in ("weights", "gradients", "optimizer state"):
        assert measured[name] == pytest.approx(estimated.pop(name), rel=1e-3)
    assert measured["checkpoint"] == pytest.approx(memory.host_checkpoint, rel=0.01)
    assert sum(estimated.values()) == pytest.approx(
        measured["pass"], rel=0.1 if "recomputed" in case else 0.05
    )
