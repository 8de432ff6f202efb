"""`python -m tests.hostile [--all] [--only NAME]`: exit code 1 when a case came out wrong."""

import argparse
import sys

from tests.hostile.campaign import SAMPLE, all_cases, run, sampled
from tests.hostile.judge import Verdict


def main() -> int:
    """Try cases, print what came of those that are wrong, then the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--all", action="store_true", help="all cases, all readers and commands")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="how many without --all")
    parser.add_argument("--limit", type=float, default=60.0, help="processor seconds for a case")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="every case, also the right ones")
    arguments = parser.parse_args()
    cases = all_cases()
    numbers = list(range(len(cases)))
    if arguments.only:
        numbers = [n for n in numbers if arguments.only in cases[n].name]
    elif not arguments.all:
        numbers = sampled(arguments.sample)

    def seen(name: str, verdict: Verdict) -> None:
        if verdict.bad or arguments.verbose:
            said = "; ".join(verdict.bad) or f"right: {verdict.problems[:1]}"
            sys.stdout.write(f"{name}: {said}\n")
            sys.stdout.flush()

    whole = arguments.all or bool(arguments.only)
    outcome = run(numbers, whole, arguments.processes, arguments.limit, seen)
    sys.stdout.write(f"{outcome.table()}\n")
    for pattern in outcome.mended:
        sys.stdout.write(f"mended, take it out of OPEN: {pattern}\n")
    return 1 if outcome.failed or outcome.mended else 0


if __name__ == "__main__":
    sys.exit(main())
