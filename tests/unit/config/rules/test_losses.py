"""Loss settings that contradict each other are refused; those that the loss does not read are
noted."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.actor import Actor
from pipeline.config.rules.check import config_notes
from pipeline.config.rules.losses import loss_notes, loss_problems
from pipeline.config.tree import RunConfig
from pipeline.rl.custom import LOSS, CustomError, load_custom
from pipeline.rl.loss_table import LOSSES
from tests.unit.config.settings import load_error

ACTOR = "actor_rollout_ref.actor"
MODE = f"{ACTOR}.policy_loss.loss_mode"


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("gsop", "did you mean gspo?"),
        ("klcov", "did you mean kl_cov?"),
        ("gmpo", "did you mean geo_mean?"),
        ("ppo", "did you mean vanilla?"),
        ("mine.py", "add the name of its function: mine.py:my_function"),
    ],
)
def test_the_message_for_an_unknown_loss_names_the_nearest(tmp_path: Path, written: str, fix: str):
    (problem,) = load_error(tmp_path, f"{MODE}={written}")
    names = f"expected one of {', '.join(LOSSES)}, or path/to/file.py:function; {fix}"
    assert problem.startswith(f"{MODE}: found {written!r} (text), {names}")


def test_a_function_with_the_wrong_parameters_is_refused():
    with pytest.raises(CustomError, match=r"as mine\(tokens, settings\); declare these 2"):
        load_custom(b"def mine(tokens): 1", "mine", LOSS)
    with pytest.raises(CustomError, match="found functions other, expected one named mine"):
        load_custom(b"def other(tokens, settings): 1", "mine", LOSS)
    load_custom(b"def mine(tokens, settings, scale=2.0): 1", "mine", LOSS)


def test_a_divisor_without_its_mode_is_refused():
    (problem,) = loss_problems(Actor(loss_scale_factor=512, loss_agg_mode="token-mean"))
    assert problem.startswith(f"{ACTOR}.loss_scale_factor: found 512.0, but only ")
    assert problem.endswith(
        "the mode is token-mean; write null, or loss_agg_mode=seq-mean-token-sum-norm"
    )
    assert not [
        *loss_problems(Actor(loss_scale_factor=512, loss_agg_mode="seq-mean-token-sum-norm"))
    ]


def test_bounds_without_values_between_them_are_refused():
    actor = Actor.model_validate({"policy_loss": {"clip_cov_lb": 5.0}})
    (problem,) = loss_problems(actor)
    assert problem.startswith(f"{ACTOR}.policy_loss.clip_cov_lb: found 5.0, expected less than ")


def notes_on(actor: dict[str, Any]) -> list[str]:
    """Return all notes on a run with these settings of the actor."""
    policy = {"model": {"path": "model"}, "actor": actor}
    settings = {"actor_rollout_ref": policy, "trainer": {"experiment_name": "test"}}
    return config_notes(RunConfig.model_validate(settings))


@pytest.mark.parametrize("mode", LOSSES)
def test_settings_that_a_loss_does_not_read_are_noted(mode: str):
    """The test changes every setting that any loss reads. Notes must name exactly those settings
    that the chosen loss does not read."""
    moved = {
        "clip_ratio": 0.3,
        "clip_ratio_low": 0.1,
        "clip_ratio_high": 0.4,
        "clip_ratio_c": 9.0,
        "tau_pos": 2.0,
        "tau_neg": 2.0,
    }
    inner = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.5, "clip_cov_ub": 9.0}
    inner |= {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.5}
    policy_loss = {"loss_mode": mode, **inner}
    names = {*moved, *(f"policy_loss.{name}" for name in inner)}
    assert names == {name for loss in LOSSES.values() for name in loss.reads}
    aggregation = LOSSES[mode].aggregation or "token-mean"
    found = notes_on({**moved, "policy_loss": policy_loss, "loss_agg_mode": aggregation})
    notes = [note for note in found if "are set" not in note]
    assert all(note.endswith(f"has no effect with {MODE}={mode}") for note in notes)
    noted = {note.split(":")[0].removeprefix(f"{ACTOR}.") for note in notes}
    assert noted == names - {*LOSSES[mode].reads}


def test_a_clip_range_that_two_other_settings_replace_is_noted():
    both = {"clip_ratio": 0.3, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    (note,) = notes_on(both)
    assert note == (
        f"{ACTOR}.clip_ratio: 0.3 has no effect, because clip_ratio_low and clip_ratio_high are set"
    )
    assert notes_on(both | {"clip_ratio_high": None}) == []


def test_defaults_and_users_functions_cause_no_notes():
    assert notes_on({}) == []
    assert notes_on({"policy_loss": {"loss_mode": "mine.py:loss"}, "tau_pos": 2.0}) == []


def test_a_mode_that_the_loss_ignores_is_noted():
    actor = Actor.model_validate(
        {"policy_loss": {"loss_mode": "gspo"}, "use_kl_loss": True, "entropy_coeff": 0.1}
    )
    (note,) = loss_notes(actor)
    assert note == (
        f"{ACTOR}.loss_agg_mode: the loss gspo is always aggregated with seq-mean-token-mean, as "
        "in verl; token-mean applies to the entropy and the KL loss"
    )
