"""Try damaged and forged stores (`python -m tests.hostile`). The exit code is 1 if a case fails."""

import argparse
import sys

from tests.hostile.campaign import SAMPLE, all_cases, run, sampled
from tests.hostile.judge import Verdict


def main() -> int:
    """Try cases, then print the failed ones and the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="try all cases with all readers and commands"
    )
    parser.add_argument("--only", help="try the cases whose names contain this text")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="number of cases without --all")
    parser.add_argument("--limit", type=float, default=60.0, help="processor seconds per case")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--verbose", action="store_true", help="print all cases, including the passed ones"
    )
    arguments = parser.parse_args()
    cases = all_cases()
    numbers = list(range(len(cases)))
    if arguments.only:
        numbers = [n for n in numbers if arguments.only in cases[n].name]
    elif not arguments.all:
        numbers = sampled(arguments.sample)

    def seen(name: str, verdict: Verdict) -> None:
        if verdict.bad or arguments.verbose:
            result = "; ".join(verdict.bad) or f"passed: {verdict.problems[:1]}"
            sys.stdout.write(f"{name}: {result}\n")
            sys.stdout.flush()

    whole = arguments.all or bool(arguments.only)
    outcome = run(numbers, whole, arguments.processes, arguments.limit, seen)
    sys.stdout.write(f"{outcome.table()}\n")
    for pattern in outcome.mended:
        sys.stdout.write(f"all its cases pass, so remove it from OPEN: {pattern}\n")
    return 1 if outcome.failed or outcome.mended else 0


if __name__ == "__main__":
    sys.exit(main())
