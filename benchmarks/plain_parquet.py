"""Measure the forms in which a routes file could store a layer's ids in plain Parquet.

    python -m benchmarks.plain_parquet

By this table, sorted ids in Parquet's PLAIN encoding were chosen. The other form replaces each id
but the first by its gap to the previous one. For a form "prompts once", only the first sample of a
group has the rows of their prompt, as far as the other samples have the same rows. The table gives
bytes per token-layer, and in brackets the ratio to the entropy of uniformly random sets. Each file
contains only ids, one column per layer. The program compares the decoded ids with the original
ones.
"""

import argparse
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import machine
from benchmarks.page import Table, arguments_of, block, publish
from benchmarks.routes import fresh
from benchmarks.routes.recordings import Recording
from pipeline.traces.write.rows import ROUTES_ROWS

LEVELS = (1, 2, 3)
Ids = npt.NDArray[Any]
"""Ids [L, N, K], ascending in each row."""


@dataclass(frozen=True)
class Form:
    """A form of storing ids."""

    gaps: bool
    once: bool
    """Whether a group's samples share the rows of their prompt."""
    level: int
    """The zstd level."""

    @property
    def name(self) -> str:
        """The form's name in the table."""
        return f"{'gaps' if self.gaps else 'ids'}, zstd {self.level}{', prompts once' * self.once}"


FORMS = tuple(starmap(Form, product((False, True), (False, True), LEVELS)))


def rows_of(recording: Recording, once: bool) -> Ids:
    """Return the sorted ids of all rows, or only those that a file with `prompts once` contains."""
    routes = [np.sort(routes_TLK, axis=-1) for routes_TLK in recording.routes]
    of_group: dict[int, Ids] = {}
    kept = []
    for routes_TLK, P, group in zip(routes, recording.prompts, recording.groups, strict=True):
        shared = of_group.setdefault(group, routes_TLK[:0])[:P] if once else routes_TLK[:0]
        same_T = (shared == routes_TLK[: len(shared)]).all(axis=(1, 2))
        kept.append(routes_TLK[len(same_T) if same_T.all() else same_T.argmin() :])
        if not len(shared):
            of_group[group] = routes_TLK[:P]
    return np.ascontiguousarray(np.concatenate(kept).swapaxes(0, 1))


def gaps_of(ids_LNK: Ids) -> Ids:
    """Return the first id of each row, followed by the number of ids left out before each other."""
    gaps_LNK = ids_LNK.copy()
    gaps_LNK[..., 1:] -= ids_LNK[..., :-1] + 1
    return gaps_LNK


def encode(ids_LNK: Ids, level: int) -> bytes:
    """Return a Parquet file with a column of fixed-size binary values for each layer."""
    width = pa.binary(ids_LNK.shape[2] * ids_LNK.itemsize)
    columns = {
        f"layer_{i}": pa.FixedSizeBinaryArray.from_buffers(
            width, len(ids_NK), [None, pa.py_buffer(ids_NK)]
        )
        for i, ids_NK in enumerate(ids_LNK)
    }
    sink = io.BytesIO()
    pq.write_table(
        pa.table(columns),
        sink,
        compression="zstd",
        compression_level=level,
        use_dictionary=False,
        row_group_size=ROUTES_ROWS,
        data_page_size=256 << 10,
        write_statistics=False,
        store_schema=False,
    )
    return sink.getvalue()


def decode(data: bytes, like: Ids) -> Ids:
    """Return the ids in a file. `like` has their type and shape."""
    table = pq.read_table(pa.BufferReader(data), use_threads=False)
    layers = [b"".join(chunk.buffers()[1] for chunk in column.chunks) for column in table.columns]
    return np.frombuffer(b"".join(layers), like.dtype).reshape(like.shape)


def size_of(form: Form, recording: Recording) -> float:
    """Return the bytes per token-layer of a form. Raises ValueError if decoded ids differ."""
    ids_LNK = rows_of(recording, form.once)
    stored_LNK = gaps_of(ids_LNK) if form.gaps else ids_LNK
    data = encode(stored_LNK, form.level)
    if not np.array_equal(decode(data, stored_LNK), stored_LNK):
        raise ValueError(f"{form.name}: the decoded ids of {recording.name} differ")
    return len(data) / (recording.tokens * recording.layers)


def table_of(recordings: Sequence[Recording]) -> Table:
    """Return the table of all forms and recordings."""
    rows = [("entropy of uniform sets", *(f"{one.bound:.2f}" for one in recordings))]
    for form in FORMS:
        sizes = [size_of(form, one) for one in recordings]
        cells = zip(sizes, recordings, strict=True)
        rows.append((form.name, *(f"{size:.2f} ({size / of.bound:.2f}x)" for size, of in cells)))
    return Table(("B per token-layer", *(one.name for one in recordings)), tuple(rows))


def main() -> None:
    arguments = arguments_of(argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]))
    table = table_of(fresh.recordings(arguments.quick))
    publish({"plain-parquet": block(table, machine("numpy", "pyarrow"))}, arguments)


if __name__ == "__main__":
    main()
