"""A comparison of a run's metrics with the table of metrics."""

from collections.abc import Iterable

from pipeline.metrics.table import find_metric, names_of_every_step


def against_the_table(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the metrics missing from a step, and those missing from the table."""
    found = set(names)
    lacking = sorted(set(names_of_every_step()) - found)
    return lacking, sorted(name for name in found if find_metric(name) is None)


MEASURED = (
    "critic/rewards/mean",
    "mismatch/kl",
    "mismatch/kl_native",
    "mismatch/extreme_share",
    "mismatch/extreme_share_native",
    "replay/coverage",
    "replay/agreement",
    "replay/rows",
    "replay/rows_native",
    "replay/bytes_fetched",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/lr",
    "response/count",
    "response_length/clip_ratio",
    "response/aborted_ratio",
    "response_length/mean",
    "timing_s/gen",
    "timing_s/train",
    *("timing_s/trace_wait", "timing_s/trace_write", "timing_s/trace_tail"),
    *("timing_s/old_log_prob", "timing_s/update_actor", "timing_s/update_weights", "timing_s/step"),
    *("critic/rewards/std", "reward/groups", "reward/groups_rejected"),
    *("response_length/p50", "prompt_length/mean"),
    *("perf/throughput", "perf/rollout_tokens_per_s", "perf/train_tokens_per_s"),
    *("perf/max_resident_gb", "perf/cpu_memory_used_gb"),
    "training/off_policy/trajectory_staleness_worst/mean",
)
"""Metrics of every step of a MoE model with replay, if a rollout worker generated the samples."""
