"""Threads of everything that the tests run in this process: one, and asleep while it waits.

OpenMP reads these when torch is first imported. With threads that spin at its barriers, two busy
processes on two cores slow each other down 5 to 30 times.
"""

import os

import pytest
from hypothesis import settings

from tests.exhaustive import sample_or_all

pytest.register_assert_rewrite("tests.store_conformance", "tests.damage", "tests.damage_judge")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests may not time: on a busy machine an example takes as long as it takes.
settings.register_profile("sample", deadline=None)
settings.register_profile("all", deadline=None, max_examples=1_000)
settings.load_profile(sample_or_all("sample", "all"))


def pytest_report_header() -> str:
    return sample_or_all(
        "of what is large a sample is tried; make test-all tries all", "all is tried, no sample"
    )
