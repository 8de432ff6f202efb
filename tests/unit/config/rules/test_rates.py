"""Schedules that Megatron-core would refuse by an assertion, or silently read otherwise."""

import pytest

from pipeline.config.optim import Optim
from pipeline.config.rules.rates import (
    OPTIM,
    decay_notes,
    decay_problems,
    rate_notes,
    rate_problems,
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"min_lr": 2e-6}, f"{OPTIM}.min_lr: found 2e-06, expected at most {OPTIM}.lr=1e-06"),
        ({"lr_warmup_init": 1.0}, f"{OPTIM}.lr_warmup_init: found 1.0, expected at most"),
        ({"lr_decay_style": "WSD"}, f"{OPTIM}.lr_wsd_decay_steps: found null, but"),
        ({"lr_wsd_decay_steps": 3}, f"{OPTIM}.lr_wsd_decay_steps: found 3, but {OPTIM}.lr_decay_"),
    ],
)
def test_contradictions(settings, expected):
    (problem,) = rate_problems(Optim(**settings))
    assert problem.startswith(expected)
    assert "write" in problem


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_warmup_steps": 10}, f"{OPTIM}.lr_warmup_steps: found 10, expected fewer than"),
        (
            {"lr_decay_style": "WSD", "lr_warmup_steps": 4, "lr_wsd_decay_steps": 7},
            f"{OPTIM}.lr_wsd_decay_steps: found 7, expected at most 6",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_its_horizon(settings, expected):
    fitting = {**settings, "lr_decay_steps": 12}
    assert list(decay_problems(Optim(**{"lr_decay_style": "cosine", **fitting}))) == []
    too_short = {**settings, "lr_decay_steps": 10}
    (problem,) = decay_problems(Optim(**{"lr_decay_style": "cosine", **too_short}))
    assert problem.startswith(expected)


def test_what_is_right():
    optim = Optim(lr_decay_style="WSD", lr_wsd_decay_steps=6, lr_warmup_steps=4, lr_decay_steps=10)
    assert [
        *rate_problems(optim),
        *decay_problems(optim),
        *rate_notes(optim, 10),
        *decay_notes(optim),
    ] == []
    constant = Optim(lr_warmup_steps=10, lr_decay_steps=10)
    assert list(decay_problems(constant)) == []


def test_a_warm_up_as_long_as_the_run():
    (note,) = rate_notes(Optim(lr_warmup_steps=10), 10)
    assert note.startswith(f"{OPTIM}.lr_warmup_steps: 10 are all of the run's 10 steps")
    assert list(rate_notes(Optim(lr_warmup_steps=9), 10)) == []


def test_a_horizon_of_a_constant_rate():
    (note,) = decay_notes(Optim(lr_decay_steps=5))
    assert note.startswith(f"{OPTIM}.lr_decay_steps: 5 has no effect with")


def test_a_share_that_is_all_steps_is_named():
    optim = Optim(
        lr_decay_style="linear", lr_warmup_steps_ratio=1.0, lr_warmup_steps=10, lr_decay_steps=10
    )
    (problem,) = decay_problems(optim)
    assert problem.startswith(f"{OPTIM}.lr_warmup_steps_ratio: found 1.0, which is 10 of")


def test_a_lowest_rate_that_is_never_reached():
    (note,) = rate_notes(Optim(min_lr=1e-7), 10)
    assert note.startswith(f"{OPTIM}.min_lr: 1e-07 has no effect with")
