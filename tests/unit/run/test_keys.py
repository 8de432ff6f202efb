"""The names of objects."""

from pipeline.run import keys


def test_numbers_of_keys():
    """Only the commit objects of a numbered folder have a number."""
    assert keys.number_of(keys.plan(3)) == 3
    assert keys.number_of(keys.metrics(123456)) == 123456
    assert keys.number_of(keys.policy(7)) == 7
    assert keys.number_of(keys.checkpoint(10)) == 10
    for key in (keys.run_json(), keys.rollout(3, 1), keys.training(3, 0, 1), keys.attempt(1)):
        assert keys.number_of(key) is None
    assert keys.number_of(keys.replayed(3, keys.rollout(3, 1))) is None


def test_replayed_objects_stay_below_their_step():
    key = keys.replayed(3, keys.training(3, 0, 1))
    assert key == "steps/000003/replay/training/000-00001.json"
