"""Learning-rate schedules that Megatron-core would refuse with an assertion or silently change."""

import pytest

from pipeline.config.optim import Optim
from pipeline.config.rules.rates import (
    OPTIM,
    decay_notes,
    decay_problems,
    rate_notes,
    rate_problems,
)
from tests.unit.config.settings import notes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"min_lr": 2e-6}, f"{OPTIM}.min_lr: found 2e-06, expected at most {OPTIM}.lr=1e-06"),
        ({"lr_warmup_init": 1.0}, f"{OPTIM}.lr_warmup_init: found 1.0, expected at most"),
        ({"lr_decay_style": "WSD"}, f"{OPTIM}.lr_wsd_decay_steps: found null, but"),
        ({"lr_wsd_decay_steps": 3}, f"{OPTIM}.lr_wsd_decay_steps: found 3, but {OPTIM}.lr_decay_"),
    ],
)
def test_contradictions_are_refused(settings, expected):
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
def test_a_schedule_that_does_not_fit_its_steps_is_refused(settings, expected):
    fitting = {**settings, "lr_decay_steps": 12}
    assert list(decay_problems(Optim(**{"lr_decay_style": "cosine", **fitting}))) == []
    too_short = {**settings, "lr_decay_steps": 10}
    (problem,) = decay_problems(Optim(**{"lr_decay_style": "cosine", **too_short}))
    assert problem.startswith(expected)


def test_a_valid_schedule_passes():
    optim = Optim(lr_decay_style="WSD", lr_wsd_decay_steps=6, lr_warmup_steps=4, lr_decay_steps=10)
    assert [
        *rate_problems(optim),
        *decay_problems(optim),
        *rate_notes(optim, 10),
        *decay_notes(optim),
    ] == []
    constant = Optim(lr_warmup_steps=10, lr_decay_steps=10)
    assert list(decay_problems(constant)) == []


def test_a_warm_up_as_long_as_the_run_is_noted():
    (note,) = rate_notes(Optim(lr_warmup_steps=10), 10)
    assert note.startswith(f"{OPTIM}.lr_warmup_steps: 10 steps of warm-up cover all 10 steps")
    assert list(rate_notes(Optim(lr_warmup_steps=9), 10)) == []


def test_decay_steps_with_a_constant_rate_are_noted():
    (note,) = decay_notes(Optim(lr_decay_steps=5))
    assert note.startswith(f"{OPTIM}.lr_decay_steps: 5 has no effect with")


def test_a_warm_up_ratio_that_covers_all_steps_is_refused():
    optim = Optim(
        lr_decay_style="linear", lr_warmup_steps_ratio=1.0, lr_warmup_steps=10, lr_decay_steps=10
    )
    (problem,) = decay_problems(optim)
    assert problem.startswith(f"{OPTIM}.lr_warmup_steps_ratio: found 1.0, which is 10 of")


def test_a_minimum_rate_that_is_never_reached_is_noted(tmp_path):
    (note,) = notes(tmp_path, f"{OPTIM}.min_lr=1e-7")
    assert note.startswith(f"{OPTIM}.min_lr: 1e-07 has no effect with")
