"""The rows of samples files and routes files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.model.geometry import Geometry
from pipeline.store import Store
from pipeline.traces.format.domain import json_text
from pipeline.traces.format.header import TraceFile
from pipeline.traces.format.routes import token_digest
from pipeline.traces.format.schema import SAMPLES, file_metadata, routes_schema
from pipeline.traces.format.types import Provenance, Routes, Sample
from pipeline.traces.write.files import Compression, FileWriter

ROUTES_ROWS = 32_768
"""Rows per row group of a routes file. A layer's page with top-8 then has 256 KiB."""
SAMPLES_TOKENS = 262_144
"""Tokens per row group of a samples file (2 MB). Sealing reads some columns of every row group, so
a few large row groups are better than many small ones."""
_SAMPLES_TEXT = 8 << 20
"""Characters of text per row group, limited because readers decode entire row groups."""
_TEXTS = [field.name for field in SAMPLES if field.type == pa.string()]
_REPEATED = [name for name in SAMPLES.names if name not in ("id", "token_digest", "logprobs")]


@dataclass(frozen=True)
class Segment:
    """Consecutive positions of a sample in a routes file."""

    start: int
    """The first position."""
    row: int
    """The file's row with this position."""
    tokens: int
    """The number of positions."""


class RoutesWriter:
    """Writes routes in stored form to a routes file, in full row groups."""

    def __init__(
        self,
        store: Store,
        key: str,
        origin: Mapping[str, Any],
        geometry: Geometry,
        provenance: Provenance | None,
        compression: Compression = "zstd",
    ) -> None:
        self._geometry = geometry
        self._schema = routes_schema(geometry)
        self.file = FileWriter(
            store,
            key,
            "routes",
            self._schema,
            file_metadata("routes", origin, geometry, provenance),
            dictionary=["sample"],
            statistics=["sample"],
            layers=geometry.layers,
            compression=compression,
        )
        self._pending: list[tuple[str, int, Routes]] = []
        self._rows = 0
        self._rows_of_group = 0

    @property
    def held_bytes(self) -> int:
        """Size in bytes of the routes in the row group that is not yet written."""
        return sum(routes.sets_TLK.nbytes for _, _, routes in self._pending)

    def add(self, id: str, routes: Routes, start: int, end: int) -> list[Segment]:
        """Append positions of a sample.

        Args:
            id: The sample's id.
            routes: All its routes, in stored form.
            start: The first position to append.
            end: The position after the last one.

        Returns:
            Where the positions are in the file; an empty list if there are none.
        """
        if start == end:
            return []
        self._rows_of_group += end - start
        found = Segment(start, self.file.rows + self._rows, end - start)
        while start < end:
            room = ROUTES_ROWS - self._rows
            # Leaving a row group partly empty is better than splitting a sample between two.
            if room < end - start and self._half_full:
                self._cut()
                continue
            stop = min(end, start + room)
            piece = Routes(routes.sets_TLK[start:stop], routes.valid_T[start:stop])
            self._pending.append((id, start, piece))
            self._rows += stop - start
            if self._rows == ROUTES_ROWS:
                self._cut()
            start = stop
        return [found]

    def end_group(self) -> None:
        """End a group: the next rows belong to a different group.

        A row group that is at least half full is written now, unless another group as large would
        fit, so that a rank that reads some groups of a step fetches few tokens of other groups.
        """
        if self._half_full and self._rows + self._rows_of_group > ROUTES_ROWS:
            self._cut()
        self._rows_of_group = 0

    def finish(self) -> TraceFile:
        """Write the last row group, and create the file."""
        if self._rows:
            self._cut()
        return self.file.finish()

    @property
    def _half_full(self) -> bool:
        return self._rows >= ROUTES_ROWS // 2

    def _cut(self) -> None:
        geometry, pending = self._geometry, self._pending
        sets_LNK = np.empty((len(geometry.layers), self._rows, geometry.topk), geometry.dtype)
        # Without `out`, the result would have the memory order of the parts.
        parts = [routes.sets_TLK.swapaxes(0, 1) for _, _, routes in pending]
        np.concatenate(parts, axis=1, out=sets_LNK)
        lengths = [len(routes.valid_T) for _, _, routes in pending]
        numbers = np.repeat(np.arange(len(pending), dtype=np.int32), lengths)
        positions = [
            np.arange(start, start + n) for (_, start, _), n in zip(pending, lengths, strict=True)
        ]
        columns = [
            pa.DictionaryArray.from_arrays(numbers, [id for id, _, _ in pending]).cast(pa.string()),
            pa.array(np.concatenate(positions).astype(np.int32)),
            pa.array(np.concatenate([routes.valid_T for _, _, routes in pending])),
            *(_binary(sets_NK) for sets_NK in sets_LNK),
        ]
        self.file.write_table(pa.table(columns, schema=self._schema))
        self._pending, self._rows = [], 0


class SampleWriter:
    """Writes samples to a samples file, one row group at a time."""

    def __init__(self, store: Store, key: str, origin: Mapping[str, Any]) -> None:
        metadata = file_metadata("samples", origin)
        self.file = FileWriter(store, key, "samples", SAMPLES, metadata, dictionary=_REPEATED)
        self._pending: list[dict[str, Any]] = []
        self._tokens = self._text = 0

    def add(self, sample: Sample, segments: Sequence[Segment] | None) -> None:
        """Append a checked sample; `segments` locate its routes, None if it has none."""
        row = _row(sample, segments)
        self._pending.append(row)
        self._tokens += row["rows_total"] + 1 + len(row["version_spans"])
        self._text += sum(len(row[name] or "") for name in _TEXTS)
        if self._tokens >= SAMPLES_TOKENS or self._text >= _SAMPLES_TEXT:
            self._cut()

    def finish(self) -> TraceFile:
        """Write the last row group, and create the file."""
        if self._pending:
            self._cut()
        return self.file.finish()

    def _cut(self) -> None:
        columns = {name: [row[name] for row in self._pending] for name in SAMPLES.names}
        self.file.write_table(pa.table(columns, schema=SAMPLES))
        self._pending, self._tokens, self._text = [], 0, 0


def _binary(sets_NK: npt.NDArray[Any]) -> pa.Array:
    """Return the rows of a contiguous array as fixed-size binary values, without a copy."""
    stored = sets_NK.astype(sets_NK.dtype.newbyteorder("<"), copy=False)
    width = pa.binary(sets_NK.shape[1] * sets_NK.itemsize)
    return pa.FixedSizeBinaryArray.from_buffers(width, len(stored), [None, pa.py_buffer(stored)])


def _row(sample: Sample, segments: Sequence[Segment] | None) -> dict[str, Any]:
    routes, tokens_S = sample.routes, sample.tokens_S
    return {
        "id": sample.id,
        "group": sample.group,
        "prompt_id": sample.prompt_id,
        "policy_version": min(span.version for span in sample.version_spans),
        "prompt_length": len(sample.prompt_tokens_P),
        "response_length": len(sample.response_tokens_G),
        "reward": None if sample.reward is None else float(sample.reward),
        "reward_error": sample.reward_error,
        "token_digest": token_digest(tokens_S),
        "rows_valid": int(np.count_nonzero(routes.valid_T)) if routes else None,
        "rows_total": len(tokens_S) - 1,
        "branch_of": sample.branch_of,
        "segments": None if segments is None else [vars(segment) for segment in segments],
        "prompt_tokens": sample.prompt_tokens_P,
        "response_tokens": sample.response_tokens_G,
        "loss_mask": sample.loss_mask_G,
        "logprobs": sample.logprobs_G,
        "finish_reason": sample.finish_reason,
        "version_spans": [vars(span) for span in sample.version_spans],
        "seed": sample.seed,
        "extras": json_text(sample.extras, f"sample {sample.id}: extras"),
    }
