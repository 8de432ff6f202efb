"""Runs whose length is set in epochs: the number of steps follows from the prompts, as in verl."""

import pytest

from pipeline.inputs.stage import stage
from pipeline.run.attempts import config_of
from tests.unit.inputs.small_inputs import check, load, prepare, the_error, verl_rows, write_prompts

OPTIM = "actor_rollout_ref.actor.optim"
WARMUP = f"{OPTIM}.lr_warmup_steps"
DECAY = f"{OPTIM}.lr_decay_steps"


@pytest.fixture
def open_end(settings):
    """Settings with 10 prompts and 4 prompts per step, but no run length."""
    settings.write_text(settings.read_text().replace(", total_training_steps: 2", ""))
    return settings


def test_epochs_have_full_batches(open_end):
    inputs = check(open_end, "trainer.total_epochs=3")
    assert inputs.config.trainer.total_training_steps == 6
    assert inputs.notes == (
        "trainer.total_epochs: 3 of 2 full batches each (10 prompts, 4 per step) are 6 steps",
    )


def test_dropped_prompts_do_not_count(open_end):
    """verl also counts only the prompts that pass its filter."""
    long = verl_rows(1)
    long[0]["prompt"][0]["content"] *= 20
    write_prompts(open_end.parent / "train.parquet", [*long * 3, *verl_rows(7)])
    inputs = check(open_end, "trainer.total_epochs=3", "data.filter_overlong_prompts=True")
    assert (inputs.prompt_count, inputs.config.trainer.total_training_steps) == (7, 3)


def test_fewer_prompts_than_a_batch_are_refused(open_end):
    problem = the_error(open_end, "trainer.total_epochs=3", "data.train_batch_size=12")
    assert problem.startswith("data.train_batch_size: found 12, but data.train_files has 10")


def test_without_steps_and_epochs_a_run_has_the_default_length(open_end):
    inputs = check(open_end)
    assert inputs.config.trainer.total_training_steps == 10
    assert inputs.notes[0].startswith("trainer.total_training_steps: 10, because neither it nor")


def test_the_number_of_steps_is_stored_and_the_same_settings_attach(open_end):
    epochs = "trainer.total_epochs=3"
    run = prepare(load(open_end, epochs))
    assert run.config.trainer.total_training_steps == 6
    assert config_of(run.description).trainer.total_training_steps == 6
    again = stage(check(open_end, epochs))
    assert again.config == run.config
    longer = stage(check(open_end, "trainer.total_epochs=4"))
    assert longer.config.trainer.total_training_steps == 8


class TestWarmUp:
    RATIO = f"{WARMUP}_ratio=0.4"

    def test_the_warm_up_may_be_a_share_of_the_steps(self, open_end):
        inputs = check(open_end, "trainer.total_epochs=3", self.RATIO)
        assert inputs.config.actor_rollout_ref.actor.optim.lr_warmup_steps == 2  # int(0.4 * 6)
        assert f"{WARMUP}_ratio: 0.4 of 6 steps are 2 steps" in inputs.notes


class TestSchedule:
    STYLE = (f"{OPTIM}.lr_decay_style=cosine", f"{OPTIM}.lr_warmup_steps_ratio=0.4")

    def test_the_horizon_of_a_schedule_is_the_length_of_the_run(self, open_end):
        inputs = check(open_end, "trainer.total_epochs=3")
        assert inputs.config.actor_rollout_ref.actor.optim.lr_decay_steps == 6

    def test_a_longer_run_keeps_its_schedule(self, open_end):
        """In verl, the learning rates of later steps would change. Here, the run keeps them."""
        run = prepare(load(open_end, "trainer.total_epochs=3", *self.STYLE))
        before = config_of(run.description).actor_rollout_ref.actor.optim
        assert (before.lr_warmup_steps, before.lr_decay_steps) == (2, 6)
        for file in ([], [f"{DECAY}=6"]):
            longer = stage(check(open_end, "trainer.total_epochs=5", *self.STYLE, *file))
            assert longer.config.trainer.total_training_steps == 10
            assert longer.config.actor_rollout_ref.actor.optim == before

    def test_a_different_horizon_requires_a_new_run(self, open_end):
        prepare(load(open_end, "trainer.total_epochs=3", *self.STYLE))
        problem = the_error(open_end, "trainer.total_epochs=3", *self.STYLE, f"{DECAY}=7")
        assert f"{DECAY}: was 6, now 7" in problem
