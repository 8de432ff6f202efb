"""Runs that are given in epochs: the steps follow from the prompts, as verl counts them."""

import pytest

from pipeline.inputs.stage import prepare, stage
from pipeline.run.run_config import config_of
from tests.unit.inputs.small_inputs import check, load, the_error, verl_rows, write_prompts

WARMUP = "actor_rollout_ref.actor.optim.lr_warmup_steps"


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

    def test_a_longer_run_is_another_schedule(self, open_end):
        """Where verl would change the rate of steps that come, the run goes on as it began."""
        prepare(load(open_end, "trainer.total_epochs=3", self.RATIO))
        longer = (open_end, "trainer.total_epochs=5", self.RATIO)
        assert f"{WARMUP}: it has 2, now 4" in the_error(*longer)
        assert check(*longer, f"{WARMUP}=2").config.trainer.total_training_steps == 10
