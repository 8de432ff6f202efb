"""The hostile campaign, all of it. A sample by hand: `python -m tests.hostile --sample 1000`."""

import sys

import pytest

from tests.exhaustive import TEST_ALL
from tests.hostile.campaign import all_cases, run
from tests.hostile.pool import MEMORY_MB

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not TEST_ALL, reason="70,000 cases: make test-all"),
]


def test_no_case_is_taken_for_the_truth(capsys):
    """Over a thousand damaged and forged stores: readers return the right rows or refuse with
    errors of ours, verify names a problem, commands end cleanly, nothing hangs or eats memory."""
    outcome = run(list(range(len(all_cases()))), whole=True)
    with capsys.disabled():
        sys.stdout.write(f"\n{outcome.table()}\n")
    assert outcome.failed == {}
    assert outcome.mended == []
    assert len(outcome.verdicts) >= 1_000
    assert max(verdict.memory_mb for verdict in outcome.verdicts.values()) < MEMORY_MB
