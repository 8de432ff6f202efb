"""Metrics that every step has."""

OF_TRAINING = (
    "reward/mean",
    "mismatch/kl",
    "mismatch/kl_native",
    "mismatch/extreme_share",
    "mismatch/extreme_share_native",
    "replay/coverage",
    "replay/agreement",
    "replay/rows",
    "replay/rows_native",
    "replay/bytes_fetched",
    "loss/policy",
    "grad_norm",
    "lr",
    "response/count",
    "response/truncated",
    "response/aborted",
    "response/length_mean",
    "time/rollout_s",
    "time/train_s",
    "time/trace_wait_s",
)
OF_A_RUN = (*OF_TRAINING, "time/trace_write_s", "time/trace_tail_s")
"""A rollout worker made the step, too."""
