"""Compare the memory estimate with the memory of small models and the weights of large ones."""

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
    """Return the program's results.

    `found` gives, for each layout and stage, the number of weights in the chunks of its first rank.
    `measured` gives the sizes in bytes of the tensors of each small model.
    """
    folder = tmp_path_factory.mktemp("rank-weights")
    run_ranks("tests.integration.training_model.rank_weights", 1, folder)
    names = ("found", "measured")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weights_of_each_stage_equal_the_estimate(found, layout):
    """The estimate is exact for the dense weights and the experts that Megatron builds."""
    model, settings = LAYOUTS[layout]
    config, widths = config_of_large(**settings), widths_of(hf_config(model))
    stages = stages_of(config, widths)
    assert found["found"][layout]
    for number, counted in found["found"][layout].items():
        weights = rank_weights(widths, cut_of(config), stages[int(number)])
        assert {"dense": weights.dense, "experts": weights.experts} == counted


@pytest.mark.parametrize("case", CASES)
def test_the_memory_of_a_small_model_fits_the_estimate(found, case):
    """Weights, gradients and optimizer state equal the estimate except for padding.

    The peak of a pass is within 5% of the estimate, or within 10% with recomputation. Tensors are
    measured as torch allocates them on CPU, where attention keeps its probabilities. Saving a
    checkpoint needs at most one copy of a rank's state, and loading works in place, tensor by
    tensor.
    """
    measured = found["measured"][case]
    memory = estimate_memory(config_of(case), measured["config"], local=True)
    estimated = {part.name: part.bytes for part in memory.parts}
    for name in ("weights", "gradients", "optimizer state"):
        assert measured[name] == pytest.approx(estimated.pop(name), rel=1e-3)
    assert measured["weights"] <= measured["saving"] <= 1.01 * memory.host_checkpoint
    assert measured["loading"] <= 3 * measured["largest"]
    assert sum(estimated.values()) == pytest.approx(
        measured["pass"], rel=0.1 if "recomputed" in case else 0.05
    )
