"""Data of a step in which one sample of each group is the greedy one, for ReMax."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from operators.training.batches.step_data import StepData, group_codes
from pipeline.rl.estimator_table import needs_baseline
from pipeline.traces.format.shard_rows import BASELINE


def with_baselines(data: StepData, estimator: str) -> StepData:
    """The data with the first sample of each group as its baseline, if the estimator needs one."""
    if not needs_baseline(estimator):
        return data
    _, first = np.unique(group_codes(data.columns), return_index=True)
    marks = data.columns["not_trained"].to_pylist()
    for row in first:
        marks[row] = BASELINE
    at = data.columns.column_names.index("not_trained")
    columns = data.columns.set_column(at, "not_trained", pa.array(marks, pa.string()))
    return replace(data, columns=columns)
