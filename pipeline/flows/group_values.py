"""The values of a metric for the samples of a committed sub-plan, group by group."""

import json

import pyarrow as pa

from pipeline.errors import InputError
from pipeline.rl.group_filter import REWARD_METRICS, metric_value
from pipeline.run.plan import StepPlan
from pipeline.store import Store
from pipeline.traces.format.header import file_of
from pipeline.traces.format.ids import baseline_ids, check_ids, expected_ids, shard_ids
from pipeline.traces.format.parquet import open_file
from pipeline.traces.format.schema import SAMPLES
from pipeline.traces.read.early import read_shard_header

GroupValues = dict[str, list[float | None]]
"""Values of a metric, keyed by group; None for a sample without a reward."""


def group_values(store: Store, plan: StepPlan, metric: str) -> GroupValues:
    """Read a metric for all samples of a sub-plan except baselines.

    Only the required columns are fetched.

    Args:
        store: The store that contains the run.
        plan: The sub-plan, whose shards must all be committed.
        metric: The metric's name, a value of algorithm.filter_groups.metric.

    Returns:
        The metric's values, keyed by group, in the plan's order.

    Raises:
        InputError: The reward function did not return the metric for a sample.
        TraceError: The shards do not contain exactly the samples of the plan.
        ObjectMissingError: A commit or file is missing.
        CorruptObjectError: A commit or file is damaged.
    """
    names = ["id", "group", "reward"] + ["extras"] * (metric not in REWARD_METRICS)
    schema = pa.schema([SAMPLES.field(name) for name in names])
    left_out = set(baseline_ids(plan))
    found: dict[str, tuple[str, float | None]] = {}
    for shard in range(plan.shards):
        header = read_shard_header(store, plan.step, plan.number_of(shard))
        rows = open_file(store, file_of(header, "samples")).read(schema).to_pylist()
        check_ids(header.key, [row["id"] for row in rows], shard_ids(plan, shard))
        for row in rows:
            try:
                value = metric_value(metric, row["reward"], json.loads(row.get("extras", "{}")))
            except ValueError as error:
                raise InputError(
                    [
                        f"algorithm.filter_groups.metric: sample {row['id']}: {error}; return "
                        "this metric from the reward function, or start a new run with a different "
                        "metric, such as seq_reward"
                    ]
                ) from error
            found[row["id"]] = row["group"], value
    groups: GroupValues = {}
    for id in expected_ids(plan):
        group, value = found[id]
        if id not in left_out:
            groups.setdefault(group, []).append(value)
    return groups
