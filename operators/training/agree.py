"""Decisions and downloads that ranks share."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from pipeline.scratch import scratch_folder

T = TypeVar("T")


def agreed(decide: Callable[[], T]) -> T:
    """Return rank 0's decision on every rank; all ranks call. The result must be picklable.

    After an error on rank 0 the others wait: that process ends, and the launcher ends the gang.
    """
    decision = [decide() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(decision, src=0)
    return cast(T, decision[0])


def gathered(value: T) -> list[T]:
    """Every rank's value, on every rank, in rank order; all ranks call. It must be picklable."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def folder_of_node(name: str, fill: Callable[[Path], object]) -> Iterator[Path]:
    """Make a scratch folder on each node, which the node's first rank fills for all its ranks.

    All ranks call, and all leave the block together, so that no folder is removed while in use.
    """
    node, local_rank = os.environ["GROUP_RANK"], int(os.environ["LOCAL_RANK"])
    with scratch_folder(name) as own:
        if local_rank == 0:
            fill(own)
        of_ranks = [(node, local_rank, own)] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (node, local_rank, own))
        yield next(path for n, local, path in of_ranks if (n, local) == (node, 0))
        dist.barrier()
