"""Rules for dynamic sampling."""

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
def test_settings_that_fit_pass(tmp_path, settings):
    assert problems(tmp_path, *settings) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((f"{FILTERS}.metric=null",), f"{FILTERS}.metric: found null, but .* write seq_reward"),
        (
            (f"{FILTERS}.metric=seq_final_reward", "algorithm.use_kl_in_reward=True"),
            "found seq_final_reward, .* before log-probs exist; write seq_reward",
        ),
        ((f"{FILTERS}.max_num_gen_batches=0",), "found 0, which in verl means no limit, expected"),
        ((f"{FILTERS}.max_num_gen_batches=-3",), "found -3, which in verl means no limit"),
        (
            ("data.gen_batch_size=3",),
            r"found 10, but 10 batches of data.gen_batch_size=3 prompts cannot fill "
            r"data.train_batch_size=32; write 11 or more",
        ),
        (
            (f"{ROLLOUT}.n=1", "algorithm.adv_estimator=reinforce_plus_plus"),
            f"{ROLLOUT}.n: found 1, .* no variance .*; write 2 or more",
        ),
        (("data.shuffle=False",), "data.shuffle: found False, .* write True"),
        (
            ("data.gen_batch_size=1000000",),
            "data.gen_batch_size: found 1000000, which with .*n=8 gives 8000000 samples per plan",
        ),
        (
            (f"{FILTERS}.max_num_gen_batches=20000", "launch.rollout_shards=8"),
            "found 20000, which with 8 shards per batch gives 160000 .*; write 12500 or fewer",
        ),
        (
            ("launch.rollout_shards=5", "data.gen_batch_size=4"),
            "launch.rollout_shards: found 5, expected at most data.gen_batch_size=4",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, settings, message):
    assert re.search(message, the_problem(tmp_path, *ON, *settings))


def test_a_generation_batch_size_without_dynamic_sampling_is_refused(tmp_path):
    """The setting would have no effect."""
    assert the_problem(tmp_path, "data.gen_batch_size=96") == (
        "data.gen_batch_size: found 96, but without algorithm.filter_groups.enable a step "
        "samples data.train_batch_size=32 prompts; write that number, or null"
    )
