"""The model's input on a rank: tokens, labels, masks and routes of a micro-batch.

One function lays out tokens and routes together, so that they cannot drift apart. The trainer feeds
tokens[:-1] to the model, and row t of a sample's routes belongs to position t. Megatron's routers
see the micro-batch as a flattened array [sequence, batch], so row s * B + b is position s of row b.
Under sequence parallelism each tensor-parallel rank sees a contiguous slice of the sequence. Each
context-parallel rank holds some positions of every row (`zigzag`). A micro-batch is first laid out
for all ranks and then cut, so that a rank has the labels of all its positions, even if the next
token is on another rank.

Samples are either packed one after another into one row, or padded, each in a separate row. The
layout gives the start of each sample; this module derives the rest.

Dimensions: B rows in a micro-batch; N positions in a row; M positions in a row that this rank holds
(N / CP); L MoE layers on this rank; K experts per token; R rows that this rank's routers see (M * B
or, under sequence parallelism, M / TP * B); U response tokens in a micro-batch; S tokens in a
sample, of which P are in the prompt and G in the response. T has two meanings. It is usually
the number of response tokens, out of U, that this rank's positions predict. In arrays for one
sample, it is the number of the sample's positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from operators.training.batches.layout import MicroRows
from operators.zigzag import ALL, Zigzag, sequence_multiple
from pipeline.model.geometry import Geometry
from pipeline.traces.format.types import Routes, Sample, TraceError

REPLAYED, NATIVE, PADDING = 0, 1, 2
"""Kinds of positions. REPLAYED positions are routed to the recorded experts. The router itself
chooses experts for NATIVE positions, which have no valid recording, and for PADDING."""


@dataclass(frozen=True)
class Slice:
    """The part of the sequence that this rank's routers see. Example: Slice(index=1, count=2)."""

    index: int = 0
    count: int = 1

    def rows(self, array_BNx: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Convert an array [B, N, ...] to the routers' view [R, ...]."""
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
    parts_R: npt.NDArray[np.int32]
    """A code for each row's sample and part: 2i for the prompt of the i-th sample in `places`,
    2i + 1 for its response, and -1 for padding."""
    positions_R: npt.NDArray[np.int64]
    """Each row's position in its sample."""
    sets_LRK: npt.NDArray[Any] | None
    """The recorded experts in each layer of this rank, ascending; None if nothing is replayed. Rows
    that are not REPLAYED hold meaningless zeros."""


@dataclass(frozen=True)
class Place:
    """The place of a sample in the uncut rows. Example: Place('000003/17/2', 0, 120, 64)."""

    id: str
    b: int
    """Index of the row."""
    n: int
    """The first position in the row."""
    positions: int
    """Number of positions: T = S - 1."""

    @property
    def cells(self) -> tuple[int, slice]:
        """Index of the sample's positions in an array [B, N, ...]."""
        return self.b, slice(self.n, self.n + self.positions)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on a rank; positions without a sample are padding."""

    places: tuple[Place, ...]
    packed: bool
    ends: npt.NDArray[np.int32]
    """0, followed by the end of each sequence in an uncut row. A padded row is one sequence. In a
    packed row the padding forms separate sequences, at most as long as the longest sample."""
    context: Zigzag
    """The part of each sequence that this rank holds."""
    tokens_BM: npt.NDArray[np.int64]
    positions_BM: npt.NDArray[np.int64]
    padding_BM: npt.NDArray[np.bool_]
    """True at positions without a sample's token."""
    rows: RouterRows
    response: "ResponseTokens"


@dataclass(frozen=True)
class ResponseTokens:
    """The response tokens on which a micro-batch's loss is computed, sample by sample.

    A context-parallel rank holds the tokens that its positions predict.
    """

    ids: tuple[str, ...]
    """The samples, in order."""
    lengths: tuple[int, ...]
    """G for each sample; the sum is U."""
    own_T: npt.NDArray[np.int64]
    """Indices of this rank's tokens among the U tokens of all context-parallel ranks, ascending."""
    places_T: npt.NDArray[np.int64]
    """The position that predicts each token, as an index into the flattened array [B, M]."""
    labels_T: npt.NDArray[np.int64]
    """The token ids."""
    loss_mask_T: npt.NDArray[np.bool_]
    """Whether each token is included in the loss."""

    @property
    def sample_T(self) -> npt.NDArray[np.int64]:
        """The sample of each token, as an index into `ids`."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)[self.own_T]

    def joined(
        self, values: Mapping[str, npt.NDArray[Any]], dtype: type = np.float32
    ) -> npt.NDArray[Any]:
        """Join the values [G] of all samples' response tokens, and return this rank's part [T]."""
        return _joined(dtype, [values[id] for id in self.ids])[self.own_T]

    def split(self, values_U: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """Split the values [U] of all context-parallel ranks into arrays [G], by sample id."""
        ends = np.cumsum(self.lengths)[:-1]
        return dict(zip(self.ids, np.split(values_U, ends), strict=True)) if self.ids else {}


@dataclass(frozen=True)
class Contents:
    """The data from which a rank lays out micro-batches, keyed by sample id."""

    samples: Mapping[str, Sample]
    untrained: frozenset[str] = frozenset()
    """Samples that are not trained on."""
    routes: Mapping[str, Routes] | None = None
    """Routes of this rank's layers; None if nothing is replayed and all positions are NATIVE."""
    geometry: Geometry | None = None
    """Geometry of the routes; None if there are no routes."""
    sequence: Slice = WHOLE
    context: Zigzag = ALL
    without_loss: frozenset[str] = frozenset({"abort"})
    """Finish reasons of samples whose tokens are excluded from the loss."""


def lay_out(micro_rows: MicroRows, ids: Mapping[int, str], contents: Contents) -> MicroBatch:
    """Lay out a micro-batch for this rank.

    Args:
        micro_rows: The samples of the micro-batch and their places.
        ids: Sample ids, keyed by row of the manifest.
        contents: Tokens and routes of the samples. Tokens of samples that are not trained on are
            excluded from the loss.

    Raises:
        TraceError: A sample's routes do not have S - 1 rows in the geometry's shape.
        KeyError: A sample is missing from the contents.
    """
    samples, (B, N) = contents.samples, micro_rows.shape
    places = tuple(
        Place(ids[row], *divmod(start, N), len(samples[ids[row]].tokens_S) - 1)
        for row, start in zip(micro_rows.rows, micro_rows.starts, strict=True)
    )
    kinds_BN = np.full((B, N), PADDING, np.uint8)
    positions_BN = np.tile(np.arange(N), (B, 1))
    parts_BN = np.full((B, N), -1, np.int32)
    tokens_BN = _padding((B, N), places, samples)
    for i, place in enumerate(places):
        P = len(samples[place.id].prompt_tokens_P)
        parts_BN[place.cells] = 2 * i + (np.arange(place.positions) >= P)
        tokens_BN[place.cells] = samples[place.id].tokens_S[:-1]
        positions_BN[place.cells] = np.arange(place.positions)
        kinds_BN[place.cells] = NATIVE
    sets_BNLK = _lay_out_routes(places, contents, kinds_BN)
    context, sequence = contents.context, contents.sequence
    multiple = sequence_multiple(context.count, sequence.count)
    ends = _ends(places, N, multiple) if micro_rows.packed else np.array([0, N], np.int32)
    held_M = context.held(ends)
    kinds_BM = context.cut(kinds_BN, held_M)
    positions_BM = context.cut(positions_BN, held_M)
    sets_RLK = None if sets_BNLK is None else sequence.rows(context.cut(sets_BNLK, held_M))
    return MicroBatch(
        places=places,
        packed=micro_rows.packed,
        ends=ends,
        context=context,
        tokens_BM=context.cut(tokens_BN, held_M),
        positions_BM=positions_BM,
        padding_BM=kinds_BM == PADDING,
        rows=RouterRows(
            kinds_R=sequence.rows(kinds_BM),
            parts_R=sequence.rows(context.cut(parts_BN, held_M)),
            positions_R=sequence.rows(positions_BM),
            sets_LRK=None
            if sets_RLK is None
            else np.ascontiguousarray(sets_RLK.transpose(1, 0, 2)),
        ),
        response=_response(places, (N, held_M), contents),
    )


def _ends(places: Sequence[Place], N: int, multiple: int) -> npt.NDArray[np.int32]:
    """Return the ends of a packed row's sequences; padding sequences follow the samples."""

    def up(positions: int) -> int:
        return -(-positions // multiple) * multiple

    ends = [0, *(place.n + up(place.positions) for place in places if place.positions)]
    longest = up(max((place.positions for place in places), default=0)) or 8 * multiple
    rest = np.arange(ends[-1], N, longest)[1:]
    return np.unique([*ends, *rest, N]).astype(np.int32)


def counting(
    sample: Sample, untrained: frozenset[str], without_loss: frozenset[str]
) -> npt.NDArray[np.bool_]:
    """Return whether each response token of a sample is included in the loss.

    Args:
        sample: The sample.
        untrained: Ids of samples that are not trained on.
        without_loss: Finish reasons of samples whose tokens are excluded from the loss.

    Returns:
        bool [G].
    """
    trained = sample.id not in untrained and sample.finish_reason not in without_loss
    return sample.loss_mask_G & trained


def _response(
    places: Sequence[Place], row: tuple[int, npt.NDArray[np.int64]], contents: Contents
) -> ResponseTokens:
    """Lay out the response tokens; `row` contains N and the positions [M] that this rank holds."""
    N, held_M = row
    samples = [contents.samples[place.id] for place in places]
    firsts = [
        place.b * N + place.n + len(sample.prompt_tokens_P) - 1
        for place, sample in zip(places, samples, strict=True)
    ]
    lengths = [len(sample.response_tokens_G) for sample in samples]
    b_U, n_U = np.divmod(
        np.concatenate(
            [
                np.empty(0, np.int64),
                *(f + np.arange(G) for f, G in zip(firsts, lengths, strict=True)),
            ]
        ),
        N,
    )
    index_N = np.full(N, -1)
    index_N[held_M] = np.arange(len(held_M))
    own_T = np.flatnonzero(index_N[n_U] >= 0)
    counts = [counting(sample, contents.untrained, contents.without_loss) for sample in samples]
    return ResponseTokens(
        ids=tuple(place.id for place in places),
        lengths=tuple(lengths),
        own_T=own_T,
        places_T=b_U[own_T] * len(held_M) + index_N[n_U[own_T]],
        labels_T=_joined(np.int64, [sample.response_tokens_G for sample in samples])[own_T],
        loss_mask_T=_joined(np.bool_, counts)[own_T],
    )


def _joined(dtype: type, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    joined: npt.NDArray[Any] = np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)
    return joined


def _padding(
    shape: tuple[int, int], places: Sequence[Place], samples: Mapping[str, Sample]
) -> npt.NDArray[np.int64]:
    """Return padding rows that repeat the samples' tokens, to give the experts a realistic load."""
    if not places:
        return np.zeros(shape, np.int64)
    texts = [samples[place.id].tokens_S for place in places]
    rows = [np.resize(texts[b % len(texts)], shape[1]) for b in range(shape[0])]
    return np.stack(rows).astype(np.int64)


def _lay_out_routes(
    places: Sequence[Place], contents: Contents, kinds_BN: npt.NDArray[np.uint8]
) -> npt.NDArray[Any] | None:
    """Lay out the recorded experts.

    The function also marks positions with a valid recording as REPLAYED in `kinds_BN`.
    """
    routes, geometry = contents.routes, contents.geometry
    if routes is None or geometry is None:
        return None
    of_layers = (len(geometry.layers), geometry.topk)
    sets_BNLK = np.zeros((*kinds_BN.shape, *of_layers), geometry.dtype)
    for place in places:
        of_sample = _checked(place.id, routes[place.id], (place.positions, *of_layers))
        kinds_BN[place.cells][of_sample.valid_T] = REPLAYED
        sets_BNLK[place.cells][of_sample.valid_T] = of_sample.sets_TLK[of_sample.valid_T]
    return sets_BNLK


def take_up(places: Sequence[Place], sets_BNLK: npt.NDArray[Any]) -> dict[str, Routes]:
    """Return the routers' choices for each sample: the reverse of `lay_out` for routes.

    Args:
        places: The samples and their places.
        sets_BNLK: Expert ids that the routers chose.

    Returns:
        Routes, keyed by sample id: S - 1 rows each, all valid.
    """
    return {
        place.id: Routes(
            sets_TLK=np.ascontiguousarray(sets_BNLK[place.cells]),
            valid_T=np.ones(place.positions, np.bool_),
        )
        for place in places
    }


def _checked(id: str, routes: Routes, shape: tuple[int, ...]) -> Routes:
    if routes.sets_TLK.shape != shape or routes.valid_T.shape != shape[:1]:
        raise TraceError(
            f"sample {id}: routes have shape {routes.sets_TLK.shape} and {len(routes.valid_T)} "
            f"validity bits; the sample's tokens and this rank's layers need {shape}, one row per "
            "position 0..S-2. Record the step again"
        )
    return routes
