"""Runs that are given in epochs: the steps follow from the prompts, as verl counts them."""

import pytest

from pipeline.inputs.stage import prepare, stage
from pipeline.run.run_config import config_of
from tests.unit.inputs.small_inputs import check, load, the_error, verl_rows, write_prompts

OPTIM = "actor_rollout_ref.actor.optim"
WARMUP = f"{OPTIM}.lr_warmup_steps"
DECAY = f"{OPTIM}.lr_decay_steps"


@pytest.fixture
def open_end(settings):
    """Settings for 10 prompts, 4 a step, that do not say how long the run is."""
    settings.write_text(settings.read_text().replace(", total_training_steps: 2", ""))
    return settings


def test_epochs_have_whole_batches(open_end):
    inputs = check(open_end, "trainer.total_epochs=3")
    assert inputs.config.trainer.total_training_steps == 6
    assert inputs.notes == (
        "trainer.total_epochs: 3 of 2 whole batches each (10 prompts, 4 per step) are 6 steps",
    )


def test_dropped_prompts_do_not_count(open_end):
    """verl counts what its filter leaves."""
    long = verl_rows(1)
    long[0]["prompt"][0]["content"] *= 20
    write_prompts(open_end.parent / "train.parquet", [*long * 3, *verl_rows(7)])
    inputs = check(open_end, "trainer.total_epochs=3", "data.filter_overlong_prompts=True")
    assert (inputs.prompt_count, inputs.config.trainer.total_training_steps) == (7, 3)


def test_less_than_a_batch(open_end):
    problem = the_error(open_end, "trainer.total_epochs=3", "data.train_batch_size=12")
    assert problem.startswith("data.train_batch_size: found 12, but data.train_files has 10")


def test_written_steps_win(settings):
    inputs = check(settings, "trainer.total_epochs=3")
    assert inputs.config.trainer.total_training_steps == 2
    assert inputs.notes == (
        "trainer.total_epochs: 3 has no effect, trainer.total_training_steps=2 wins as in verl",
    )


def test_neither_is_said(open_end):
    inputs = check(open_end)
    assert inputs.config.trainer.total_training_steps == 10
    assert inputs.notes[0].startswith("trainer.total_training_steps: 10, as neither it nor")


def test_the_run_has_the_number_and_the_same_file_attaches(open_end):
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

    def test_a_share_of_the_steps(self, open_end):
        inputs = check(open_end, "trainer.total_epochs=3", self.RATIO)
        assert inputs.config.actor_rollout_ref.actor.optim.lr_warmup_steps == 2  # int(0.4 * 6)
        assert f"{WARMUP}_ratio: 0.4 of 6 steps are 2 steps" in inputs.notes

    def test_written_steps_win(self, settings):
        inputs = check(settings, self.RATIO, f"{WARMUP}=1")
        assert inputs.config.actor_rollout_ref.actor.optim.lr_warmup_steps == 1

    def test_a_share_of_the_schedule(self, open_end):
        inputs = check(open_end, "trainer.total_epochs=3", self.RATIO, f"{DECAY}=10")
        assert inputs.config.actor_rollout_ref.actor.optim.lr_warmup_steps == 4  # int(0.4 * 10)


class TestSchedule:
    STYLE = (f"{OPTIM}.lr_decay_style=cosine", f"{OPTIM}.lr_warmup_steps_ratio=0.4")

    def test_its_horizon_is_the_run(self, open_end):
        inputs = check(open_end, "trainer.total_epochs=3")
        assert inputs.config.actor_rollout_ref.actor.optim.lr_decay_steps == 6

    def test_a_longer_run_keeps_its_schedule(self, open_end):
        """Where verl would change the rates of steps that come, the run goes on as it began."""
        run = prepare(load(open_end, "trainer.total_epochs=3", *self.STYLE))
        before = config_of(run.description).actor_rollout_ref.actor.optim
        assert (before.lr_warmup_steps, before.lr_decay_steps) == (2, 6)
        for file in ([], [f"{DECAY}=6"]):
            longer = stage(check(open_end, "trainer.total_epochs=5", *self.STYLE, *file))
            assert longer.config.trainer.total_training_steps == 10
            assert longer.config.actor_rollout_ref.actor.optim == before

    def test_a_run_without_a_share_keeps_its_warm_up(self, open_end):
        """int(0.1 * 6) is 0, int(0.1 * 10) is not."""
        ratio = f"{WARMUP}_ratio=0.1"
        run = prepare(load(open_end, "trainer.total_epochs=3", ratio))
        longer = stage(check(open_end, "trainer.total_epochs=5", ratio))
        assert longer.config.actor_rollout_ref.actor == run.config.actor_rollout_ref.actor

    def test_another_horizon_is_another_run(self, open_end):
        prepare(load(open_end, "trainer.total_epochs=3", *self.STYLE))
        problem = the_error(open_end, "trainer.total_epochs=3", *self.STYLE, f"{DECAY}=7")
        assert f"{DECAY}: it has 6, now 7" in problem

    def test_warm_up_must_fit(self, open_end):
        problem = the_error(open_end, "trainer.total_epochs=3", self.STYLE[0], f"{WARMUP}=6")
        assert problem.startswith(f"{WARMUP}: found 6, expected fewer than {DECAY}=6 (null: the")
