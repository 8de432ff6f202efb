"""`retrace doctor`: whether this machine or pod can do what a run asks of it."""

from pathlib import Path
from typing import Annotated

import typer

from pipeline.errors import InputError


def doctor(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG.yaml|STORE]",
            help="Settings of a run, or the folder or URI of a store.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Replaces a setting of CONFIG.yaml."),
    ] = None,
) -> None:
    """Look at this machine's versions, GPUs, engines, store, Prefect, disk and shared memory.

    Each line says ok, or what is broken and what to do. What is not installed is broken only where
    the settings need it: a pod of one kind of worker has not the packages of the other.
    """
    # Imported here: pydantic and boto3, which the other commands' help needs not.
    from pipeline.config.reading.load import load_config
    from pipeline.doctor.checks import all_checks
    from pipeline.doctor.findings import Needs, State
    from pipeline.store.settings import use_settings

    needs = Needs()
    try:
        if what is not None and Path(what).suffix in (".yaml", ".yml"):
            config = load_config(what, overrides or ()).config
            use_settings(config.store)
            needs = Needs(config, config.store.uri)
        elif overrides:
            raise InputError(
                [f"{what}: no settings file for {overrides[0]}; name a CONFIG.yaml before it"]
            )
        elif what is not None:
            needs = Needs(None, what)
    except InputError as error:
        typer.echo("\n".join(f"error: {problem}" for problem in error.problems), err=True)
        raise typer.Exit(2) from error
    failed = 0
    for finding in all_checks(needs):
        typer.echo(finding)
        failed += finding.state is State.BROKEN
    raise typer.Exit(1 if failed else 0)
