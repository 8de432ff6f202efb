"""Rules for the learning-rate schedule. Megatron-core's own assertions do not name settings."""

from collections.abc import Iterator

from pipeline.config.optim import Optim

OPTIM = "actor_rollout_ref.actor.optim"
_WSD = f"{OPTIM}.lr_wsd_decay_steps"


def rate_problems(optim: Optim) -> Iterator[str]:
    """Yield problems with rates that contradict each other, and with WSD's number of steps."""
    for name, value in (("min_lr", optim.min_lr), ("lr_warmup_init", optim.lr_warmup_init)):
        if value > optim.lr:
            yield (
                f"{OPTIM}.{name}: found {value}, expected at most {OPTIM}.lr={optim.lr}; write "
                "a smaller rate, or a larger lr"
            )
    if optim.lr_decay_style == "WSD" and optim.lr_wsd_decay_steps is None:
        yield (
            f"{_WSD}: found null, but {OPTIM}.lr_decay_style=WSD decays only in the last steps of "
            f"{OPTIM}.lr_decay_steps; write the number of these last steps"
        )
    elif optim.lr_decay_style != "WSD" and optim.lr_wsd_decay_steps is not None:
        yield (
            f"{_WSD}: found {optim.lr_wsd_decay_steps}, but {OPTIM}.lr_decay_style is "
            f"{optim.lr_decay_style}; write null, or lr_decay_style=WSD"
        )


def rate_notes(optim: Optim, steps: int) -> Iterator[str]:
    """Yield a note on a rate that a run of `steps` steps never reaches."""
    if optim.lr_warmup_steps >= steps:
        yield (
            f"{OPTIM}.lr_warmup_steps: {optim.lr_warmup_steps} steps of warm-up cover all {steps} "
            f"steps of the run, so no step uses the full {OPTIM}.lr"
        )


def decay_notes(optim: Optim) -> Iterator[str]:
    """Yield a note if lr_decay_steps is set but the schedule does not use it.

    Call this function before the run's length replaces a null lr_decay_steps.
    """
    if optim.lr_decay_steps is not None and optim.lr_decay_style == "constant":
        share = "" if not optim.lr_warmup_steps_ratio else " except on lr_warmup_steps_ratio"
        yield (
            f"{OPTIM}.lr_decay_steps: {optim.lr_decay_steps} has no effect{share} with "
            f"{OPTIM}.lr_decay_style=constant"
        )


def decay_problems(optim: Optim) -> Iterator[str]:
    """If lr_decay_steps is not null, yield problems with a schedule that does not fit into it."""
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
                f"{OPTIM}.lr_decay_steps={steps} (null: the run's steps) minus "
                f"{OPTIM}.lr_warmup_steps={optim.lr_warmup_steps}; write fewer"
            )
