"""The end of a run on this machine: is anything left to do, and what came of it."""

from rich.console import Console

from pipeline.config.tree import RunConfig
from pipeline.report.folders import log_folder, tensorboard_folder
from pipeline.report.run_metrics import all_metrics, missing_validations, validation_rewards
from pipeline.report.tables import closing_table, summary
from pipeline.run import keys
from pipeline.run.attempts import attempt_count, read_attempt, validations_of
from pipeline.run.restarts import finished_steps
from pipeline.store import Store, open_store


def is_complete(config: RunConfig, store: Store) -> bool:
    """Whether a run needs no flow: its steps are finished and in its recorded set, if it has one,
    and no validation is missing that can still be made. Raises StoreError."""
    total = config.trainer.total_training_steps
    if finished_steps(store) < total:
        return False
    record_file = config.actor_rollout_ref.actor.router_replay.record_file
    if record_file is not None:
        recorded = open_store(record_file)
        if any(recorded.size(keys.manifest(step)) is None for step in range(total)):
            return False
    missing, gone = missing_validations(store, validations_of(config), total)
    return not missing and not gone


def finished_line(store: Store) -> str | None:
    """What can be said at once of a run whose last start came to its end; None of any other.

    Raises StoreError, also when there is no run.
    """
    total = read_attempt(store, attempt_count(store) - 1).settings["trainer.total_training_steps"]
    if finished_steps(store) < total:
        return None
    return f"{store.uri}: all {total} steps are finished already"


def report(config: RunConfig, store: Store) -> None:
    """Print a finished run's results, and where they lie."""
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
