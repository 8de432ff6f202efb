"""`retrace doctor`: check whether this machine or pod meets the requirements of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.check import Overrides, print_errors
from pipeline.errors import InputError
from pipeline.extras import need

if TYPE_CHECKING:
    from pipeline.config.tree import RunConfig


def doctor(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG.yaml|STORE]",
            help="Settings of a run, or the folder or URI of a store.",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Check this machine's versions, GPUs, engines, store, Prefect, disk and shared memory.

    Each line reports ok, or a broken part and its fix. A missing package counts as broken only if
    the settings need it here: rollout pods do not contain the packages of training pods.
    """
    # Imported here because other commands can print their help without pydantic and boto3.
    from pipeline.config.reading.load import load_config
    from pipeline.doctor.checks import all_checks
    from pipeline.doctor.findings import Needs, State
    from pipeline.store.settings import use_settings

    needs = Needs()
    try:
        if what is not None and Path(what).suffix in (".yaml", ".yml"):
            config = load_config(what, overrides or ()).config
            use_settings(config.store)
            needs = Needs(config, config.store.uri, missing=_missing(config))
        elif overrides:
            raise InputError(
                [f"{what}: not a settings file; name a CONFIG.yaml before {overrides[0]}"]
            )
        elif what is not None:
            needs = Needs(None, what)
    except InputError as error:
        print_errors(error)
        raise typer.Exit(2) from error
    failed = 0
    for finding in all_checks(needs):
        typer.echo(finding)
        failed += finding.state is State.BROKEN
    raise typer.Exit(1 if failed else 0)


def _missing(config: "RunConfig") -> tuple[str, ...]:
    """Return what this machine lacks for the run; nothing in a pod without the flow's packages."""
    try:
        need("flow", "a run")
    except InputError:
        return ()  # the check of the versions reports it
    from pipeline.inputs.sizes.verdict import missing

    return tuple(missing(config))
