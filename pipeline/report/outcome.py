"""Functions for the end of a local run: they check that it is complete, and report its results."""

from rich.console import Console

from pipeline.config.tree import RunConfig
from pipeline.recorded import is_recorded
from pipeline.report.folders import log_folder, tensorboard_folder
from pipeline.report.run_metrics import all_metrics, missing_validations, validation_rewards
from pipeline.report.tables import closing_table, summary
from pipeline.run.attempts import read_attempt, validations_of
from pipeline.run.restarts import attempt_count, finished_steps
from pipeline.store import Store, open_store


def is_complete(config: RunConfig, store: Store) -> bool:
    """Return whether a run is complete and leaves nothing for a flow to do.

    All steps of a complete run are finished, and all its validations exist. If the settings name a
    recorded set to write, that set contains all steps with their files and plans. Raises
    StoreError and TraceError.
    """
    total = config.trainer.total_training_steps
    if finished_steps(store) < total:
        return False
    record_file = config.actor_rollout_ref.actor.router_replay.record_file
    if record_file is not None:
        recorded = open_store(record_file)
        if not all(is_recorded(store, recorded, step) for step in range(total)):
            return False
    missing, gone = missing_validations(store, validations_of(config), total)
    return not missing and not gone


def finished_line(store: Store) -> str | None:
    """Return a line for users if all steps of the run's last attempt are finished, otherwise None.

    The number of steps is read from that attempt, not from the current settings. Raises StoreError,
    for example if the store does not contain a run.
    """
    total = read_attempt(store, attempt_count(store) - 1).settings["trainer.total_training_steps"]
    if finished_steps(store) < total:
        return None
    return f"{store.uri}: all {total} steps are already finished"


def report(config: RunConfig, store: Store) -> None:
    """Print the results of a finished run, and their locations."""
    console = Console(highlight=False, soft_wrap=True)
    rewards = validation_rewards(store, validations_of(config))
    steps = all_metrics(store)
    console.print(closing_table(steps, rewards))
    for line in summary(steps, rewards):
        console.print(line)
    console.print(f"run      {config.run_uri}")
    console.print(f"logs     {log_folder(config)}")
    if "tensorboard" in config.trainer.logger:
        console.print(f"curves   tensorboard --logdir {tensorboard_folder(config)}")
    console.print(f"traces   retrace traces ls {config.run_uri}")
