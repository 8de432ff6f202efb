"""Decisions that all ranks must take alike."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def agreed(decide: Callable[[], T]) -> T:
    """What rank 0 decides, on every rank; all ranks call. The result must be picklable.

    An error on rank 0 leaves the others waiting: it ends that process, and the launcher the gang.
    """
    decision: list[Any] = [decide() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(decision, src=0)
    return decision[0]
