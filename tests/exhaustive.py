"""How much of what is large `make test` tries (a sample) and `make test-all` (all, or far more)."""

import os
from typing import TypeVar

VARIABLE = "RETRACE_TEST_ALL"
TEST_ALL = bool(os.environ.get(VARIABLE))

T = TypeVar("T")


def sample_or_all(sample: T, all: T) -> T:
    """What this run of the tests tries."""
    return all if TEST_ALL else sample
