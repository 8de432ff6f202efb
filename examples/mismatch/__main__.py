"""Run the experiment: python -m examples.mismatch [--full] [--arms NAME,...] [KEY=VALUE ...]"""

import argparse
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import retrace
from examples.mismatch.arms import ARMS, arm_runs
from examples.mismatch.page import write_page
from examples.mismatch.results import read_result
from examples.mismatch.running import note_costs, processor_s, read_costs, run_arm, unfinished


def make_policies(out: Path, kinds: set[str]) -> None:
    """Build the policies that are missing, in a process of their own."""
    if all((out / "policy" / kind).is_dir() for kind in kinds):
        return
    started, before = time.monotonic(), processor_s()
    command = [sys.executable, "-m", "examples.mismatch.make_policy", str(out / "policy")]
    subprocess.run([*command, *sorted(kinds)], check=True)
    note_costs(out, "policies", time.monotonic() - started, processor_s() - before)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.mismatch", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all arms, three seeds: hours")
    names = ", ".join(arm.name for arm in ARMS)
    parser.add_argument("--arms", default="", metavar="NAME,...", help=f"only these of {names}")
    parser.add_argument("--out", type=Path, default=Path("outputs/mismatch"), help="its folder")
    parser.add_argument("--page", type=Path, help="the page to write; default: OUT/mismatch.md")
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="settings of all arms")
    arguments = parser.parse_args(words)
    out, page = arguments.out, arguments.page or arguments.out / "mismatch.md"
    if find_spec("matplotlib") is None:
        parser.error("the page needs matplotlib: pip install 'retrace-moe[plots]'")
    try:
        runs = arm_runs(list(filter(None, arguments.arms.split(","))), arguments.full, out)
        if wrong := [word for word in arguments.more if "=" not in word]:
            parser.error(f"{wrong[0]}: expected KEY=VALUE, a setting of all arms")
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
    for number, run in enumerate(waiting):
        print(f"\narm {number + 1} of {len(waiting)}")
        try:
            run_arm(run, more)
        except subprocess.CalledProcessError as error:
            print(f"{run.name} failed; the same command again goes on", file=sys.stderr)
            return error.returncode
        write_page(page, [r for run in runs if (r := read_result(run))], read_costs(out))
    write_page(page, [r for run in runs if (r := read_result(run))], read_costs(out))
    print(f"\npage   {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
