"""The policy losses, by verl's names."""

from pipeline.rl.losses.types import LossFunction
from pipeline.rl.losses.vanilla import vanilla

LOSSES: dict[str, LossFunction] = {"vanilla": vanilla}
