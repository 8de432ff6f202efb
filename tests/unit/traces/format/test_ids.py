from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.run.plan import PlannedPrompt
from pipeline.traces import (
    TraceError,
    expected_ids,
    sample_id,
    sampling_seed,
    validation_id,
)
from pipeline.traces.format.ids import check_ids
from tests.samples import (
    make_plan,
)


def test_ids():
    assert sample_id(3, "17", 2) == "000003/17/2"
    assert validation_id(3, "17", 0) == "val-000003/17/0"


def test_a_plan_names_its_samples():
    plan = replace(
        make_plan(n=2, step=4),
        prompts=(PlannedPrompt(row=7, epoch=0), PlannedPrompt(row=3, epoch=1)),
    )
    assert expected_ids(plan) == ["000004/7/0", "000004/7/1", "000004/3.1/0", "000004/3.1/1"]


def test_a_seed_is_31_bits_and_repeats():
    """A retry samples the same; another sample or run does not. The value is part of the format of
    a run: a change here would make resumed runs sample differently."""
    seeds = {sampling_seed(seed, sample_id(0, "1", k)) for seed in range(10) for k in range(10)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(1, "000000/0/0") == 1_028_497_033


_ids = st.lists(st.sampled_from([f"000000/{row}/0" for row in range(12)]), max_size=14)


@given(_ids, _ids)
def test_a_join_is_good_only_if_it_is_exactly_the_plan(found, expected):
    """Any missing, unexpected or doubled id is named; nothing else is refused."""
    expected = sorted(set(expected))
    if sorted(found) == expected:
        check_ids("step 0", found, expected)
        return
    with pytest.raises(TraceError) as error:
        check_ids("step 0", found, expected)
    wrong = set(found) ^ set(expected) or {id for id in found if found.count(id) > 1}
    assert any(id in str(error.value) for id in wrong)
