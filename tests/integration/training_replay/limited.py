"""The program of a training rank whose passes time out after a few seconds.

The environment variable LIMIT_S sets the time limit for passes; the store keeps the attempt's
limit. test_slow_store starts the program.
"""

import os
import sys

from operators.training import __main__ as program
from operators.training.__main__ import settle


def _settle(run_uri: str, attempt: int) -> None:
    settle(run_uri, attempt)  # settle must run before torch is imported
    from operators.training.megatron import parallel

    parallel.limits_of = lambda launch: parallel.Limits(
        pass_s=float(os.environ["LIMIT_S"]),
        store_s=launch.start_timeout_s + launch.step_timeout_s,
    )


if __name__ == "__main__":
    program.settle = _settle
    sys.exit(program.main())
