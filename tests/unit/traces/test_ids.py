from pipeline.traces import expected_ids, sample_id, sampling_seed, validation_id


def test_ids():
    assert sample_id(3, "17", 2) == "000003/17/2"
    assert validation_id(3, "17", 0) == "val-000003/17/0"


def test_a_plan_names_its_samples():
    plan = {"step": 4, "n": 2, "prompts": [{"row": 7, "epoch": 0}, {"row": 3, "epoch": 1}]}
    assert expected_ids(plan) == ["000004/7/0", "000004/7/1", "000004/3.1/0", "000004/3.1/1"]


def test_a_seed_is_31_bits_and_repeats():
    """A retry samples the same; another sample or run does not. The value is part of the format of
    a run: a change here would make resumed runs sample differently."""
    seeds = {sampling_seed(seed, sample_id(0, "1", k)) for seed in range(10) for k in range(10)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(1, "000000/0/0") == 1_028_497_033
