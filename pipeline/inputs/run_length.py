"""The length of a run and its learning-rate schedule, as numbers of steps.

If the length is set in epochs, it is known only after the prompts have been read and filtered. The
length and the schedule are then stored in the settings, which the workers read. A run keeps the
schedule with which it was created, even if its length grows later.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.config.dotted import ABSENT, get
from pipeline.config.keys import is_set, value_at, with_value
from pipeline.config.rules.rates import decay_notes
from pipeline.config.tree import RunConfig

_STEPS = "trainer.total_training_steps"
_ACTOR = "actor_rollout_ref.actor.optim"
_CRITIC = "critic.optim"


def with_run_length(
    config: RunConfig, prompts: int, stored: Mapping[str, Any] | None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Resolve the numbers of steps in the settings, and return the settings and notes.

    As in verl, an epoch has floor(prompts / data.train_batch_size) steps, and total_training_steps
    takes precedence if it is set. The schedule's horizon is total_training_steps unless
    lr_decay_steps is set. If lr_warmup_steps is 0, lr_warmup_steps_ratio gives the warm-up as a
    share of the horizon. An existing run keeps the parts of its schedule that the user does not
    set.

    Args:
        config: Settings of the run.
        prompts: The number of prompts after filtering. It must be enough for one step.
        stored: The settings of an existing run; None for a new one.
    """
    config, notes = _with_steps(config, prompts)
    notes = (*decay_notes(config.actor_rollout_ref.actor.optim), *notes)
    for name in (_ACTOR, _CRITIC) if config.has_critic else (_ACTOR,):
        config, more = _with_schedule(config, name, stored)
        notes = (*notes, *more)
    return config, notes


def _with_schedule(
    config: RunConfig, name: str, stored: Mapping[str, Any] | None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Resolve the schedule of an optimizer, and return the settings and notes.

    `name` is the section with the optimizer's settings.
    """
    decay, warmup = f"{name}.lr_decay_steps", f"{name}.lr_warmup_steps"
    if stored is not None:
        return _with_schedule_of_run(config, stored, decay, warmup), ()
    if value_at(config, decay) is None:
        config = with_value(config, decay, config.trainer.total_training_steps)
    share = value_at(config, f"{warmup}_ratio")
    if value_at(config, warmup) or not share:
        return config, ()
    horizon = value_at(config, decay)
    steps = int(share * horizon)
    note = f"{warmup}_ratio: {share} of {horizon} steps are {steps} steps"
    return with_value(config, warmup, steps), (note,)


def _with_schedule_of_run(
    config: RunConfig, stored: Mapping[str, Any], decay: str, warmup: str
) -> RunConfig:
    """Take from the existing run the schedule settings that the user left open.

    Their values depend on the length that the run had when it was created.
    """
    left_open = {
        decay: value_at(config, decay) is None,
        warmup: not value_at(config, warmup) and bool(value_at(config, f"{warmup}_ratio")),
    }
    for name, is_open in left_open.items():
        if is_open:
            found = get(stored, name)
            # A run that is older than these settings has a constant learning rate and no horizon.
            config = with_value(config, name, None if found is ABSENT else found)
    return config


def _with_steps(config: RunConfig, prompts: int) -> tuple[RunConfig, tuple[str, ...]]:
    epochs, total = config.trainer.total_epochs, config.trainer.total_training_steps
    if is_set(config, _STEPS):
        wins = (
            f"trainer.total_epochs: {epochs} has no effect, because {_STEPS}={total} takes "
            "precedence, as in verl"
        )
        return config, () if epochs is None else (wins,)
    if epochs is None:
        return config, (
            f"{_STEPS}: {total}, because neither it nor trainer.total_epochs is set (verl would "
            "train 30 epochs)",
        )
    batch = config.data.train_batch_size
    steps = prompts // batch * epochs
    note = (
        f"trainer.total_epochs: {epochs} of {prompts // batch} full batches each ({prompts} "
        f"prompts, {batch} per step) are {steps} steps"
    )
    return with_value(config, _STEPS, steps), (note,)
