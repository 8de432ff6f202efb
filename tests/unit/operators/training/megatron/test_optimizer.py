"""Learning rates and weight decay of the steps of a run."""

import math
from types import SimpleNamespace

import pytest

from operators.training.megatron.optimizer import make_rates
from pipeline.config.optim import Optim

STYLES = {
    "constant": [0.2, 0.6, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "linear": [0.2, 0.6, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1],
    "cosine": [
        *(0.2, 0.6),
        *(0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2 for share in (0, 0.25, 0.5, 0.75, 1)),
        0.1,
    ],
    "inverse-square-root": [0.2, 0.6, *(math.sqrt(2 / step) for step in (2, 3, 4, 5, 6)), 0.1],
    "WSD": [0.2, 0.6, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1],
}
"""Rates of steps 0 to 7: warm-up from 0.2 in two steps, then from 1.0 to 0.1 until step 6."""


def rates_of(groups: list[dict] | None = None, **optim):
    optimizer = SimpleNamespace(param_groups=[{}] if groups is None else groups)
    return make_rates(optimizer, Optim.model_validate(optim))


@pytest.mark.parametrize("style", STYLES)
def test_rates_of_each_style(style):
    groups = [{}, {"wd_mult": 0.0}]
    rates = rates_of(
        groups,
        lr=1.0,
        lr_warmup_init=0.2,
        lr_warmup_steps=2,
        lr_decay_style=style,
        lr_decay_steps=6,
        min_lr=0.1,
        lr_wsd_decay_style="linear",
        lr_wsd_decay_steps=2 if style == "WSD" else None,
    )
    found = []
    for step in range(8):
        found.append(rates.set(step))
        assert [group["lr"] for group in groups] == [found[-1]] * 2
    assert found == pytest.approx(STYLES[style])
    assert rates.set(3) == found[3], "a restart begins in the middle"


def test_a_run_without_a_schedule_warms_up_from_zero():
    rates = rates_of(lr=1.0, lr_warmup_steps=4)
    assert [rates.set(step) for step in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert rates_of(lr=1.0).set(0) == 1.0


@pytest.mark.parametrize("everywhere", [True, False])
def test_groups_without_decay(everywhere):
    """Megatron marks norms and biases by wd_mult, which the optimizer by itself does not read."""
    groups = [{"wd_mult": 1.0, "weight_decay": 0.5}, {"wd_mult": 0.0, "weight_decay": 0.5}]
    rates_of(groups, weight_decay=0.5, weight_decay_on_norms=everywhere).set(0)
    assert [group["weight_decay"] for group in groups] == [0.5, 0.5 if everywhere else 0.0]
