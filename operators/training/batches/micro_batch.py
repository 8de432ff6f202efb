"""The model's input on a rank: tokens, labels, masks and routes of a micro-batch, laid out at once.

One function lays out tokens and routes together, so they cannot drift apart. The trainer feeds
tokens[:-1]; row t of a sample's routes belongs to position t. Megatron's routers see the
micro-batch as [sequence, batch] flattened, so row s * B + b is position s of row b; under sequence
parallelism each tensor-parallel rank sees a contiguous slice of the sequence.

Letters: B rows of a micro-batch, N padded length, L MoE layers of this rank, K experts per token,
R rows that this rank's routers see: N * B, or N / TP * B under sequence parallelism.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.traces.format.types import Routes, Sample, TraceError

REPLAYED, NATIVE, PADDING = 0, 1, 2
"""Kinds of positions: routed to the recorded experts; by the router's own choice, because the
recording is not valid there; by the router's own choice, because the position is padding."""


@dataclass(frozen=True)
class Slice:
    """The part of the sequence that this rank's routers see. Example: Slice(index=1, count=2)."""

    index: int = 0
    count: int = 1

    def rows(self, array_BNx: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Convert [B, N, ...] to the routers' view [R, ...]."""
        array_NBx = array_BNx.swapaxes(0, 1)
        part = array_NBx.shape[0] // self.count
        sliced = array_NBx[self.index * part : (self.index + 1) * part]
        return np.ascontiguousarray(sliced.reshape(-1, *array_BNx.shape[2:]))


WHOLE = Slice()


@dataclass(frozen=True)
class RouterRows:
    """The rows of a micro-batch that the routers of this rank see."""

    kinds_R: npt.NDArray[np.uint8]
    """REPLAYED, NATIVE or PADDING."""
    sets_LRK: npt.NDArray[Any] | None
    """The recorded experts by layer of this rank, ascending; None when nothing is replayed. Rows
    that are not REPLAYED hold 0, without meaning."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, padded on the right; fillers are rows of padding only."""

    ids: tuple[str | None, ...]
    tokens_BN: npt.NDArray[np.int64]
    labels_BN: npt.NDArray[np.int64]
    """The token that follows each position."""
    positions_BN: npt.NDArray[np.int64]
    padding_BN: npt.NDArray[np.bool_]
    """True at positions without a sample's token."""
    loss_mask_BN: npt.NDArray[np.bool_]
    """True where the label is a response token that counts."""
    engine_logprobs_BN: npt.NDArray[np.float32]
    """The engine's log-prob of the label; 0 outside the response."""
    advantages_BN: npt.NDArray[np.float32]
    rows: RouterRows


@dataclass(frozen=True)
class Contents:
    """The data from which a rank lays out micro-batches, by sample id."""

    samples: Mapping[str, Sample]
    advantages: Mapping[str, float | None]
    """None: the sample is not trained on."""
    routes: Mapping[str, Routes] | None = None
    """Routes of this rank's layers; None: nothing is replayed, every real position is NATIVE."""
    geometry: Geometry | None = None
    """Geometry of the routes; None without routes."""
    sequence: Slice = WHOLE


def lay_out(ids: Sequence[str | None], length: int, contents: Contents) -> MicroBatch:
    """Lay out the rows of a micro-batch, padded to `length` positions.

    A sample that is not trained on has no loss. Raises TraceError if a sample's routes do not have
    S - 1 rows of the geometry, KeyError if a sample is missing.
    """
    shape = (len(ids), length)
    labels_BN = np.zeros(shape, np.int64)
    loss_mask_BN = np.zeros(shape, np.bool_)
    engine_BN = np.zeros(shape, np.float32)
    advantages_BN = np.zeros(shape, np.float32)
    kinds_BN = np.full(shape, PADDING, np.uint8)
    for b, id in enumerate(ids):
        if id is None:
            continue
        sample = contents.samples[id]
        T, response = len(sample.tokens_S) - 1, _response(sample)
        labels_BN[b, :T] = sample.tokens_S[1:]
        engine_BN[b, response] = sample.logprobs_G
        advantage = contents.advantages[id]
        if advantage is not None:
            loss_mask_BN[b, response] = sample.loss_mask_G
            advantages_BN[b, response] = advantage
        kinds_BN[b, :T] = NATIVE
    sets_BNLK = _lay_out_routes(ids, contents, kinds_BN)
    return MicroBatch(
        ids=tuple(ids),
        tokens_BN=_lay_out_tokens(ids, length, contents.samples),
        labels_BN=labels_BN,
        positions_BN=np.tile(np.arange(length), (len(ids), 1)),
        padding_BN=kinds_BN == PADDING,
        loss_mask_BN=loss_mask_BN,
        engine_logprobs_BN=engine_BN,
        advantages_BN=advantages_BN,
        rows=RouterRows(
            kinds_R=contents.sequence.rows(kinds_BN),
            sets_LRK=None
            if sets_BNLK is None
            else np.ascontiguousarray(contents.sequence.rows(sets_BNLK).transpose(1, 0, 2)),
        ),
    )


def _lay_out_tokens(
    ids: Sequence[str | None], length: int, samples: Mapping[str, Sample]
) -> npt.NDArray[np.int64]:
    """Lay out tokens; padding repeats the text, to spread over experts as the text does."""
    tokens_BN = np.zeros((len(ids), length), np.int64)
    held = [samples[id] for id in ids if id is not None]
    for b, id in enumerate(ids):
        if id is not None:
            tokens_BN[b] = np.resize(samples[id].tokens_S[:-1], length)
        elif held:
            tokens_BN[b] = np.resize(held[b % len(held)].tokens_S, length)
    return tokens_BN


def _lay_out_routes(
    ids: Sequence[str | None], contents: Contents, kinds_BN: npt.NDArray[np.uint8]
) -> npt.NDArray[Any] | None:
    """Lay out the recorded experts; set `kinds_BN` to REPLAYED where a recording is valid."""
    routes, geometry = contents.routes, contents.geometry
    if routes is None or geometry is None:
        return None
    of_layers = (len(geometry.layers), geometry.topk)
    sets_BNLK = np.zeros((*kinds_BN.shape, *of_layers), geometry.dtype)
    for b, id in enumerate(ids):
        if id is not None:
            T = len(contents.samples[id].tokens_S) - 1
            of_sample = _checked(id, routes[id], (T, *of_layers))
            kinds_BN[b, :T][of_sample.valid_T] = REPLAYED
            sets_BNLK[b, :T][of_sample.valid_T] = of_sample.sets_TLK[of_sample.valid_T]
    return sets_BNLK


def place(
    ids: Sequence[str | None],
    length: int,
    samples: Mapping[str, Sample],
    values: Mapping[str, npt.NDArray[np.float32]],
) -> npt.NDArray[np.float32]:
    """Place values of response tokens ([G] by sample) at the positions predicting them: [B, N]."""
    placed_BN = np.zeros((len(ids), length), np.float32)
    for b, id in enumerate(ids):
        if id is not None:
            placed_BN[b, _response(samples[id])] = values[id]
    return placed_BN


def pick(
    ids: Sequence[str | None], samples: Mapping[str, Sample], values_BN: npt.NDArray[np.float32]
) -> dict[str, npt.NDArray[np.float32]]:
    """Reverse `place`: values of response tokens, [G] by sample."""
    return {id: values_BN[b, _response(samples[id])] for b, id in enumerate(ids) if id is not None}


def take_up(
    ids: Sequence[str | None], samples: Mapping[str, Sample], sets_NBLK: npt.NDArray[Any]
) -> dict[str, Routes]:
    """Reverse `lay_out` for routes: the choices of whole-sequence routers, by sample.

    `sets_NBLK` holds the chosen sets in the routers' view; each sample gets its own S - 1 rows, all
    valid.
    """
    taken = {}
    for b, id in enumerate(ids):
        if id is not None:
            T = len(samples[id].tokens_S) - 1
            sets_TLK = np.ascontiguousarray(sets_NBLK[:T, b])
            taken[id] = Routes(sets_TLK=sets_TLK, valid_T=np.ones(T, np.bool_))
    return taken


def _response(sample: Sample) -> slice:
    """The positions whose labels are response tokens."""
    first = len(sample.prompt_tokens_P) - 1
    return slice(first, first + len(sample.response_tokens_G))


def _checked(id: str, routes: Routes, shape: tuple[int, ...]) -> Routes:
    if routes.sets_TLK.shape != shape or routes.valid_T.shape != shape[:1]:
        raise TraceError(
            f"sample {id}: routes of shape {routes.sets_TLK.shape} with {len(routes.valid_T)} "
            f"validity bits, its tokens and this rank's layers need {shape} (one row per position "
            "0..S-2); record the step again"
        )
    return routes
