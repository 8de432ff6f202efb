"""Run one training rank: `torchrun ... -m operators.training --run-uri URI --attempt N`.

Exit codes:
    0: All steps are trained, or the attempt was stopped.
    1: An error. The rank logs one line (RANK_FAILED, at level ERROR), with the traceback if the
        exception is not one of Retrace's errors. torchrun then logs further lines.
    78: An error that would recur after a restart.
    143: The rank received SIGTERM.
"""

import argparse
import logging
import os
import sys

from operators.exits import exit_code
from operators.settling import settle
from operators.training.errors import PeerError, ReplayError, UpdateError
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
    die_with_parent()  # torchrun does not arrange this for the ranks that it starts
    parser = argparse.ArgumentParser(prog="operators.training", description=__doc__)
    parser.add_argument("--run-uri", required=True, help="the run's root in the object store")
    parser.add_argument("--attempt", required=True, type=int, help="number of the attempt")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("megatron").setLevel(logging.WARNING)  # at INFO it lists every parameter
    known = (
        *(UpdateError, ReplayError, PeerError),
        *(TraceError, InputError, StoreError, WaitTimeoutError),
    )
    try:
        need("training", "a training rank")
        settle(arguments.run_uri, arguments.attempt)  # before torch is imported
        from operators.training.worker import exit_on_sigterm, run  # imports the extra's packages

        exit_on_sigterm()
        run(arguments.run_uri, arguments.attempt)
    except Exception as error:
        # The other ranks fail when this process ends. This line is logged first, so that the
        # launcher can identify the cause by the line's time. It is a single line, even for an
        # InputError that lists several problems.
        what = f"{type(error).__name__}: {'; '.join(str(error).splitlines())}"
        log.error(RANK_FAILED, os.environ["RANK"], what, exc_info=not isinstance(error, known))
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
