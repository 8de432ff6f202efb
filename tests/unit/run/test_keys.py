"""The names of objects."""

from pipeline.run import keys


def test_only_keys_of_commits_in_a_numbered_folder_have_a_number():
    for key, number in (
        (keys.plan(3), 3),
        (keys.metrics(123456), 123456),
        (keys.policy(7), 7),
        (keys.checkpoint(10), 10),
        (keys.run_json(), None),
        (keys.rollout(3, 1), None),
        (keys.trainer_file(3, 0, 1, "5f0c2a11"), None),
        (keys.attempt(1), None),
        (keys.replayed(3, keys.rollout(3, 1)), None),
    ):
        assert keys.number_of(key) == number


def test_the_files_of_all_ranks_of_a_trainer_have_the_same_maker():
    made = {
        keys.maker_of(keys.trainer_file(3, stage, dp_rank, "5f0c2a11", cp_rank))
        for stage, dp_rank, cp_rank in ((0, 0, 0), (1, 2, 0), (1, 2, 3))
    }
    assert made == {"steps/000003/training/.5f0c2a11"}
    assert keys.maker_of(keys.trainer_file(3, 0, 0, "5f0c2a12")) not in made
    assert keys.trainer_file(1, 2, 3, "5f0c2a11", 4) == (
        "steps/000001/training/002-00003-00004.5f0c2a11.routes.parquet"
    )


def test_the_key_of_a_sub_plan_contains_its_number():
    """Sub-plan 0 is the step's plan and has that plan's key, without a number."""
    for number in (0, 1, 12, 99_999):
        assert keys.sub_plan_number(keys.sub_plan(3, number)) == number
        assert keys.number_of(keys.sub_plan(3, number)) == 3
    assert keys.sub_plan(3, 0) == keys.plan(3)
    for key in ("steps/000003/plan.00000.json", "steps/000003/plan.1.json", keys.manifest(3)):
        assert keys.sub_plan_number(key) is None
    assert keys.sub_plan_number(keys.validation_plan(3)) is None
