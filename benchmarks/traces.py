"""Measure the cost of shipping routes: bytes, and processor seconds to encode and decode.

    python -m benchmarks.traces [--tokens N] [--run URI]

Bytes per token-layer are measured on the original routes, which were recorded or randomly
generated. Speeds are measured on the same routes, widened to 48 layers and at least `--tokens`
tokens (see recordings.widened). Ratios in brackets are relative to vLLM's HTTP format on the same
routes. MB means megabytes of raw routes: one byte per expert id, or two if there are more than 256
experts. Encoding and decoding run on one core. Their times are processor times, which other
programs hardly affect; the median of several rounds is used. The program compares the decoded sets
with the original ones, and fails if they differ.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy.typing as npt
import torch

from benchmarks.measure import machine, one_core, typical
from benchmarks.page import Table, arguments_of, block, publish, verdict
from benchmarks.routes import fresh
from benchmarks.routes.recordings import Recording, same_sets, set_digests, widened
from benchmarks.ways import ours
from benchmarks.ways.peers import PEERS, Peer
from pipeline.store import Store, open_store

FOLDER = Path("outputs/benchmarks")
LAYERS, TOKENS, REPETITIONS = 48, 32_768, 5
MOST_RATIO = 1.5
"""Maximum size of uniform routes, which are the worst case, relative to their entropy."""
FILE, STORE = "Retrace: routes file", "Retrace: write_shard, read_routes"
HEADERS = ("", "B per token-layer", "encode MB/s", "decode MB/s")
LIMIT_HEADERS = ("on one core", "limit", "found", "")


@dataclass(frozen=True)
class Row:
    """Bytes and speeds of one format."""

    name: str
    bytes_per: float
    """Bytes per token-layer."""
    encode_mb_s: float
    decode_mb_s: float


@dataclass(frozen=True)
class Comparison:
    """Results of all formats for one recording."""

    recording: Recording
    rows: tuple[Row, ...]
    """Rows of the table; ratios are relative to the first one."""

    def row(self, name: str) -> Row:
        """Return the row with this name."""
        return next(row for row in self.rows if row.name == name)


def compare(
    recording: Recording, tokens: int, layers: int, repetitions: int, folder: Path
) -> Comparison:
    """Measure all formats on a recording.

    Args:
        recording: Routes whose bytes are counted.
        tokens: Minimum number of tokens of the widened routes, whose speeds are measured.
        layers: Number of layers in the widened routes.
        repetitions: Repetitions of each measurement; the median counts.
        folder: Folder for temporary stores.

    Returns:
        A row for each format.

    Raises:
        ValueError: Decoded sets differ from the original ones.
    """
    wide = widened(recording, layers, tokens)
    expected = set_digests(wide.routes)
    rows = [_of_peer(peer, recording, wide, repetitions, expected) for peer in PEERS]
    rows.append(_file(recording, wide, repetitions, expected, folder))
    rows.append(_store(recording, wide, repetitions, expected, folder))
    return Comparison(recording, tuple(rows))


def _of_peer(
    peer: Peer, recording: Recording, wide: Recording, repetitions: int, expected: list[str]
) -> Row:
    size = sum(len(peer.encode(recording, i)) for i in range(peer.pieces_of(recording)))
    shape_LK = (wide.layers, wide.topk)
    with one_core():
        encode_s, pieces = typical(
            lambda: [peer.encode(wide, i) for i in range(peer.pieces_of(wide))], repetitions
        )
        decode_s, arrays = typical(
            lambda: [a for piece in pieces for a in peer.decode(piece, shape_LK)], repetitions
        )
    return _row(peer.name, size, recording, wide, encode_s, decode_s, arrays, expected)


def _file(
    recording: Recording, wide: Recording, repetitions: int, expected: list[str], folder: Path
) -> Row:
    samples, geometry = ours.samples_of(wide), ours.geometry_of(wide)
    narrow = ours.samples_of(recording), ours.geometry_of(recording)
    with TemporaryDirectory(dir=folder) as scratch, one_core():
        store = open_store(scratch)
        size = ours.encode_file(store, *narrow).file.size
        encode_s, written = typical(lambda: ours.encode_file(store, samples, geometry), repetitions)
        decode_s, arrays = typical(lambda: ours.decode_file(written), repetitions)
    return _row(FILE, size, recording, wide, encode_s, decode_s, arrays, expected)


def _store(
    recording: Recording, wide: Recording, repetitions: int, expected: list[str], folder: Path
) -> Row:
    samples, geometry = ours.samples_of(wide), ours.geometry_of(wide)
    ids = [sample.id for sample in samples]
    with TemporaryDirectory(dir=folder) as scratch, one_core():
        narrow = open_store(f"{scratch}/narrow")
        written = ours.write(narrow, ours.samples_of(recording), ours.geometry_of(recording))
        size = written["routes"]
        stores = (open_store(f"{scratch}/{i}") for i in itertools.count())

        def write() -> Store:
            store = next(stores)
            ours.write(store, samples, geometry)
            return store

        encode_s, store = typical(write, repetitions)
        decode_s, arrays = typical(lambda: ours.seal_and_read(store, ids), repetitions)
    return _row(STORE, size, recording, wide, encode_s, decode_s, arrays, expected)


def _row(
    name: str,
    size: int,
    recording: Recording,
    wide: Recording,
    encode_s: float,
    decode_s: float,
    arrays: Sequence[npt.NDArray[Any]],
    expected: list[str],
) -> Row:
    """Return the row of a format; `size` refers to `recording`, the seconds to `wide`."""
    same_sets(name, set_digests(arrays), expected)
    mega = wide.raw_bytes / 1e6
    per = size / (recording.tokens * recording.layers)
    return Row(name, per, mega / encode_s, mega / decode_s)


@dataclass(frozen=True)
class Limit:
    """A limit of the design, and the measured value."""

    what: str
    limit: float
    found: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether the measured value is within the limit."""
        return self.found <= self.limit if self.at_most else self.found >= self.limit


def limits(comparison: Comparison) -> list[Limit]:
    """Return the design's limits that apply to a comparison."""
    file, store = comparison.row(FILE), comparison.row(STORE)
    recording, name = comparison.recording, comparison.recording.name
    found = []
    if name == "recorded":
        found.append(Limit(f"{name}: bytes per token-layer", 2.4, file.bytes_per, True))
    if name.startswith("uniform"):
        found.append(
            Limit(f"{name}: bytes / entropy", MOST_RATIO, file.bytes_per / recording.bound, True)
        )
    # In samples with few rows, the cost per sample exceeds the cost of the rows.
    write, read = (100, 100) if recording.tokens < 100 * len(recording.routes) else (250, 600)
    return [
        *found,
        Limit(f"{name}: written, digests and commit", write, store.encode_mb_s, False),
        Limit(f"{name}: read and checked", read, store.decode_mb_s, False),
    ]


def table_of(comparisons: Sequence[Comparison]) -> Table:
    """Return the table of all comparisons, with one section for each."""
    rows = []
    for comparison in comparisons:
        recording, base = comparison.recording, comparison.rows[0]
        name = f"**{recording.name} (E={recording.experts}, K={recording.topk})**"
        rows.append((name, f"entropy of uniform sets {recording.bound:.2f}", "", ""))
        for row in comparison.rows:
            cells = (
                row.name,
                f"{row.bytes_per:.2f} ({row.bytes_per / base.bytes_per:.2f}x)",
                f"{row.encode_mb_s:,.0f} ({row.encode_mb_s / base.encode_mb_s:.2f}x)",
                f"{row.decode_mb_s:,.0f} ({row.decode_mb_s / base.decode_mb_s:.2f}x)",
            )
            rows.append(cells)
    return Table(HEADERS, tuple(rows))


def limits_table(comparisons: Sequence[Comparison]) -> Table:
    """Return the table of the design's limits, and whether each is met."""
    rows = []
    for limit in (limit for comparison in comparisons for limit in limits(comparison)):
        unit = "" if limit.at_most else " MB/s"
        sign = "<=" if limit.at_most else ">="
        found = f"{limit.found:.2f}" if limit.at_most else f"{limit.found:,.0f}{unit}"
        rows.append((limit.what, f"{sign} {limit.limit:g}{unit}", found, verdict(limit.met)))
    return Table(LIMIT_HEADERS, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="tokens of the routes whose speeds are measured"
    )
    parser.add_argument(
        "--run", help="use the routes of this run's last step instead of the example model's"
    )
    arguments = arguments_of(parser)
    FOLDER.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    tokens, repetitions = (4096, 1) if arguments.quick else (arguments.tokens, REPETITIONS)
    recordings = fresh.recordings(arguments.quick, arguments.run)
    comparisons = [compare(r, tokens, LAYERS, repetitions, FOLDER) for r in recordings]
    where = machine("numpy", "pyarrow", "torch", "orjson", "pybase64")
    publish(
        {
            "traces": block(table_of(comparisons), where),
            "limits": block(limits_table(comparisons)),
        },
        arguments,
    )


if __name__ == "__main__":
    main()
