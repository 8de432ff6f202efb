"""Threads of everything that the tests run in this process: one, and asleep while it waits.

OpenMP reads these when torch is first imported. With threads that spin at its barriers, two busy
processes on two cores slow each other down 5 to 30 times.
"""

import os
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def same_store_settings() -> Iterator[None]:
    """A test that leaves its S3 server's address behind makes a later one wait for that server."""
    before = _store_settings()
    yield
    assert _store_settings() == before, "the test leaves settings of a store in the environment"


def _store_settings() -> dict[str, str]:
    named = ("AWS_", "RETRACE_S3_")
    return {name: value for name, value in os.environ.items() if name.startswith(named)}
