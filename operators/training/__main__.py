"""`torchrun ... -m operators.training --run-uri URI --attempt N`: one training rank.

Exit code 0: all steps are trained, or the attempt was stopped. Anything else is a failure.
"""

import argparse
import logging

from operators.training.worker import exit_on_sigterm, run


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(prog="operators.training", description=__doc__)
    parser.add_argument("--run-uri", required=True, help="the run's root in the object store")
    parser.add_argument("--attempt", required=True, type=int, help="number of the flow's start")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter
    exit_on_sigterm()
    run(arguments.run_uri, arguments.attempt)


if __name__ == "__main__":
    main()
