"""The logs of a run's workers on this machine."""

import socket
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run.commit import parsing, read_commit
from pipeline.run.owner import Owner, owner_of
from pipeline.store import Store, open_store, shown_uri
from pipeline.store.settings import use_settings
from retrace.opened import open_run


def log_files(run: str | Path, overrides: Sequence[str] = ()) -> list[Path]:
    """Return the log files of a run's workers, such as rollout-0.log, sorted by name.

    The logs are on the machine where `retrace run` was called, below `trainer.default_local_dir`.
    A relative path is resolved against the working directory.

    Args:
        run: The folder or URI of a run, or its settings file.
        overrides: Settings (`key=value`) that replace those in the file.

    Raises:
        NoLogsError: This machine has no logs of the run; its workers may not have started yet.
        InputError: The logs are elsewhere. For a run on Kubernetes, the message gives the commands
            that print the logs.
        TraceError: No run exists at this location.
        StoreError: The store cannot be read.
    """
    # Imported here because readers of traces do not need pydantic or YAML.
    from pipeline.config.reading.load import load_config
    from pipeline.report.folders import NoLogsError, log_folder
    from pipeline.run.attempts import config_of

    if Path(run).suffix in (".yaml", ".yml") and "://" not in str(run) and not Path(run).is_dir():
        if not Path(run).exists():
            raise InputError([f"{run}: no such settings file (working directory: {Path.cwd()})"])
        config = load_config(run, overrides).config
        use_settings(config.store)
        store = open_store(config.run_uri)
    elif overrides:
        raise InputError(
            [f"{run}: not a settings file; name a CONFIG.yaml before {overrides[0]}, or only a run"]
        )
    else:
        opened = open_run(run)
        store = opened.store
        config = config_of(opened.description)
    folder = log_folder(config)
    found = sorted(folder.glob("*.log"))
    if found:
        return found
    name = config.trainer.run_name
    if (owner := _newest_owner(store)) is not None:
        if owner.flow_run is not None:
            raise InputError([_on_kubernetes(name, owner.flow_run)])
        if owner.host != socket.gethostname():
            raise InputError(
                [f"{folder} contains no logs of the run {name!r}: its newest start was {owner}"]
            )
    raise NoLogsError(
        [
            f"{folder} contains no logs of the run {name!r} (store: {shown_uri(store.uri)}); call "
            "this on the machine and in the folder where `retrace run` was called; if "
            "trainer.default_local_dir has changed since, give the settings file"
        ]
    )


def _newest_owner(store: Store) -> Owner | None:
    """Return the owner of the newest attempt; None if there is no attempt, or it names no owner."""
    numbers = [keys.attempt_number(info.key) for info in store.list(keys.attempts())]
    started = [number for number in numbers if number is not None]
    if not started:
        return None
    key = keys.attempt(max(started))
    with parsing(store, key):
        return owner_of(read_commit(store, key))


def _on_kubernetes(name: str, flow_run: str) -> str:
    # Imported here because only runs on Kubernetes need this module.
    from pipeline.launch.kubernetes.names import (
        COMPONENT,
        FLOW_RUN_OF_FLOW_POD,
        ROLLOUT,
        RUN,
        TRAINING,
        selector,
    )

    def command(labels: dict[str, str]) -> str:
        return f"kubectl --namespace NAMESPACE logs --prefix --tail=50 -f -l {selector(labels)}"

    return (
        f"the logs of the run {name!r} are in its pods on Kubernetes; show them with: "
        f"{command({RUN: name, COMPONENT: ROLLOUT})}; {command({RUN: name, COMPONENT: TRAINING})}; "
        f"for the flow: {command({FLOW_RUN_OF_FLOW_POD: flow_run})}"
    )
