"""Mark one sample of each group in a step's data as ReMax's baseline."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from operators.training.batches.step_data import StepData, trained_rewards
from pipeline.rl.estimator_table import needs_baseline
from pipeline.traces.format.manifest import BASELINE


def with_baselines(data: StepData, estimator: str) -> StepData:
    """Return the data; if the estimator needs baselines, each group's first sample is one."""
    if not needs_baseline(estimator):
        return data
    _, first = np.unique(data.groups_N, return_index=True)
    marks = data.columns["not_trained"].to_pylist()
    for row in first:
        marks[row] = BASELINE
    at = data.columns.column_names.index("not_trained")
    columns = data.columns.set_column(at, "not_trained", pa.array(marks, pa.string()))
    return replace(data, columns=columns, rewards_N=trained_rewards(columns))
