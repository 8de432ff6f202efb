"""Exit codes of workers after errors; one code keeps the launcher from restarting the worker."""

import pytest

from operators.exits import exit_code
from operators.load_errors import LoadError
from operators.training.errors import ReplayError, UpdateError
from pipeline.errors import InputError
from pipeline.exits import CONFIGURATION_ERROR
from pipeline.rl.rewards import RewardError
from pipeline.run.commit import CorruptObjectError
from pipeline.run.wait import WaitTimeoutError
from pipeline.store import ObjectMissingError, RefusedError, StoreError
from pipeline.traces import TraceError


@pytest.mark.parametrize(
    "error",
    [
        CorruptObjectError("another digest"),
        LoadError("an expert is missing"),
        InputError(["this model cannot be trained"]),
        RefusedError("403"),
        ReplayError("no routes"),
        RewardError("sample 000000/1/2: the reward function raised KeyError"),
        TraceError("another coding"),
        UpdateError("gradient norm nan"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_would_recur_after_a_restart_have_a_separate_code(error: Exception):
    assert exit_code(error) == CONFIGURATION_ERROR


@pytest.mark.parametrize(
    "error",
    [
        ObjectMissingError("no such object"),
        RuntimeError("Connection closed by peer"),
        StoreError("no answer for 120 s"),
        WaitTimeoutError("waited 600 s"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_a_restart_may_fix_have_code_1(error: Exception):
    assert exit_code(error) == 1
