"""Run two ranks, one of which uses the store for longer than the time limit for a pass.

This rank uses the store before each sum that a pass computes over the ranks. test_failing_ranks
starts this program.
"""

import os
import time

import torch
import torch.distributed as dist

from operators.training import agree
from operators.training.errors import PeerError
from operators.training.megatron import parallel
from pipeline.config.actor import Megatron

LIMITS = parallel.Limits(pass_s=2.0, store_s=60.0)
IN_THE_STORE_S = 3.5
RANK = int(os.environ["RANK"])


def in_the_store(late: int) -> int:
    """Make rank `late` spend time using the store, and return `late` on every rank."""
    if late == RANK:
        time.sleep(IN_THE_STORE_S)
    return late


def passes(group: dist.ProcessGroup | None) -> None:
    """Compute a sum over ranks, as passes do."""
    found = torch.tensor([RANK + 1.0])
    dist.all_reduce(found, group=group)
    assert found.item() == 3.0


if __name__ == "__main__":
    group = parallel.start(Megatron(), LIMITS).data_group

    assert agree.agreed(lambda: in_the_store(0)) == 0
    passes(group)
    assert agree.gathered(in_the_store(1)) == [1, 1]
    passes(None)
    with agree.folder_of_node("apart", lambda folder: in_the_store(0)):
        passes(group)
    in_the_store(1)
    agree.await_ranks()
    passes(None)

    # If the ranks do not agree first, the passes' groups time out, including the default one.
    for of_a_pass in (group, None):
        try:
            in_the_store(1)
            passes(of_a_pass)
        except RuntimeError as error:
            print(f"rank {RANK} gave up: {str(error).splitlines()[0]}", flush=True)  # noqa: T201
    if RANK == 1:
        os._exit(0)
    try:
        agree.await_ranks()
    except PeerError as error:
        print(f"peer error: {error}", flush=True)  # noqa: T201
    os._exit(0)  # the groups are broken
