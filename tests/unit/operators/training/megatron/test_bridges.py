"""Which families have a bridge."""

from operators.training.megatron.bridges import BRIDGES
from pipeline.model.families import FAMILIES


def test_a_bridge_for_each_family_that_is_trained():
    """`retrace check` accepts these, so the trainer must be able to build them, and no others."""
    assert set(BRIDGES) == set(FAMILIES)
