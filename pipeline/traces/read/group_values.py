"""The values of a metric for the samples of a committed sub-plan, group by group."""

import pyarrow as pa

from pipeline.errors import InputError
from pipeline.rl.group_filter import REWARD_METRICS, metric_value
from pipeline.run.plan import StepPlan
from pipeline.run.strict_json import parse_json
from pipeline.store import Store
from pipeline.traces.format.chunks import read_table
from pipeline.traces.format.header import read_header
from pipeline.traces.format.ids import baseline_ids, check_ids, expected_ids, shard_ids
from pipeline.traces.format.manifest import file_of
from pipeline.traces.format.schema import SAMPLES
from pipeline.traces.format.types import TraceError

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
        header = read_header(store, plan.shard_key(shard))
        file = file_of(header, "samples")
        if file is None:
            raise TraceError(f"{header.key} in {store.uri}: no samples file in this commit")
        rows = read_table(store, file, schema).to_pylist()
        check_ids(header.key, [row["id"] for row in rows], shard_ids(plan, shard))
        for row in rows:
            try:
                value = metric_value(metric, row["reward"], parse_json(row.get("extras", "{}")))
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
