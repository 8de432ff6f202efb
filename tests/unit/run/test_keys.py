"""The names of objects."""

from pipeline.run import keys


def test_only_keys_of_commits_in_a_numbered_folder_have_a_number():
    assert keys.number_of(keys.plan(3)) == 3
    assert keys.number_of(keys.metrics(123456)) == 123456
    assert keys.number_of(keys.policy(7)) == 7
    assert keys.number_of(keys.checkpoint(10)) == 10
    for key in (
        keys.run_json(),
        keys.rollout(3, 1),
        keys.training(3, 0, 1, "5f0c2a11"),
        keys.attempt(1),
    ):
        assert keys.number_of(key) is None
    assert keys.number_of(keys.replayed(3, keys.rollout(3, 1))) is None


def test_replayed_objects_stay_in_the_folder_of_their_step():
    key = keys.replayed(3, keys.training(3, 0, 1, "5f0c2a11"))
    assert key == "steps/000003/replay/training/000-00001.5f0c2a11.json"


def test_all_parts_of_a_training_set_have_the_same_maker():
    """The parts include commits, which count only if training.json names them."""
    made = {
        keys.maker_of(name(3, stage, dp_rank, "5f0c2a11", cp_rank))
        for name in (keys.training, keys.training_file)
        for stage, dp_rank, cp_rank in ((0, 0, 0), (1, 2, 0), (1, 2, 3))
    }
    assert len(made) == 1
    assert None not in made
    assert keys.maker_of(keys.training(3, 0, 0, "5f0c2a12")) not in made
    assert keys.maker_of(keys.training_1_0(3, 0, 0)) is None
    assert keys.training(1, 2, 3, "5f0c2a11", 4) == (
        "steps/000001/training/002-00003-00004.5f0c2a11.json"
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
