"""The steps of a run that is given in epochs, and the warm-up that is given as a share of them.

Both are known only once the prompts are read and filtered. From then on they are numbers of steps,
which is what workers read.
"""

from pipeline.config.keys import is_set, with_value
from pipeline.config.tree import RunConfig

_STEPS = "trainer.total_training_steps"
_WARMUP = "actor_rollout_ref.actor.optim.lr_warmup_steps"


def with_run_length(config: RunConfig, prompts: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Settings whose numbers of steps are resolved for a number of prompts, with notes.

    As in verl, an epoch has floor(prompts / data.train_batch_size) steps, total_training_steps wins
    where it is written, and a warm-up's share counts where lr_warmup_steps is 0. There must be
    prompts for one step.
    """
    config, notes = _with_steps(config, prompts)
    optim = config.actor_rollout_ref.actor.optim
    if optim.lr_warmup_steps or not optim.lr_warmup_steps_ratio:
        return config, notes
    total = config.trainer.total_training_steps
    steps = int(optim.lr_warmup_steps_ratio * total)
    note = f"{_WARMUP}_ratio: {optim.lr_warmup_steps_ratio} of {total} steps are {steps} steps"
    return with_value(config, _WARMUP, steps), (*notes, note)


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
