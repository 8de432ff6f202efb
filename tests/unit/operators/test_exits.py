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
        *(CorruptObjectError, LoadError, RefusedError, ReplayError),
        *(RewardError, TraceError, UpdateError),
    ],
)
def test_errors_that_would_recur_after_a_restart_have_a_separate_code(error: type[Exception]):
    assert exit_code(error("it would recur")) == CONFIGURATION_ERROR
    assert exit_code(InputError(["it would recur"])) == CONFIGURATION_ERROR


@pytest.mark.parametrize("error", [ObjectMissingError, RuntimeError, StoreError, WaitTimeoutError])
def test_errors_that_a_restart_may_fix_have_code_1(error: type[Exception]):
    assert exit_code(error("a restart may fix it")) == 1
