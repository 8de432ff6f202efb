"""The former names of metrics, which the files of older runs contain.

No other module contains former names. Code that reads steps/N/metrics.json passes the metrics
through `named_today`, so that one table can show old and new runs.
"""

from collections.abc import Mapping

Metrics = dict[str, float | None]

STEP = "step"
"""The column of step numbers in tables of metrics; no metric has this name."""

RENAMED = {
    "reward/mean": "critic/rewards/mean",
    "response/length_mean": "response_length/mean",
    "response/length_max": "response_length/max",
    "loss/policy": "actor/pg_loss",
    "loss/kl": "actor/kl_loss",
    "loss/entropy": "actor/entropy",
    "loss/clip_share": "actor/pg_clipfrac",
    "loss/dual_clip_share": "actor/pg_clipfrac_lower",
    "loss/is_weight": "rollout_corr/rollout_is_mean",
    "loss/tokens": "actor/tokens",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
    "time/rollout_s": "timing_s/gen",
    "time/train_s": "timing_s/train",
    "time/logprob_s": "timing_s/log_probs",
    "time/update_s": "timing_s/update_actor",
    "time/trace_write_s": "timing_s/trace_write",
    "time/trace_tail_s": "timing_s/trace_tail",
    "time/trace_wait_s": "timing_s/trace_wait",
}
"""Today's names of metrics whose values are unchanged, keyed by former name."""

NEGATED = {"loss/log_ratio": "actor/ppo_kl"}
"""Metrics whose sign has since been reversed: formerly log(new / old), now log(old / new)."""

SHARES = {
    "response/truncated": "response_length/clip_ratio",
    "response/aborted": "response/aborted_ratio",
}
"""Metrics that used to be sample counts and are now shares of `response/count`."""


def named_today(stored: Mapping[str, float | None]) -> Metrics:
    """Return a step's stored metrics under today's names, whichever version wrote them.

    Raises ValueError for the name of a table's column of step numbers.
    """
    if STEP in stored:
        raise ValueError(f"a metric is named {STEP!r}, as the column of step numbers")
    found: Metrics = {}
    samples = stored.get("response/count")
    for name, value in stored.items():
        if name in NEGATED:
            found[NEGATED[name]] = None if value is None else 0.0 - value
        elif name in SHARES:
            # The oldest runs did not store the number of samples, so the share is unknown.
            found[SHARES[name]] = value / samples if value is not None and samples else None
        else:
            found[RENAMED.get(name, name)] = value
    return found
