"""The extent of large tests: a sample in `make test`, all cases in `make test-all`."""

import os
from typing import TypeVar

VARIABLE = "RETRACE_TEST_ALL"
TEST_ALL = bool(os.environ.get(VARIABLE))

T = TypeVar("T")


def sample_or_all(sample: T, all: T) -> T:
    """Return `all` if the tests run under `make test-all`, otherwise `sample`."""
    return all if TEST_ALL else sample
