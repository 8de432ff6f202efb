"""Run the experiment: python -m examples.mismatch [--full] [--arms NAME,...] [KEY=VALUE ...]"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import retrace
from examples.mismatch.arms import ARMS, ArmRun, arm_runs
from examples.mismatch.page import write_page
from examples.mismatch.results import Result, read_result
from examples.mismatch.running import note_costs, processor_s, read_costs, run_arm, unfinished

_STOPPED = (130, 143)
"""The exit codes of `retrace run` after Ctrl-C and SIGTERM, which also end this command."""


def make_policies(out: Path, kinds: set[str]) -> None:
    """Build the missing policies in a separate process."""
    if all((out / "policy" / kind).is_dir() for kind in kinds):
        return
    started, before = time.monotonic(), processor_s()
    command = [sys.executable, "-m", "examples.mismatch.make_policy", str(out / "policy")]
    subprocess.run([*command, *sorted(kinds)], check=True)
    note_costs(out, "policies", time.monotonic() - started, processor_s() - before)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.mismatch", description=__doc__)
    parser.add_argument(
        "--full", action="store_true", help="run all arms with three seeds; takes hours"
    )
    names = ", ".join(arm.name for arm in ARMS)
    parser.add_argument(
        "--arms", default="", metavar="NAME,...", help=f"run only these arms (known arms: {names})"
    )
    out_help = "folder for policies, runs, logs and the page (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("outputs/mismatch"), help=out_help)
    parser.add_argument("--page", type=Path, help="path of the page (default: OUT/mismatch.md)")
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="settings for all arms")
    arguments = parser.parse_args(words)
    out, page = arguments.out, arguments.page or arguments.out / "mismatch.md"
    if find_spec("matplotlib") is None:
        parser.error(
            "matplotlib is not installed, but the page's plots require it: pip install "
            "'retrace-moe[plots]'"
        )
    try:
        runs = arm_runs(list(filter(None, arguments.arms.split(","))), arguments.full, out)
        if wrong := [word for word in arguments.more if "=" not in word]:
            parser.error(f"{wrong[0]}: expected KEY=VALUE, a setting for all arms")
        more = dict(word.split("=", 1) for word in arguments.more)
        waiting = unfinished(runs, more)
    except ValueError as error:
        parser.error(str(error))
    except retrace.InputError as error:
        parser.error("\n".join(error.problems))
    os.environ.setdefault("COLUMNS", "120")
    out.mkdir(parents=True, exist_ok=True)
    make_policies(out, {run.arm.policy for run in runs})
    print(f"{len(runs) - len(waiting)} of {len(runs)} arms are finished")
    failed: dict[str, str] = {}
    for number, run in enumerate(waiting):
        print(f"\narm {number + 1} of {len(waiting)}")
        try:
            run_arm(run, more)
        except subprocess.CalledProcessError as error:
            if error.returncode in _STOPPED:
                return error.returncode
            failed[run.name] = f"exit code {error.returncode}"
        write_page(page, _results(runs), read_costs(out))
    found = _results(runs)
    write_page(page, found, read_costs(out))
    print(f"\npage   {page}")
    failed |= {r.run.name: r.end for r in found if r.run.name in failed and r.end is not None}
    for name, reason in failed.items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    if failed:
        print("run the same command again to continue the failed arms", file=sys.stderr)
    return 1 if failed else 0


def _results(runs: Sequence[ArmRun]) -> list[Result]:
    return [result for run in runs if (result := read_result(run)) is not None]


if __name__ == "__main__":
    sys.exit(main())
