"""The hostile campaign: a sample of every kind, or all of it (make test-all).

The sample by hand: `python -m tests.hostile`.
"""

import sys

import pytest

from tests.exhaustive import TEST_ALL
from tests.hostile.campaign import SAMPLE, all_cases, run, sampled
from tests.hostile.pool import MEMORY_MB

pytestmark = pytest.mark.integration


def test_no_case_is_taken_for_the_truth(capsys):
    """Over a thousand damaged and forged stores: readers return the right rows or refuse with
    errors of ours, verify names a problem, commands end cleanly, nothing hangs or eats memory."""
    numbers = range(len(all_cases())) if TEST_ALL else sampled(SAMPLE)
    outcome = run(list(numbers), whole=TEST_ALL)
    with capsys.disabled():
        sys.stdout.write(f"\n{outcome.table()}\n")
    assert outcome.failed == {}
    assert outcome.mended == []
    assert len(outcome.verdicts) >= 1_000
    assert max(verdict.memory_mb for verdict in outcome.verdicts.values()) < MEMORY_MB
