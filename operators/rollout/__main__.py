"""`python -m operators.rollout --run-uri URI --worker I --attempt N`: run one rollout worker.

Exit codes:
    0: The attempt was stopped.
    1: An error; the last line of the log contains the message.
    78: An error that would recur after a restart, for example refused store credentials.
    143: The worker received SIGTERM. Its work does not count as finished.
"""

import argparse
import logging
import os
import signal
from types import FrameType

from operators.exits import exit_code
from operators.load_errors import LoadError
from operators.rollout.types import RolloutError
from operators.rollout.worker import run
from operators.settling import settle
from pipeline.errors import InputError
from pipeline.extras import need
from pipeline.rl.rewards import RewardError
from pipeline.run.wait import WaitTimeoutError
from pipeline.store import StoreError
from pipeline.traces import TraceError

log = logging.getLogger("operators.rollout")

_KNOWN = (RolloutError, RewardError, TraceError, InputError, StoreError, WaitTimeoutError)


def main() -> int:
    """Parse the arguments, run the worker until it is stopped, and return the exit code."""
    parser = argparse.ArgumentParser(prog="operators.rollout", description=__doc__)
    parser.add_argument("--run-uri", required=True, help="the run's root in the object store")
    parser.add_argument("--worker", required=True, type=int, help="index of this worker, from 0")
    parser.add_argument("--attempt", required=True, type=int, help="number of the attempt")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    signal.signal(signal.SIGTERM, _terminate)
    try:
        need("rollout-cpu", "a rollout worker")
        settle(arguments.run_uri, arguments.attempt)  # before torch is imported
        run(arguments.run_uri, arguments.worker, arguments.attempt)
    except (*_KNOWN, LoadError) as error:
        what = f"{type(error).__name__}: {'; '.join(str(error).splitlines())}"
        log.error(what, exc_info=isinstance(error, LoadError))
        return exit_code(error)
    return 0


def _terminate(number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM in a way that removes temporary folders."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    code = main()
    # The engine is closed and all files are written. A normal exit would free the modules of vLLM
    # and torch one by one, and the flow would have to wait several seconds for that.
    logging.shutdown()
    os._exit(code)
