"""examples/mismatch: the rule for a collapse, and the results read from a run."""

from dataclasses import replace

import pytest

import retrace
from examples.mismatch import results
from examples.mismatch.arms import ARMS, ArmRun
from examples.mismatch.results import GRAD_NORM, REWARD, collapse_step, moving_means, read_result
from pipeline.metrics.table import find_metric
from pipeline.run import keys
from pipeline.run.attempts import end_attempt
from pipeline.run.commit import commit
from pipeline.run.description import description_json, read_created
from tests.attempts import make_attempt
from tests.memory_store import MemoryStore
from tests.samples import write_run
from tests.stored_runs import SAMPLES


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([], None),
        ([0.4, 0.1], None),  # fewer than three steps have no mean
        ([0.4] * 8, None),
        ([0.4, 0.5, 0.6, 0.7, 0.8], None),
        ([0.6, 0.6, 0.6, 0.0, 0.6, 0.6], None),  # one bad step is noise
        ([0.6, 0.6, 0.6, 0.0, 0.0], 4),
        ([0.6, 0.6, 0.6, 0.3, 0.3, 0.3], None),  # half of the best is not below half
        ([0.6, 0.6, 0.6, 0.3, 0.3, 0.29], 5),
        ([0.2, 0.2, 0.2, 0.9, 0.9, 0.9, 0.4, 0.4, 0.4], 8),  # relative to the best so far
        ([0.6, 0.6, 0.6, 0.0, 0.0, 0.6, 0.6, 0.6], 4),  # a recovery does not undo a collapse
        ([0.6, 0.6, 0.6, None, None], 4),  # steps without a reward count as 0
        ([0.0, 0.0, 0.0, 0.0], None),  # the reward was never above 0
    ],
)
def test_collapse_is_a_fall_below_half_of_the_best_three_steps(rewards, step):
    assert collapse_step(rewards) == step


def test_means_cover_three_consecutive_steps():
    assert moving_means([0.0, 0.3, 0.6, 0.9]) == pytest.approx([0.3, 0.6])


def test_the_metrics_exist_in_runs():
    """A renamed metric would result in a column of dashes."""
    names = {name for name in vars(results) if isinstance(vars(results)[name], str)}
    shown = {vars(results)[name] for name in names if name.isupper()}
    assert len(shown) == 8
    assert [name for name in shown if find_metric(name) is None] == []


def test_a_result_has_the_metrics_and_agreement_of_finished_steps(tmp_path):
    run = ArmRun(ARMS[0], 1, tmp_path)
    assert read_result(run) is None
    store = retrace.open_store(str(run.uri))
    write_run(store, SAMPLES, "R3")
    assert read_result(run) is None
    commit(store, keys.metrics(0), {"step": 0, "metrics": {REWARD: 0.25, GRAD_NORM: None}}, "a")
    by_layer = {"replay/agreement/layer_0": 0.9, "replay/agreement/layer_1": 0.7}
    body = {"step": 1, "metrics": {REWARD: 0.5, **by_layer}}
    commit(store, keys.metrics(1), body, "a")
    result = read_result(run)
    assert result is not None
    assert result.steps == 2
    assert result.values(REWARD) == [0.25, 0.5]
    assert result.values(GRAD_NORM) == result.values("unknown") == [None, None]
    assert result.measured(GRAD_NORM) == []
    assert result.agreement_by_layer == [None, {0: 0.9, 1: 0.7}]
    assert result.end is None


@pytest.mark.parametrize(
    ("message", "failure"),
    [
        ("no fit: see the log\nat step 0", "no fit: see the log"),
        (
            "ended. From log:\n  | ERROR rank 3 failed: UpdateError: NaN\n  | more",
            "UpdateError: NaN",
        ),
        ("", ""),
    ],
)
def test_a_result_has_the_error_that_ended_the_newest_attempt(tmp_path, message, failure):
    """A run that failed in its first step has a result. Its next attempt may still succeed."""
    run = ArmRun(ARMS[0], 1, tmp_path)
    made = MemoryStore()
    write_run(made, SAMPLES, "R3")
    store = retrace.open_store(str(run.uri))
    settings = {"trainer": {"total_training_steps": 2}}
    body = description_json(replace(read_created(made), settings=settings))
    commit(store, keys.run_json(), body, "a")
    end_attempt(store, make_attempt(store, 0, 2), "failed", message)
    result = read_result(run)
    assert result is not None
    assert (result.steps, result.end) == (0, f"ended at step 0: {failure}")
    commit(store, keys.metrics(0), {"step": 0, "metrics": {REWARD: 0.25}}, "a")
    end_attempt(store, make_attempt(store, 1, 2), "cancelled", message)
    result = read_result(run)
    assert result is not None
    assert (result.steps, result.end) == (1, None)
