"""Rows of the metrics table for the policy version that a step produces."""

from pipeline.metrics.metric import Metric

POLICY = (
    Metric(
        "timing_s/update_weights",
        "s",
        "Time for which training paused to copy the new policy for the upload. If policies are "
        "stored as differences, this includes computing digests, coding, and waiting for the "
        "previous commit.",
    ),
    Metric(
        "time/policy_export_s",
        "s",
        "Time for exporting the new policy, from the beginning of the export to the commit. "
        "Training waits only for the first part, which is `timing_s/update_weights`. The rest of "
        "the upload and the commit take place in the background, during the next step. None if the "
        "store already contained the policy.",
    ),
    Metric(
        "policy/bytes",
        "bytes",
        "Size of the new policy's files. None if the store already contained the policy.",
    ),
    Metric(
        "policy/changed",
        "",
        "Share of the weights that differ from the previous version. None if the two versions were "
        "not compared.",
    ),
)
