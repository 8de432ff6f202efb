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
_WARMUP = "actor_rollout_ref.actor.optim.lr_warmup_steps"
_DECAY = "actor_rollout_ref.actor.optim.lr_decay_steps"


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
    if stored is not None:
        return _with_schedule_of_run(config, stored), notes
    if value_at(config, _DECAY) is None:
        config = with_value(config, _DECAY, config.trainer.total_training_steps)
    optim = config.actor_rollout_ref.actor.optim
    if optim.lr_warmup_steps or not optim.lr_warmup_steps_ratio:
        return config, notes
    horizon = value_at(config, _DECAY)
    steps = int(optim.lr_warmup_steps_ratio * horizon)
    note = f"{_WARMUP}_ratio: {optim.lr_warmup_steps_ratio} of {horizon} steps are {steps} steps"
    return with_value(config, _WARMUP, steps), (*notes, note)


def _with_schedule_of_run(config: RunConfig, stored: Mapping[str, Any]) -> RunConfig:
    """Take what the user left to the run's length from the run: its length may be another now."""
    left_open = {
        _DECAY: value_at(config, _DECAY) is None,
        _WARMUP: not value_at(config, _WARMUP) and bool(value_at(config, f"{_WARMUP}_ratio")),
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
