"""Rules of the learning rate's schedule, which Megatron-core asserts without naming a setting."""

from collections.abc import Iterator

from pipeline.config.optim import Optim

OPTIM = "actor_rollout_ref.actor.optim"
_WSD = f"{OPTIM}.lr_wsd_decay_steps"


def rate_problems(optim: Optim) -> Iterator[str]:
    """Yield rates that contradict each other, and steps that lack or have no meaning."""
    for name, value in (("min_lr", optim.min_lr), ("lr_warmup_init", optim.lr_warmup_init)):
        if value > optim.lr:
            yield (
                f"{OPTIM}.{name}: found {value}, expected at most {OPTIM}.lr={optim.lr}; write "
                "less, or a larger lr"
            )
    if optim.lr_decay_style == "WSD" and optim.lr_wsd_decay_steps is None:
        yield (
            f"{_WSD}: found null, but {OPTIM}.lr_decay_style=WSD decays in the last of "
            f"{OPTIM}.lr_decay_steps; write how many"
        )
    elif optim.lr_decay_style != "WSD" and optim.lr_wsd_decay_steps is not None:
        yield (
            f"{_WSD}: found {optim.lr_wsd_decay_steps}, but {OPTIM}.lr_decay_style is "
            f"{optim.lr_decay_style}; write null, or lr_decay_style=WSD"
        )


def rate_notes(optim: Optim, steps: int) -> Iterator[str]:
    """Yield notes on rates that a run of so many steps never reaches."""
    if optim.lr_warmup_steps >= steps:
        yield (
            f"{OPTIM}.lr_warmup_steps: {optim.lr_warmup_steps} are all of the run's {steps} steps "
            f"or more, so no step has {OPTIM}.lr"
        )
    if optim.min_lr and optim.lr_decay_style == "constant":
        yield (
            f"{OPTIM}.min_lr: {optim.min_lr} has no effect with {OPTIM}.lr_decay_style=constant, "
            "as in Megatron-core"
        )


def decay_notes(optim: Optim) -> Iterator[str]:
    """Yield a note on a horizon of no schedule, before the run's length becomes the horizon."""
    if optim.lr_decay_steps is not None and optim.lr_decay_style == "constant":
        share = "" if not optim.lr_warmup_steps_ratio else " but on lr_warmup_steps_ratio"
        yield (
            f"{OPTIM}.lr_decay_steps: {optim.lr_decay_steps} has no effect{share} with "
            f"{OPTIM}.lr_decay_style=constant"
        )


def decay_problems(optim: Optim) -> Iterator[str]:
    """Yield parts of the schedule that do not fit into lr_decay_steps, once these are known."""
    steps = optim.lr_decay_steps
    if steps is None or optim.lr_decay_style == "constant":
        return
    share = optim.lr_warmup_steps_ratio
    if optim.lr_warmup_steps >= steps and int(share * steps) == optim.lr_warmup_steps:
        yield (
            f"{OPTIM}.lr_warmup_steps_ratio: found {share}, which is {optim.lr_warmup_steps} of "
            f"{OPTIM}.lr_decay_steps={steps} (null: the run's steps), expected fewer; write a "
            "smaller share, or lr_decay_style=constant"
        )
    elif optim.lr_warmup_steps >= steps:
        yield (
            f"{OPTIM}.lr_warmup_steps: found {optim.lr_warmup_steps}, expected fewer than "
            f"{OPTIM}.lr_decay_steps={steps} (null: the run's steps); write fewer, or "
            "lr_decay_style=constant"
        )
    elif optim.lr_wsd_decay_steps is not None:
        most = steps - optim.lr_warmup_steps
        if optim.lr_wsd_decay_steps > most:
            yield (
                f"{_WSD}: found {optim.lr_wsd_decay_steps}, expected at most {most}: "
                f"{OPTIM}.lr_decay_steps={steps} (null: the run's steps) less "
                f"{OPTIM}.lr_warmup_steps={optim.lr_warmup_steps}; write fewer"
            )
