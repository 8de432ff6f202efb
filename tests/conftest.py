"""Settings for all tests: threads, signals, the number of examples, and clean store settings.

OpenMP reads its settings when torch is first imported, so they are set here. If threads spin at
OpenMP's barriers, two busy processes on two cores slow each other down by a factor of 5 to 30.

A shell's background job (`nohup make test &`) ignores SIGINT, and so would the commands that the
tests start and end with it.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.exhaustive import sample_or_all

pytest.register_assert_rewrite("tests.store_conformance")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples have no deadline, because they may take arbitrarily long on a busy machine.
settings.register_profile("sample", deadline=None)
settings.register_profile("all", deadline=None, max_examples=1_000)
settings.load_profile(sample_or_all("sample", "all"))


def pytest_report_header() -> str:
    return sample_or_all(
        "large tests run a sample of their cases; make test-all runs all cases",
        "large tests run all of their cases",
    )


@pytest.fixture(autouse=True)
def same_store_settings() -> Iterator[None]:
    """Check that a test restores the store's environment variables.

    If a test left a server's address behind, later tests would wait for that server.
    """
    before = _store_settings()
    yield
    assert _store_settings() == before, "the test left a store's settings in the environment"


def _store_settings() -> dict[str, str]:
    named = ("AWS_", "RETRACE_S3_")
    return {name: value for name, value in os.environ.items() if name.startswith(named)}
