"""Rules of dynamic sampling."""

import re

import pytest

from tests.unit.config.settings import ROLLOUT, problems, the_problem

FILTERS = "algorithm.filter_groups"
ON = (f"{FILTERS}.enable=True", f"{FILTERS}.metric=acc", f"{FILTERS}.max_num_gen_batches=10")


@pytest.mark.parametrize(
    "settings",
    [
        ON,
        (*ON, "data.gen_batch_size=96"),
        (*ON, "data.gen_batch_size=4"),
        (*ON, "launch.rollout_shards=96", "data.gen_batch_size=96"),
        ("data.gen_batch_size=32",),
        (f"{FILTERS}.metric=acc", f"{FILTERS}.max_num_gen_batches=-1"),
    ],
)
def test_what_fits(tmp_path, settings):
    assert problems(tmp_path, *settings) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ((f"{FILTERS}.metric=null",), f"{FILTERS}.metric: found None, but .* write seq_reward"),
        (
            (f"{FILTERS}.metric=seq_final_reward", "algorithm.use_kl_in_reward=True"),
            "found seq_final_reward, .* before there are log-probs; write seq_reward",
        ),
        ((f"{FILTERS}.max_num_gen_batches=0",), "found 0, which is no limit in verl, expected 1"),
        ((f"{FILTERS}.max_num_gen_batches=-3",), "found -3, which is no limit in verl"),
        (
            ("data.gen_batch_size=3",),
            r"found 10, but so many batches of data.gen_batch_size=3 prompts never fill "
            r"data.train_batch_size=32; write 11 or more",
        ),
        (
            (f"{ROLLOUT}.n=1", "algorithm.adv_estimator=reinforce_plus_plus"),
            f"{ROLLOUT}.n: found 1, .* no variance .*; write 2 or more",
        ),
        (("data.shuffle=False",), "data.shuffle: found False, .* write True"),
        (
            ("data.gen_batch_size=1000000",),
            "data.gen_batch_size: found 1000000, with .*n=8 that is 8000000 samples at once",
        ),
        (
            (f"{FILTERS}.max_num_gen_batches=20000", "launch.rollout_shards=8"),
            "found 20000, in 8 shards each that is 160000, .*; write 12500 or fewer",
        ),
        (
            ("launch.rollout_shards=5", "data.gen_batch_size=4"),
            "launch.rollout_shards: found 5, expected at most data.gen_batch_size=4",
        ),
    ],
)
def test_what_does_not(tmp_path, settings, says):
    assert re.search(says, the_problem(tmp_path, *ON, *settings))


def test_batches_without_dynamic_sampling(tmp_path):
    """They would have no effect."""
    assert the_problem(tmp_path, "data.gen_batch_size=96") == (
        "data.gen_batch_size: found 96, but without algorithm.filter_groups.enable a step has "
        "data.train_batch_size=32 prompts; write that"
    )
