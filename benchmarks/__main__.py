"""Update benchmarks/performance.md: run all programs and write their tables into the page.

    python -m benchmarks [--only NAME ...] [--quick --page FILE]

This takes half an hour on two cores. `--quick` uses tiny sizes and checks in a minute that
everything works. Its numbers are meaningless, so it must write to a different file (`--page`).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.page import PAGE, with_blocks


@dataclass(frozen=True)
class Program:
    """A program that generates blocks of the page."""

    blocks: tuple[str, ...]
    needs: str | None = None
    """A command that the program requires; without it, the program's blocks stay unchanged."""
    threads: int | None = None
    """Maximum number of threads for numeric libraries."""


PROGRAMS = {
    "traces": Program(("traces", "limits")),
    "plain_parquet": Program(("plain-parquet",)),
    "cores": Program(("cores",)),
    "handover": Program(("handover", "handover-goals"), threads=1),
    "writing": Program(("writing",)),
    "reading": Program(("reading",)),
    "verifying": Program(("verifying",)),
    "store": Program(("store",), needs="minio"),
    "policies": Program(("policies",), needs="minio"),
    "manifest": Program(("manifest",)),
    "prompts": Program(("prompts",)),
    "codings": Program(("codings",)),
    "training": Program(("training",), threads=1),
    "replay": Program(("replay",), threads=1),
}


def run(name: str, quick: bool, folder: Path) -> dict[str, str]:
    """Run a program and return its blocks by name.

    Args:
        name: Key of PROGRAMS.
        quick: Whether to use tiny sizes.
        folder: Folder for the program's output.

    Returns:
        The text of each block, keyed by name; empty if the command that the program requires is
        missing.

    Raises:
        CalledProcessError: The program failed.
        ValueError: The program did not write exactly the blocks that PROGRAMS lists.
    """
    program = PROGRAMS[name]
    if program.needs and shutil.which(program.needs) is None:
        print(f"{name}: skipped, no {program.needs} on PATH; its part of the page is unchanged")
        return {}
    written = folder / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--blocks", str(written)]
    environment = dict(os.environ)
    if program.threads:
        environment["OMP_NUM_THREADS"] = str(program.threads)
    started = time.monotonic()
    subprocess.run([*command, *(["--quick"] if quick else [])], check=True, env=environment)
    print(f"{name}: {time.monotonic() - started:.0f} s\n", flush=True)
    blocks: dict[str, str] = json.loads(written.read_text())
    if set(blocks) != set(program.blocks):
        raise ValueError(f"{name} wrote {sorted(blocks)}, expected {sorted(program.blocks)}")
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", choices=PROGRAMS, help="may be repeated")
    parser.add_argument(
        "--quick", action="store_true", help="use tiny sizes, to check that everything works"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    arguments = parser.parse_args()
    if arguments.quick and arguments.page.resolve() == PAGE:
        parser.error("--quick needs --page FILE: its numbers do not belong on the page")
    if not arguments.page.exists():
        shutil.copy(PAGE, arguments.page)
    failed = []
    with TemporaryDirectory() as folder:
        for name in arguments.only or PROGRAMS:
            try:
                blocks = run(name, arguments.quick, Path(folder))
            except subprocess.CalledProcessError as error:
                print(f"{name}: failed with {error.returncode}; its part of the page is unchanged")
                failed.append(name)
                continue
            # The page is written after each program, so that interrupting a later one loses
            # nothing.
            arguments.page.write_text(with_blocks(arguments.page.read_text(), blocks))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
