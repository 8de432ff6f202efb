"""What it takes to bring routes from rollout to training: bytes and seconds, beside peers.

    python -m benchmarks.traces [--tokens N] [--run URI]

One table, one run. Bytes per token-layer are of the routes as they were recorded; speeds and
hand-over are of the same routes widened to 48 layers and `--tokens` tokens (see
recordings.widened). Ratios in brackets refer to vLLM's HTTP format on the same routes. MB are of
raw routes: one byte per expert id, two above 256 experts. Encoding and decoding are pinned to one
core and count processor time, which a busy machine changes little; the hand-over is between two
processes and counts by the clock (see handover). Whatever comes out is compared with the original
as sets; a difference ends the run with an error.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import fresh, handover, ours
from benchmarks.measure import fastest, machine, one_core
from benchmarks.peers import PEERS, Peer
from benchmarks.recordings import Recording, recorded, uniform, widened
from pipeline.store import Store, open_store

FOLDER = Path("outputs/benchmarks")
LAYERS, REPETITIONS, ENOUGH_S = 48, 5, 2.0
CODING, FILE, STORE = (
    "Retrace: coding alone, no zstd",
    "Retrace: routes file",
    "Retrace: write_shard, read_routes",
)


@dataclass(frozen=True)
class Row:
    """What one way of shipping routes needs."""

    name: str
    bytes_per: float
    """Bytes per token-layer."""
    encode_mb_s: float
    decode_mb_s: float
    handover_s: float | None
    """Seconds per million tokens of 48 layers; None: no way of its own to hand over."""


@dataclass(frozen=True)
class Comparison:
    """All ways on one recording."""

    recording: Recording
    rows: tuple[Row, ...]
    """The first is what ratios refer to."""

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)


def compare(
    recording: Recording, tokens: int, layers: int, repetitions: int, folder: Path
) -> Comparison:
    """Measure every way on a recording. Raises ValueError when decoded sets differ."""
    wide = widened(recording, layers, tokens)
    expected = handover.set_digests(wide.routes)
    with handover.trainer() as trainer:

        def handed(name: str, once: Callable[[], float]) -> float:
            seconds = [once()]
            while len(seconds) < repetitions and sum(seconds) < ENOUGH_S:
                seconds.append(once())
            _same(name, trainer.digests(), expected)
            return min(seconds) * 1e6 / wide.tokens

        rows = []
        for peer in PEERS:
            row = _of_peer(peer, recording, wide, repetitions, expected)
            seconds = handed(peer.name, lambda p=peer: handover.of_peer(p, wide, trainer, folder))
            rows.append(replace(row, handover_s=seconds))
        rows.append(_coding(wide, repetitions, expected))
        rows.append(_file(recording, wide, repetitions, expected))
        row = _store(recording, wide, repetitions, expected, folder)
        seconds = handed(STORE, lambda: handover.of_ours(wide, trainer, folder))
        rows.append(replace(row, handover_s=seconds))
    return Comparison(recording, tuple(rows))


def _of_peer(
    peer: Peer, recording: Recording, wide: Recording, repetitions: int, expected: list[str]
) -> Row:
    size = sum(len(peer.encode(recording, i)) for i in range(peer.pieces_of(recording)))
    shape_LK = (wide.layers, wide.topk)
    with one_core():
        encode_s, pieces = fastest(
            lambda: [peer.encode(wide, i) for i in range(peer.pieces_of(wide))], repetitions
        )
        decode_s, arrays = fastest(
            lambda: [a for piece in pieces for a in peer.decode(piece, shape_LK)], repetitions
        )
    return _row(peer.name, size, recording, wide, encode_s, decode_s, arrays, expected)


def _coding(wide: Recording, repetitions: int, expected: list[str]) -> Row:
    with one_core():
        encode_s, coded = fastest(lambda: ours.encode_bare(wide), repetitions)
        decode_s, arrays = fastest(lambda: ours.decode_bare(coded, wide), repetitions)
    size = sum(of_sample.nbytes for of_sample in coded)
    return _row(CODING, size, wide, wide, encode_s, decode_s, arrays, expected)


def _file(recording: Recording, wide: Recording, repetitions: int, expected: list[str]) -> Row:
    size = ours.encode_file(ours.samples_of(recording), ours.geometry_of(recording)).file.data.size
    samples, geometry = ours.samples_of(wide), ours.geometry_of(wide)
    with one_core():
        encode_s, written = fastest(lambda: ours.encode_file(samples, geometry), repetitions)
        decode_s, arrays = fastest(lambda: list(ours.decode_file(written)), repetitions)
    return _row(FILE, size, recording, wide, encode_s, decode_s, arrays, expected)


def _store(
    recording: Recording, wide: Recording, repetitions: int, expected: list[str], folder: Path
) -> Row:
    samples, geometry = ours.samples_of(wide), ours.geometry_of(wide)
    ids = [sample.id for sample in samples]
    with TemporaryDirectory(dir=folder) as scratch, one_core():
        narrow = open_store(f"{scratch}/narrow")
        size = ours.write(narrow, ours.samples_of(recording), ours.geometry_of(recording))
        stores = (open_store(f"{scratch}/{i}") for i in itertools.count())

        def write() -> Store:
            store = next(stores)
            ours.write(store, samples, geometry)
            return store

        encode_s, store = fastest(write, repetitions)
        decode_s, arrays = fastest(lambda: ours.seal_and_read(store, ids), repetitions)
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
    """A row; `size` is of `recording`, the seconds are of `wide`."""
    _same(name, handover.set_digests(arrays), expected)
    mega = wide.raw_bytes / 1e6
    per = size / (recording.tokens * recording.layers)
    return Row(name, per, mega / encode_s, mega / decode_s, None)


def _same(name: str, found: list[str], expected: list[str]) -> None:
    if found != expected:
        different = sum(a != b for a, b in itertools.zip_longest(found, expected))
        raise ValueError(f"{name}: {different} of {len(expected)} samples came out different")


@dataclass(frozen=True)
class Limit:
    """A limit of the design, and what was found."""

    what: str
    limit: float
    found: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether it is kept."""
        return self.found <= self.limit if self.at_most else self.found >= self.limit


def limits(comparison: Comparison) -> list[Limit]:
    """The design's limits that a comparison says something of."""
    row, name = comparison.row(FILE), comparison.recording.name
    found = []
    if name == "recorded":
        found.append(Limit(f"{name}: bytes per token-layer", 2.4, row.bytes_per, True))
    if name.startswith("uniform"):
        bound = comparison.recording.bound
        found.append(Limit(f"{name}: bytes / entropy", 1.06, row.bytes_per / bound, True))
    return [
        *found,
        Limit(f"{name}: array to Parquet bytes, MB/s", 150, row.encode_mb_s, False),
        Limit(f"{name}: Parquet bytes to array, MB/s", 400, row.decode_mb_s, False),
    ]


def table_of(comparisons: Sequence[Comparison], caption: str) -> Table:
    """The comparisons, one section each."""
    table = Table(title="Routes from rollout to training", caption=caption)
    for header in (
        "",
        "B per token-layer",
        "encode MB/s",
        "decode MB/s",
        "hand-over s per M tokens",
    ):
        table.add_column(header, justify="right" if header else "left")
    for comparison in comparisons:
        recording, base = comparison.recording, comparison.rows[0]
        bound = f"entropy of uniform sets {recording.bound:.2f}"
        table.add_row(
            f"[bold]{recording.name}[/] (E={recording.experts}, K={recording.topk})", bound
        )
        for row in comparison.rows:
            table.add_row(
                f"  {row.name}",
                f"{row.bytes_per:.2f} ({row.bytes_per / base.bytes_per:.2f}x)",
                f"{row.encode_mb_s:,.0f} ({row.encode_mb_s / base.encode_mb_s:.2f}x)",
                f"{row.decode_mb_s:,.0f} ({row.decode_mb_s / base.decode_mb_s:.2f}x)",
                ""
                if row.handover_s is None or base.handover_s is None
                else f"{row.handover_s:.2f} ({row.handover_s / base.handover_s:.2f}x)",
            )
        table.add_section()
    return table


def limits_table(comparisons: Sequence[Comparison]) -> Table:
    """The design's limits, met or missed."""
    table = Table(title="Limits of the design, on the routes file")
    for header in ("", "limit", "found", ""):
        table.add_column(header, justify="left" if not header else "right")
    for limit in (limit for comparison in comparisons for limit in limits(comparison)):
        sign = "<=" if limit.at_most else ">="
        verdict = "met" if limit.met else "[bold red]missed[/]"
        table.add_row(limit.what, f"{sign} {limit.limit:g}", f"{limit.found:.3g}", verdict)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=65_536, help="of speeds and hand-over")
    parser.add_argument("--run", help="routes of this run's last step, not of the example model")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    example = fresh.of_run(arguments.run) if arguments.run else fresh.generated()
    recordings = [recorded(), example, uniform(128, 8), uniform(256, 8), uniform(512, 10)]
    torch.set_num_threads(1)
    comparisons = [compare(r, arguments.tokens, LAYERS, REPETITIONS, FOLDER) for r in recordings]
    console = Console(width=140)
    packages = ("numpy", "pyarrow", "torch", "orjson", "pybase64")
    console.print(table_of(comparisons, machine(*packages)), limits_table(comparisons))


if __name__ == "__main__":
    main()
