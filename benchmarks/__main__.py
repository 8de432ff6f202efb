"""Make docs/performance.md anew: run every program, put its tables into the page.

    python -m benchmarks [--only NAME ...] [--quick --page FILE]

Half an hour on two cores. `--quick` has tiny sizes, shows in a minute that everything works, and
wants another file to write to: its numbers mean nothing.
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
    """A program that writes blocks of the page."""

    blocks: tuple[str, ...]
    needs: str | None = None
    """A command without which it cannot run; its blocks then stay as they are."""
    threads: int | None = None
    """Limit of numeric libraries' threads."""


PROGRAMS = {
    "traces": Program(("traces", "limits")),
    "plain_parquet": Program(("plain-parquet-limits", "plain-parquet")),
    "cores": Program(("cores",)),
    "handover": Program(("handover", "handover-goals"), threads=1),
    "writing": Program(("writing",)),
    "reading": Program(("reading",)),
    "verifying": Program(("verifying",)),
    "store": Program(("store",), needs="minio"),
    "manifest": Program(("manifest",)),
    "training": Program(("training",), threads=1),
    "replay": Program(("replay",), threads=1),
}


def run(name: str, quick: bool, folder: Path) -> dict[str, str]:
    """Run a program; its blocks. Raises CalledProcessError when it fails."""
    program = PROGRAMS[name]
    if program.needs and shutil.which(program.needs) is None:
        print(f"{name}: left out, its part of the page stays: no {program.needs} on PATH")
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
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to show that it works")
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
                print(f"{name}: failed with {error.returncode}; its part of the page stays")
                failed.append(name)
                continue
            # After each program, so that nothing is lost when a later one is interrupted.
            arguments.page.write_text(with_blocks(arguments.page.read_text(), blocks))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
