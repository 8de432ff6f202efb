"""`torchrun ... -m operators.training --run-uri URI --attempt N`: one training rank.

Exit code 0: all steps are trained, or the attempt was stopped. 1: an error, which a line of the log
says (RANK_FAILED, at level ERROR; with the traceback if it is none of ours); torchrun writes more
after it. 78: an error that a restart would meet again. 143: SIGTERM.
"""

import argparse
import logging
import os
import sys

from operators.exits import exit_code
from operators.settling import settle
from operators.training.errors import ReplayError, UpdateError
from pipeline.errors import InputError
from pipeline.exits import RANK_FAILED
from pipeline.extras import need
from pipeline.orphans import die_with_parent
from pipeline.run.wait import WaitTimeoutError
from pipeline.store import StoreError
from pipeline.traces import TraceError

log = logging.getLogger("operators.training")


def main() -> int:
    """Parse the arguments, train, and return the exit code."""
    die_with_parent()  # torchrun, which starts its ranks without asking for this
    parser = argparse.ArgumentParser(prog="operators.training", description=__doc__)
    parser.add_argument("--run-uri", required=True, help="the run's root in the object store")
    parser.add_argument("--attempt", required=True, type=int, help="number of the flow's start")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter
    known = (UpdateError, ReplayError, TraceError, InputError, StoreError, WaitTimeoutError)
    try:
        need("training", "a training rank")
        settle(arguments.run_uri, arguments.attempt)  # before torch is imported
        from operators.training.worker import exit_on_sigterm, run  # imports the extra's packages

        exit_on_sigterm()
        run(arguments.run_uri, arguments.attempt)
    except Exception as error:
        # Written before this process ends, at which the other ranks fail too, so that the launcher
        # can tell the cause by its time. One line, however many problems an InputError lists.
        what = f"{type(error).__name__}: {'; '.join(str(error).splitlines())}"
        log.error(RANK_FAILED, os.environ["RANK"], what, exc_info=not isinstance(error, known))
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
