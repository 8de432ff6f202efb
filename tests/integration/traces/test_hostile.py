"""The hostile campaign: all of it in `make test-all`, and a share that has every kind of case.

By hand: `python -m tests.hostile --sample 1000`.
"""

import sys

import pytest

from tests.exhaustive import sample_or_all
from tests.hostile.campaign import SAMPLE, all_cases, run, sampled
from tests.hostile.pool import MEMORY_MB

pytestmark = pytest.mark.integration


def test_no_case_is_taken_for_the_truth(capsys):
    """Over a thousand damaged and forged stores: readers return the right rows or refuse with
    errors of ours, verify names a problem, commands end cleanly, nothing hangs or eats memory."""
    whole = sample_or_all(False, True)
    outcome = run(list(range(len(all_cases()))) if whole else sampled(SAMPLE), whole)
    with capsys.disabled():
        sys.stdout.write(f"\n{outcome.table()}\n")
    assert outcome.failed == {}
    assert outcome.mended == []
    assert len(outcome.verdicts) >= 1_000
    assert max(verdict.memory_mb for verdict in outcome.verdicts.values()) < MEMORY_MB
