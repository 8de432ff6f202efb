"""Run a rank's program with a failure: rank 0 finds the disk full while other ranks wait.

test_failing_ranks starts this program.
"""

import sys

import torch.distributed as dist

from operators.training import __main__ as program
from operators.training import worker
from pipeline.store import RefusedError


def _run(run_uri: str, attempt: int) -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        raise RefusedError("create checkpoints/000001/x: [Errno 28] No space left on device")
    dist.barrier()


if __name__ == "__main__":
    program.settle = lambda run_uri, attempt: None  # there is no run to choose a device for
    worker.run = _run
    sys.exit(program.main())
