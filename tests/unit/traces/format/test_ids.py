from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.run.plan import PlannedPrompt
from pipeline.traces import TraceError, expected_ids, sample_id, sampling_seed, validation_id
from pipeline.traces.format.ids import check_ids, file_name
from tests.samples import make_plan


def test_ids_contain_step_prompt_and_number():
    assert sample_id(3, "17", 2) == "000003/17/2"
    assert validation_id(3, "17", 0) == "val-000003/17/0"
    plan = replace(
        make_plan(n=2, step=4),
        prompts=(PlannedPrompt(row=7, epoch=0), PlannedPrompt(row=3, epoch=1)),
    )
    assert expected_ids(plan) == ["000004/7/0", "000004/7/1", "000004/3.1/0", "000004/3.1/1"]


def test_a_seed_has_31_bits_and_repeats():
    """A retry has the same seed, and thus samples the same tokens; other samples and runs have
    different seeds.

    The value is part of a run's format: a change here would make resumed runs sample differently.
    """
    seeds = {sampling_seed(seed, sample_id(0, "1", k)) for seed in range(10) for k in range(10)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(1, "000000/0/0") == 1_028_497_033


_ids = st.lists(st.sampled_from([f"000000/{row}/0" for row in range(12)]), max_size=14)


@given(_ids, _ids)
def test_ids_are_accepted_only_if_they_are_exactly_those_of_the_plan(found, expected):
    """Any missing, unexpected or duplicated id is named, and ids are refused for no other
    reason."""
    expected = sorted(set(expected))
    if sorted(found) == expected:
        check_ids("step 0", found, expected)
        return
    with pytest.raises(TraceError) as error:
        check_ids("step 0", found, expected)
    wrong = set(found) ^ set(expected) or {id for id in found if found.count(id) > 1}
    assert any(id in str(error.value) for id in wrong)


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("000003/17.1/2.1", "000003_17.1_2.1"),
        ("000000_a/0", "000000%5Fa_0"),
        ("000000/a%2Fb/0", "000000_a%252Fb_0"),
        ("000000/é b/0", "000000_%C3%A9%20b_0"),
        ("0/" + "a" * 198, "0_" + "a" * 198),
        ("0/" + "a" * 199, "0_" + "a" * 148 + "~" + "63175b14a8c7364a"),
    ],
)
def test_names_of_exported_files_are_formed_from_ids(id, name):
    """docs/trace-format.md specifies the names."""
    assert file_name(id) == name


@given(st.lists(st.text(st.sampled_from("aA/_%~.é0F2"), min_size=1, max_size=260), max_size=20))
def test_two_ids_never_have_the_same_file_name(ids):
    assert len({file_name(id) for id in set(ids)}) == len(set(ids))
    assert all(len(file_name(id)) <= 200 and file_name(id).isascii() for id in ids)
