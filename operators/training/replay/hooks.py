"""Routing replay: one small object per MoE router, bound for the duration of one pass.

If the attribute `router_replay` of a Megatron-core TopKRouter holds an object, this object computes
the router's top-k (topk_routing_with_score_function in moe_utils.py). We use this hook instead of
Megatron's own RouterReplay, because the class-level registry of RouterReplay is never emptied, and
its queues survive a forward-only pass into the next pass.

A pass has four parts: bind the objects to the routers, run the forwards (and recomputations) of all
micro-batches, unbind the objects on any exit, and check that each micro-batch was used exactly
once.

Megatron runs the forwards of a model chunk in micro-batch order. It also runs the recomputations in
this order, but interleaves them with the forwards. A checkpointed forward runs without gradients
and its recomputation with gradients, so torch.is_grad_enabled() selects one of two cursors.

Dimensions: R rows that this rank's router sees in a micro-batch, K experts per token, E experts.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from operators.training.errors import ReplayError
from operators.training.replay.replayed import ReplayedRows

SAME, DIFFERENT, FOREIGN = 0, 1, 2
"""How a recorded set compares with the router's own choice. A FOREIGN set has less than half of its
experts in common with it. A set of one expert is never FOREIGN, because rounding can change it."""

ScoresTopK = tuple[torch.Tensor, torch.Tensor]
TopK = Callable[[torch.Tensor, int, int | None, int | None], ScoresTopK]
"""(scores [R, E], K, number of groups, groups to select) -> (chosen scores [R, K], ids [R, K])."""


class Router(Protocol):
    """The part of Megatron-core's TopKRouter that is used here."""

    router_replay: object


class _Cursors:
    """A router's current micro-batch; calls with and without gradients have separate cursors."""

    def __init__(self, layer: int, micro_batches: int) -> None:
        self.layer = layer
        self.micro_batches = micro_batches
        self.without_grad = 0
        self.with_grad = 0

    def next(self) -> tuple[int, bool]:
        """Return this call's micro-batch, and whether this is the first call for it.

        A recomputation is the second call.
        """
        with_grad = torch.is_grad_enabled()
        index = self.with_grad if with_grad else self.without_grad
        if index >= self.micro_batches:
            raise ReplayError(
                f"layer {self.layer}: the router was called for more micro-batches than the "
                f"{self.micro_batches} of this pass (gradients {'on' if with_grad else 'off'})"
            )
        if with_grad:
            self.with_grad += 1
        else:
            self.without_grad += 1
        return index, not with_grad or self.without_grad == 0

    def finish(self, forward_only: bool) -> None:
        """Check that each micro-batch was used once, or twice with recomputation."""
        used = (self.without_grad, self.with_grad)
        all_ = self.micro_batches
        if used not in ([(all_, 0)] if forward_only else [(0, all_), (all_, all_)]):
            raise ReplayError(
                f"layer {self.layer}: the router ran {used[0]} times without and {used[1]} times "
                f"with gradients in a {'forward-only' if forward_only else 'training'} pass of "
                f"{all_} micro-batches; expected one run each, or one without and one with "
                "gradients if recomputed"
            )


class Recorder:
    """Records the choices of one router."""

    def __init__(self, layer: int, micro_batches: int, dtype: torch.dtype) -> None:
        self._cursors = _Cursors(layer, micro_batches)
        self._dtype = dtype
        self.sets_RK: list[torch.Tensor] = []
        """Expert ids of each micro-batch, ascending within each row."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> ScoresTopK:
        """Record and return the router's own top-k (Megatron's hook).

        Args:
            scores: The router's scores [R, E].
            topk: K.
            num_groups: Number of groups of experts; None if experts are not grouped.
            group_topk: Number of groups to select; None if experts are not grouped.
            default_compute_topk: Megatron's own top-k.

        Returns:
            Scores and ids of the chosen experts, [R, K] each.
        """
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

    Only the choice is replayed. The router's live scores give the weights of the chosen experts, so
    gradients reach the router. Rows without a valid recording keep the router's own choice.
    """

    def __init__(
        self, layer: int, place: int, experts: int, micro_batches: Sequence[ReplayedRows]
    ) -> None:
        """Create the replayer for a pass.

        Args:
            layer: The layer's index in the model.
            place: The layer's place among the recorded layers of this rank.
            experts: Number of experts in the layer.
            micro_batches: The recorded sets. An item is read when the router reaches its
                micro-batch.
        """
        self._cursors = _Cursors(layer, len(micro_batches))
        self._place = place
        self._experts = experts
        self._micro_batches = micro_batches
        self.rows = np.zeros(3, np.int64)
        """Number of rows seen in the pass so far, by kind: REPLAYED, NATIVE, PADDING."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> ScoresTopK:
        """Return the recorded experts in the order of Megatron's own top-k (Megatron's hook).

        Megatron normalises the K weights in the order of the given ids. The ids are sorted by live
        score, descending, so the result is bit-identical to native routing wherever the choice is
        the same. If they were sorted by id, 20-50% of rows would differ in the last bit.

        Args:
            scores: The router's scores [R, E].
            topk: K.
            num_groups: Number of groups of experts; None if experts are not grouped.
            group_topk: Number of groups to select; None if experts are not grouped.
            default_compute_topk: Megatron's own top-k.

        Returns:
            Scores and ids of the chosen experts, [R, K] each.
        """
        index, first_time = self._cursors.next()
        rows = self._micro_batches[index]
        recorded_RK = rows.sets_LRK[self._place]
        if recorded_RK.shape != (scores.shape[0], topk) or scores.shape[1] != self._experts:
            raise ReplayError(
                f"layer {self._cursors.layer}, micro-batch {index}: the router scores "
                f"{scores.shape[0]} tokens x {scores.shape[1]} experts and selects {topk}; its "
                f"routes have shape {tuple(recorded_RK.shape)}, for {self._experts} experts"
            )
        sets_RK = recorded_RK.to(torch.int64)
        with torch.no_grad():
            native_RK = default_compute_topk(scores, topk, num_groups, group_topk)[1]
            order_RK = scores.gather(1, sets_RK).sort(dim=1, descending=True, stable=True).indices
            ids_RK = torch.where(rows.replayed_R1, sets_RK.gather(1, order_RK), native_RK)
            if first_time:
                self.rows += rows.counts
                misfits_R = _misfits(native_RK, sets_RK) * rows.replayed_R1[:, 0]
                rows.misfits_LR[self._place] = misfits_R
        return scores.gather(1, ids_RK), ids_RK

    def finish(self, forward_only: bool) -> None:
        """Check the pass; see _Cursors.finish."""
        self._cursors.finish(forward_only)


def _misfits(native_RK: torch.Tensor, recorded_RK: torch.Tensor) -> torch.Tensor:
    """Compare the experts that the router would choose with the recorded ones: uint8 [R]."""
    K = native_RK.shape[1]
    common_R = (native_RK[:, :, None] == recorded_RK[:, None, :]).sum(dim=(1, 2))
    foreign_R = (2 * common_R < K) & (K > 1)
    return (common_R < K).to(torch.uint8) + foreign_R.to(torch.uint8)


@contextlib.contextmanager
def bound(
    routers: Mapping[int, Router],
    objects: Mapping[int, Recorder | Replayer],
    forward_only: bool,
) -> Iterator[None]:
    """Bind each layer's object to its router for the duration of a `with` block; check the pass.

    Every exit unbinds all objects. After an exception in the block, the pass is not checked,
    because it has already failed.

    Args:
        routers: This rank's routers, keyed by the layer's index in the model (not by its position).
        objects: A recorder or replayer for each of these layers.
        forward_only: Whether the pass has no backward pass.

    Raises:
        ReplayError: The layers of routers and objects differ, a router is already bound, or a
            micro-batch was not used exactly once.
    """
    if routers.keys() != objects.keys():
        missing = sorted(routers.keys() - objects.keys())
        surplus = sorted(objects.keys() - routers.keys())
        raise ReplayError(
            f"this rank's MoE layers are {sorted(routers)}; layers without routes: {missing}, "
            f"routes without a layer: {surplus}. The trace belongs to another model or pipeline "
            "stage"
        )
    taken = [layer for layer, router in routers.items() if router.router_replay is not None]
    if taken:
        raise ReplayError(
            f"layers {taken}: router_replay is already set; leave moe_enable_routing_replay unset, "
            "and bind one pass at a time"
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
