"""Routing replay: one small object per MoE router, bound for the duration of one pass.

Megatron-core's TopKRouter gets its top-k from the object at its `router_replay`, if there is one
(topk_routing_with_score_function in moe_utils.py). We use that hook and not Megatron's own
RouterReplay, whose class-level registry is never emptied, and whose queues survive from a
forward-only pass into the next one.

A pass: bind objects to routers -> forwards (and recomputations) of all micro-batches -> check that
every micro-batch was used exactly once -> unbind, on any exit.

Megatron runs the forwards of one model chunk in micro-batch order, and its recomputations too, but
interleaves the two. A checkpointed forward runs without gradients and its recomputation with them,
so each has its own cursor, chosen by torch.is_grad_enabled().

Letters: R rows that this rank's router sees in a micro-batch, K experts per token, E experts.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from operators.training.batches.micro_batch import REPLAYED
from operators.training.errors import ReplayError

ScoresTopK = tuple[torch.Tensor, torch.Tensor]
TopK = Callable[[torch.Tensor, int, int | None, int | None], ScoresTopK]
"""(scores [R, E], K, number of groups, groups to choose from) -> (scores, ids) of the chosen."""


class Router(Protocol):
    """The part of Megatron-core's TopKRouter that is used here."""

    router_replay: object


class _Cursors:
    """A router's current micro-batch, with separate cursors without and with gradients."""

    def __init__(self, layer: int, micro_batches: int) -> None:
        self.layer = layer
        self.micro_batches = micro_batches
        self.without_grad = 0
        self.with_grad = 0

    def next(self) -> tuple[int, bool]:
        """The micro-batch of this call, and whether it is the first call (no recomputation)."""
        with_grad = torch.is_grad_enabled()
        index = self.with_grad if with_grad else self.without_grad
        if index >= self.micro_batches:
            raise ReplayError(
                f"layer {self.layer}: the router was called for a micro-batch beyond the "
                f"{self.micro_batches} of this pass (gradients {'on' if with_grad else 'off'})"
            )
        if with_grad:
            self.with_grad += 1
        else:
            self.without_grad += 1
        return index, not with_grad or self.without_grad == 0

    def finish(self, forward_only: bool) -> None:
        """Check that every micro-batch was used once, and once more with recomputation."""
        used = (self.without_grad, self.with_grad)
        all_ = self.micro_batches
        if used not in ([(all_, 0)] if forward_only else [(0, all_), (all_, all_)]):
            raise ReplayError(
                f"layer {self.layer}: the router ran {used[0]} times without and {used[1]} times "
                f"with gradients in a {'forward-only' if forward_only else 'training'} pass of "
                f"{all_} micro-batches; each must run once (and once more when recomputed)"
            )


class Recorder:
    """Records the choices of one router."""

    def __init__(self, layer: int, micro_batches: int, dtype: torch.dtype) -> None:
        self._cursors = _Cursors(layer, micro_batches)
        self._dtype = dtype
        self.sets_RK: list[torch.Tensor] = []
        """Ascending expert ids, per micro-batch."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> ScoresTopK:
        """Megatron's hook: the router's own top-k."""
        values_RK, ids_RK = default_compute_topk(scores, topk, num_groups, group_topk)
        _, first_time = self._cursors.next()
        if first_time:
            self.sets_RK.append(ids_RK.detach().sort(dim=1).values.to(self._dtype))
        return values_RK, ids_RK

    def finish(self, forward_only: bool) -> None:
        """Check the pass; see _Cursors.finish."""
        self._cursors.finish(forward_only)


class Replayer:
    """Imposes the recorded experts on one router.

    Only the choice is replayed: the router's live scores of those experts are the weights, so
    gradients reach the router. Each row without a valid recording gets the router's own choice.
    """

    def __init__(
        self,
        layer: int,
        experts: int,
        kinds_R: Sequence[npt.NDArray[np.uint8]],
        sets_RK: Sequence[npt.NDArray[Any]],
    ) -> None:
        """Both sequences are by micro-batch; an item is read when the router reaches it."""
        self._cursors = _Cursors(layer, len(kinds_R))
        self._experts = experts
        self._kinds_R = kinds_R
        self._sets_RK = sets_RK
        self.rows = np.zeros(3, np.int64)
        """Rows seen in the pass so far, by kind: REPLAYED, NATIVE, PADDING."""
        self.agreeing_R: list[torch.Tensor] = []
        """By micro-batch: the REPLAYED rows where the router's own choice is the recorded one."""

    @property
    def agreeing(self) -> int:
        """The number of rows in `agreeing_R`."""
        return sum(int(rows_R.sum()) for rows_R in self.agreeing_R)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> ScoresTopK:
        """Megatron's hook: the recorded experts in the order of Megatron's own top-k.

        Megatron normalises the K weights in the order of the given ids. With ids sorted by live
        score, descending, the result is bit-identical to native routing whenever the choice is the
        same; sorted by id, 20-50% of rows would differ in the last bit.
        """
        micro_batch, first_time = self._cursors.next()
        kinds, recorded_RK = self._kinds_R[micro_batch], self._sets_RK[micro_batch]
        self._check(micro_batch, scores, topk)
        if first_time:
            check_sets(self._cursors.layer, recorded_RK[kinds == REPLAYED], self._experts)
        replayed_R1 = _uploaded(kinds == REPLAYED, scores.device)[:, None]
        sets_RK = _uploaded(recorded_RK, scores.device).to(torch.int64)
        with torch.no_grad():
            native_RK = default_compute_topk(scores, topk, num_groups, group_topk)[1]
            order_RK = scores.gather(1, sets_RK).sort(dim=1, descending=True, stable=True).indices
            ids_RK = torch.where(replayed_R1, sets_RK.gather(1, order_RK), native_RK)
            if first_time:
                self.rows += np.bincount(kinds, minlength=3)
                same_R = (native_RK.sort(dim=1).values == sets_RK).all(dim=1)
                self.agreeing_R.append(same_R & replayed_R1[:, 0])
        return scores.gather(1, ids_RK), ids_RK

    def _check(self, micro_batch: int, scores: torch.Tensor, topk: int) -> None:
        sets_RK = self._sets_RK[micro_batch]
        expected = (scores.shape[0], topk)
        if sets_RK.shape != expected or scores.shape[1] != self._experts:
            raise ReplayError(
                f"layer {self._cursors.layer}, micro-batch {micro_batch}: the router scores "
                f"{scores.shape[0]} tokens x {scores.shape[1]} experts and takes {topk}; the "
                f"routes laid out for it are {sets_RK.shape} of {self._experts} experts"
            )

    def finish(self, forward_only: bool) -> None:
        """Check the pass; see _Cursors.finish."""
        self._cursors.finish(forward_only)


def _uploaded(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device without waiting for the GPU's pending work.

    The array may be freed at once: unless its memory is pinned, the copy has already read it.
    """
    return torch.from_numpy(array).to(device, non_blocking=True)


def check_sets(layer: int, sets_RK: npt.NDArray[Any], experts: int) -> None:
    """Refuse sets that a router cannot have chosen. Raises ReplayError."""
    if sets_RK.size == 0:
        return
    if (largest := int(sets_RK.max())) >= experts:
        raise ReplayError(
            f"layer {layer}: a recorded expert id is {largest}, the model has {experts} experts; "
            "the routes belong to another model"
        )
    if not (sets_RK[:, 1:] > sets_RK[:, :-1]).all():
        raise ReplayError(
            f"layer {layer}: a recorded row names an expert twice or is not ascending; "
            "check the trace with `retrace traces verify`"
        )


@contextlib.contextmanager
def bound(
    routers: Mapping[int, Router],
    objects: Mapping[int, Recorder | Replayer],
    forward_only: bool,
) -> Iterator[None]:
    """Bind each layer's object to its router for the duration of the block, and check the pass.

    Layers are looked up by model index, never by position. Every exit unbinds all objects; after an
    exception they are not checked, because their pass failed. Raises ReplayError if the layers
    differ, or a router is already bound.
    """
    if routers.keys() != objects.keys():
        missing = sorted(routers.keys() - objects.keys())
        surplus = sorted(objects.keys() - routers.keys())
        raise ReplayError(
            f"this rank's MoE layers are {sorted(routers)}; without routes: {missing}, routes "
            f"without a router: {surplus}. The trace belongs to another model or stage"
        )
    taken = [layer for layer, router in routers.items() if router.router_replay is not None]
    if taken:
        raise ReplayError(
            f"layers {taken}: something is at router_replay already; leave "
            "moe_enable_routing_replay unset, and bind one pass at a time"
        )
    try:
        for layer, router in routers.items():
            router.router_replay = objects[layer]
        yield
    finally:
        for router in routers.values():
            router.router_replay = None
    for recorder_or_replayer in objects.values():
        recorder_or_replayer.finish(forward_only)
