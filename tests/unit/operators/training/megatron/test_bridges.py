"""The model families with a bridge."""

from operators.training.megatron.bridges import BRIDGES
from pipeline.model.families import FAMILIES


def test_every_supported_family_has_a_bridge():
    """`retrace check` accepts exactly these families, so the trainer must be able to build them."""
    assert set(BRIDGES) == set(FAMILIES)
