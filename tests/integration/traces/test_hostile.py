"""The campaign of damaged and forged stores: a sample of every kind, or all cases (make test-all).

`python -m tests.hostile` runs the sample without pytest.
"""

import sys

import pytest

from tests.exhaustive import TEST_ALL, sample_or_all
from tests.hostile.campaign import SAMPLE, Outcome, all_cases, one_of_each, run, sampled
from tests.hostile.pool import MEMORY_MB

pytestmark = pytest.mark.integration


def assert_passed(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    """Print the table of the campaign, and fail if a case failed."""
    with capsys.disabled():
        sys.stdout.write(f"\n{outcome.table()}\n")
    assert outcome.failed == {}
    assert outcome.mended == []
    assert max(verdict.memory_mb for verdict in outcome.verdicts.values()) < MEMORY_MB


@pytest.mark.parametrize(
    "family", sorted({case.family for case in all_cases()}) if TEST_ALL else ["all"]
)
def test_no_case_is_accepted(family, capsys):
    """Readers of over a thousand damaged or forged stores return the true rows or raise an error.

    `verify` names a problem, commands end without a traceback, and no case hangs or exceeds the
    memory limit. Each case is tried with the fast readers, one slow reader and one command.
    """
    numbers = sampled(SAMPLE)
    if TEST_ALL:
        numbers = [n for n, case in enumerate(all_cases()) if case.family == family]
    outcome = run(numbers)
    assert_passed(outcome, capsys)
    assert TEST_ALL or len(outcome.verdicts) >= 1_000


def test_all_readers_and_commands_withstand_every_kind_of_change(capsys):
    """Each kind of change to each world is tried with all readers and commands."""
    step = sample_or_all(sample=160, all=1)
    assert_passed(run(one_of_each()[::step], whole=True), capsys)
