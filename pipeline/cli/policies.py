"""`retrace policies`: list policy versions, and write one as a Hugging Face folder."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

import retrace
from pipeline.cli.epilog import command_group, epilog
from pipeline.cli.printable import listing
from pipeline.cli.runs import Run, end_with, open_run, print_, print_table, refusing
from pipeline.store.schemes import EXAMPLE_STORE
from pipeline.upkeep.policy_list import ListedPolicy

app = command_group(
    "List the policy versions of a run, or write one as a Hugging Face folder.",
    epilog(
        "docs/commands.md, docs/trace-format.md",
        "0: done; 1: a version cannot be fetched; 2: the version or folder cannot be used",
        "retrace policies ls quickstart",
        "retrace policies export quickstart 8 policy-8",
    ),
)


@app.command(
    "ls",
    epilog=epilog(
        "docs/trace-format.md",
        "0: done; 1: a version cannot be fetched; 2: no run was found",
        "retrace policies ls quickstart",
        f"retrace policies ls {EXAMPLE_STORE}/first",
    ),
)
def list_(run: Run) -> None:
    """List the stored policy versions of a run: whole or difference, size, weights digest.

    This command reads only commits; retrace traces verify reads the weights.
    """
    with refusing():
        found = open_run(run, sealed=False).listed_policies()
    columns: dict[str, Callable[[ListedPolicy], str]] = {
        "version": lambda one: str(one.version),
        "stored as": lambda one: "whole" if one.base is None else f"difference from {one.base}",
        "size": lambda one: decimal(one.size),
        "to fetch": lambda one: decimal(one.chain_size),
        "weights": lambda one: "—" if one.weights_sha256 is None else one.weights_sha256[:16],
    }
    print_table(listing(found, columns, left=("stored as", "weights")))
    end_with(f"policy {policy.version}: {policy.problem}" for policy in found if policy.problem)


def _version(value: str) -> int:
    if not re.fullmatch("[0-9]+", value):
        raise typer.BadParameter(
            f"found {value!r}, expected the number of a version; `retrace policies ls RUN` lists "
            "the stored versions"
        )
    return int(value)


@app.command(
    "export",
    context_settings={"ignore_unknown_options": True},  # `_version` explains -1 better
    epilog=epilog(
        "docs/commands.md",
        "0: written; 2: the version is not stored or is damaged, or the folder is not empty",
        "retrace policies export quickstart 8 policy-8",
        f"retrace policies export {EXAMPLE_STORE}/first 100 /models/first-100",
    ),
)
def export(
    run: Run,
    version: Annotated[
        int, typer.Argument(metavar="VERSION", parser=_version, help="A version from `ls`.")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to write to: new or empty.")
    ],
) -> None:
    """Write a policy version as a Hugging Face folder: safetensors, config and tokenizer.

    A version stored as a difference is rebuilt from its complete chain. All bytes that are read are
    checked against their digests.
    """
    with refusing():
        opened = open_run(run, sealed=False)
        with _writing(folder):
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                what = "not empty" if folder.is_dir() else "not a folder"
                raise retrace.InputError([f"{folder}: it is {what}; give a new or an empty folder"])
            opened.fetch_policy(version, folder)
            size = sum(path.stat().st_size for path in folder.iterdir())
    print_(f"{folder}: policy {version} of {run}, {decimal(size)}")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        found = error.strerror or str(error)
        where = "" if error.filename is None else f" ({error.filename})"
        raise retrace.InputError(
            [f"{folder}: found {found}{where}, expected a writable folder; give a different one"]
        ) from error
