"""Run the cases with damaged and forged stores (`python -m tests.hostile`).

The exit code is 1 if a case fails, or if all cases of a pattern in OPEN pass.
"""

import argparse
import sys

from tests.hostile.campaign import SAMPLE, all_cases, one_of_each, run, sampled
from tests.hostile.judge import Verdict


def main() -> int:
    """Run the selected cases, print each failed case, then print the summary table."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="run all cases with all readers and commands"
    )
    parser.add_argument(
        "--each",
        action="store_true",
        help="run one case per kind of change and world with all readers and commands",
    )
    parser.add_argument("--only", help="run the cases whose names contain this text")
    parser.add_argument(
        "--sample", type=int, default=SAMPLE, help="number of cases to run without --all and --only"
    )
    parser.add_argument(
        "--limit", type=float, default=60.0, help="limit of CPU time per case, in seconds"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--verbose", action="store_true", help="print all cases, including those that pass"
    )
    arguments = parser.parse_args()
    cases = all_cases()
    numbers = list(range(len(cases)))
    if arguments.only:
        numbers = [n for n in numbers if arguments.only in cases[n].name]
    elif arguments.each:
        numbers = one_of_each()
    elif not arguments.all:
        numbers = sampled(arguments.sample)

    def seen(name: str, verdict: Verdict) -> None:
        if verdict.bad or arguments.verbose:
            result = "; ".join(verdict.bad) or f"passed: {verdict.problems[:1]}"
            sys.stdout.write(f"{name}: {result}\n")
            sys.stdout.flush()

    whole = arguments.all or arguments.each or bool(arguments.only)
    outcome = run(numbers, whole, arguments.processes, arguments.limit, seen)
    sys.stdout.write(f"{outcome.table()}\n")
    for pattern in outcome.mended:
        sys.stdout.write(f"remove {pattern} from OPEN, because all its cases pass\n")
    return 1 if outcome.failed or outcome.mended else 0


if __name__ == "__main__":
    sys.exit(main())
