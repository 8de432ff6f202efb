"""The campaign of damaged and forged stores: a sample of every kind, or all cases (make test-all).

`python -m tests.hostile` runs the sample without pytest.
"""

import sys

import pytest

from tests.exhaustive import TEST_ALL
from tests.hostile.campaign import SAMPLE, all_cases, run, sampled
from tests.hostile.pool import MEMORY_MB

pytestmark = pytest.mark.integration


def test_no_case_is_accepted(capsys):
    """Readers of over a thousand damaged or forged stores return the true rows or raise an error.

    `verify` names a problem, commands end without a traceback, and no case hangs or exceeds the
    memory limit.
    """
    numbers = range(len(all_cases())) if TEST_ALL else sampled(SAMPLE)
    outcome = run(list(numbers), whole=TEST_ALL)
    with capsys.disabled():
        sys.stdout.write(f"\n{outcome.table()}\n")
    assert outcome.failed == {}
    assert outcome.mended == []
    assert len(outcome.verdicts) >= 1_000
    assert max(verdict.memory_mb for verdict in outcome.verdicts.values()) < MEMORY_MB
