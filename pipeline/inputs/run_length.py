"""The steps of a run that is given in epochs, and the schedule that follows from them.

Both are known only once the prompts are read and filtered. From then on they are numbers of steps,
which is what workers read. A run keeps the schedule that it was created with, also when it is made
longer.
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
    """Settings whose numbers of steps are resolved for a number of prompts, with notes.

    As in verl, an epoch has floor(prompts / data.train_batch_size) steps, total_training_steps wins
    where it is written, the schedule's horizon is total_training_steps unless lr_decay_steps is
    written, and a warm-up's share of it counts where lr_warmup_steps is 0. Where the user wrote
    neither, a run that is there keeps its own: `stored` are its settings. There must be prompts for
    one step.
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
    """Settings with the schedule of an optimizer, `name`, with notes."""
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
    """Take what the user left to the run's length from the run: its length may be another now."""
    left_open = {
        decay: value_at(config, decay) is None,
        warmup: not value_at(config, warmup) and bool(value_at(config, f"{warmup}_ratio")),
    }
    for name, is_open in left_open.items():
        if is_open:
            found = get(stored, name)
            # A run that is older than schedules has a constant rate, and no horizon.
            config = with_value(config, name, None if found is ABSENT else found)
    return config


def _with_steps(config: RunConfig, prompts: int) -> tuple[RunConfig, tuple[str, ...]]:
    epochs, total = config.trainer.total_epochs, config.trainer.total_training_steps
    if is_set(config, _STEPS):
        wins = f"trainer.total_epochs: {epochs} has no effect, {_STEPS}={total} wins as in verl"
        return config, () if epochs is None else (wins,)
    if epochs is None:
        return config, (
            f"{_STEPS}: {total}, as neither it nor trainer.total_epochs is written (verl would "
            "train 30 epochs)",
        )
    batch = config.data.train_batch_size
    steps = prompts // batch * epochs
    note = (
        f"trainer.total_epochs: {epochs} of {prompts // batch} whole batches each ({prompts} "
        f"prompts, {batch} per step) are {steps} steps"
    )
    return with_value(config, _STEPS, steps), (note,)
