"""The learning rate over the steps of a run."""


def learning_rate(step: int, lr: float, warmup_steps: int) -> float:
    """Linear warm-up from 0, then constant: lr * min(1, step / warmup_steps).

    `step` counts from 0, so with warm-up the first step's rate is 0: the same as
    transformers.get_constant_schedule_with_warmup, which verl uses.
    """
    if step >= warmup_steps:
        return lr
    return lr * step / warmup_steps
