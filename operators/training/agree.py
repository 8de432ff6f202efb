"""Collectives for shared decisions and downloads, during which a rank may wait for the store.

These collectives use a separate Gloo group. Its timeout covers the longest wait for the store. The
groups that the passes use time out sooner, and a timeout in an NCCL group ends the process. A rank
that has waited for the store therefore waits here for the other ranks (`await_ranks`) before it
calls a collective in a pass.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from operators.training.errors import PeerError
from pipeline.scratch import scratch_folder

T = TypeVar("T")

_group: dist.ProcessGroup | None = None
"""The group of all ranks, on CPU. None selects the default process group, for programs that do not
call `make_group`."""


def make_group(limit_s: float) -> None:
    """Create the group for this module's collectives; every rank must call this.

    `limit_s` is the longest time that one rank may wait for the store while the others wait for
    that rank.
    """
    global _group
    _group = dist.new_group(timeout=timedelta(seconds=limit_s), backend="gloo")


def drop_group() -> None:
    """Forget the group, because its process group is about to end."""
    global _group
    _group = None


def agreed(decide: Callable[[], T]) -> T:
    """Return rank 0's decision on every rank; every rank must call this.

    The decision must be picklable. If `decide` fails on rank 0, the process of rank 0 ends and the
    other ranks raise PeerError.
    """
    decision = [decide() if dist.get_rank() == 0 else None]
    with _waiting("rank 0's decision"):
        dist.broadcast_object_list(decision, src=0, group=_group)
    return cast(T, decision[0])


def gathered(value: T) -> list[T]:
    """Return the values of all ranks in rank order; every rank must call this.

    The values must be picklable.
    """
    values = [value] * dist.get_world_size()
    with _waiting("the other ranks' values"):
        dist.all_gather_object(values, value, group=_group)
    return values


def await_ranks() -> None:
    """Wait until every rank has called this, even if a rank spends a long time in the store."""
    with _waiting("the other ranks"):
        dist.barrier(_group)


@contextmanager
def folder_of_node(name: str, fill: Callable[[Path], object]) -> Iterator[Path]:
    """Create a scratch folder on each node; the node's first rank fills it for the others.

    Every rank must call this. All ranks leave the `with` block together, so that no folder is
    removed while it is in use.
    """
    node, local_rank = os.environ["GROUP_RANK"], int(os.environ["LOCAL_RANK"])
    with scratch_folder(name) as own:
        if local_rank == 0:
            fill(own)
        of_ranks = gathered((node, local_rank, own))
        yield next(path for n, local, path in of_ranks if (n, local) == (node, 0))
        await_ranks()


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Turn Gloo's errors (RuntimeErrors with varying texts) into PeerErrors that name `what`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"rank {dist.get_rank()} failed while waiting for {what}: {error}; another rank ended, "
            "or spent more time in the store than launch.start_timeout_s and step_timeout_s allow: "
            "look at that rank's error"
        ) from error
