"""A check of inputs reports all mistakes together before anything starts, and changes nothing."""

import shutil

import pytest

from pipeline.config.rules.pods import InstalledGpus
from pipeline.errors import InputError
from pipeline.extras import EXTRAS
from pipeline.inputs.check import check_inputs
from tests.tiny_models import make_tiny
from tests.unit.inputs.small_inputs import R3, REPLAY, check, check_error, load, prepare, the_error


def test_checking_leaves_nothing_behind(settings):
    """A check creates no folders; only the run creates missing ones."""
    before = sorted(settings.parent.rglob("*"))
    check(
        settings, *R3, f"{REPLAY}.record_file={settings.parent}/sets/one",
        f"trainer.default_local_dir={settings.parent}/logs",
    )  # fmt: skip
    assert sorted(settings.parent.rglob("*")) == before


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_other_inputs_are_checked_without_a_model(settings, model, name):
    copy = shutil.copytree(model, settings.parent / "copy")
    (copy / name).unlink()
    found = check_error(
        settings, f"actor_rollout_ref.model.path={copy}", "data.train_files=absent.parquet",
        "custom_reward_function.path=absent.py",
    )  # fmt: skip
    assert [problem.split(":")[0] for problem in found] == [
        "actor_rollout_ref.model.path",
        "data.train_files",
        "custom_reward_function.path",
    ]


def test_a_tokenizer_of_a_different_model_is_refused(settings, tmp_path):
    small = make_tiny(tmp_path / "small", "qwen3", vocab_size=100)
    problem = the_error(settings, f"actor_rollout_ref.model.path={small}")
    assert "the model's vocab_size is 100, so the tokenizer belongs to a different model" in problem


def test_a_dense_model_is_accepted_only_without_replay(settings, tmp_path):
    """Without replay, a run with a dense model has no geometry."""
    dense = make_tiny(tmp_path / "dense", "qwen3")
    path = f"actor_rollout_ref.model.path={dense}"
    assert "has no MoE layers" in the_error(settings, path, *R3)
    run = prepare(load(settings, path))
    assert run.geometry is None
    assert run.description.geometry is None


def test_an_unwritable_store_is_refused(settings):
    """The place is a file instead of a folder, so not even root can write below it."""
    for place in (settings, settings / "store"):
        assert f"{settings} is a file" in the_error(settings, f"store.uri={place}")


@pytest.mark.parametrize("place", ["nowhere/set", "ftp://host/set"])
def test_a_missing_replay_file_is_reported_with_other_problems(settings, place):
    found = check_error(
        settings, *R3, f"{REPLAY}.replay_file={place}", f"data.val_files={settings}"
    )  # fmt: skip
    assert any("write data.val_files=null, or" in problem for problem in found)
    [absent] = [problem for problem in found if problem.startswith(f"{REPLAY}.replay_file: ")]
    assert ("contains no recorded set (from " if "://" not in place else "'ftp' is not") in absent


def test_a_policy_cache_that_no_worker_can_create_is_refused(settings):
    """Workers create missing folders, but a replayed run has no rollout workers."""
    check(settings, f"store.policy_cache={settings.parent}/fast/disk")
    for place in (settings, settings / "cache" / "deep"):
        problem = f"store.policy_cache={place}"
        assert f"{settings} is not a writable folder" in the_error(settings, problem)
        replayed = check_error(settings, *R3, problem, f"{REPLAY}.replay_file=nowhere")
        assert not any(text.startswith("store.policy_cache") for text in replayed)
    with pytest.raises(InputError) as in_pods:
        check_inputs(load(settings, problem), InstalledGpus())
    assert not any(text.startswith("store.policy_cache") for text in in_pods.value.problems)


def test_a_tracker_whose_package_is_missing_is_refused(settings, monkeypatch):
    monkeypatch.setitem(EXTRAS, "wandb", ("a_package_that_is_not_here",))
    assert the_error(settings, "trainer.logger=[console,wandb]") == (
        "this installation of retrace has no a_package_that_is_not_here, which "
        "trainer.logger=wandb needs: pip install 'retrace-moe[wandb]'"
    )


def test_an_unknown_kind_of_store_is_refused(settings):
    assert "scheme 'ftp' is not known" in the_error(settings, "store.uri=ftp://host/store")


def test_credentials_in_a_place_are_refused_and_not_repeated(settings):
    for override in ("store.uri=s3://key:hidden@bucket/a", "store.endpoint=http://a:hidden@b"):
        [problem] = check_error(settings, override)
        assert "credentials" in problem
        assert "hidden" not in problem


def test_all_problems_are_shown_together(settings):
    found = check_error(
        settings, f"{REPLAY}.mode=R3", "data.train_files=absent.parquet",
        "custom_reward_function.path=absent.py", f"store.uri={settings}",
        "trainer.n_gpus_per_node=3",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    )  # fmt: skip
    assert [problem.split(":")[0] for problem in found] == [
        "actor_rollout_ref.rollout.enable_rollout_routing_replay",
        "trainer.n_gpus_per_node",
        "data.train_files",
        "custom_reward_function.path",
        "store.uri",
    ]
