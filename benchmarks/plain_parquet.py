"""Compare Retrace's routes file with plain Parquet files of ids in all of Parquet's encodings.

    python -m benchmarks.plain_parquet

The tables give bytes per token-layer at zstd levels 1, 3 and 9, for sorted ids and for their gaps.
The routes were either recorded or randomly generated. Encode and decode MB/s are measured at the
zstd level that Retrace uses, per processor second on one core. The plain files lack data that a
usable file needs (see ways.parquet_forms); Retrace's file is complete. The program compares the
decoded sets with the original ones.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.measure import machine, one_core, typical
from benchmarks.page import Table, arguments_of, block, publish, verdict
from benchmarks.routes import fresh
from benchmarks.routes.recordings import Recording, same_sets, set_digests
from benchmarks.ways import ours
from benchmarks.ways.parquet_forms import FORMS

LEVELS = (1, 3, 9)
MOST = 1.02
"""Maximum size of Retrace's file, relative to the best plain form at the same zstd level."""
LIMIT_HEADERS = (
    "routes",
    "best plain form at that level",
    "its B per token-layer",
    "Retrace",
    "ratio",
    "limit",
    "",
)


@dataclass(frozen=True)
class Plain:
    """Results of a plain form for one recording."""

    name: str
    bytes_by_level: tuple[float, ...]
    """Bytes per token-layer, at LEVELS."""
    encode_mb_s: float
    decode_mb_s: float


@dataclass(frozen=True)
class Found:
    """Results of all plain forms and of Retrace for one recording."""

    recording: Recording
    forms: tuple[Plain, ...]
    retrace: float
    """Bytes per token-layer of Retrace's routes file."""

    @property
    def best(self) -> tuple[str, float]:
        """The smallest plain form at Retrace's zstd level, and its bytes per token-layer."""
        at = LEVELS.index(ours.LEVEL)
        form = min(self.forms, key=lambda form: form.bytes_by_level[at])
        return form.name, form.bytes_by_level[at]


def measure(recording: Recording, repetitions: int) -> Found:
    """Measure all forms on a recording. Raises ValueError if decoded sets differ."""
    written = ours.encode_file(ours.samples_of(recording), ours.geometry_of(recording))
    size = written.file.data.size / (recording.tokens * recording.layers)
    return Found(recording, tuple(_forms(recording, repetitions)), size)


def _forms(recording: Recording, repetitions: int) -> Iterator[Plain]:
    expected, mega = set_digests(recording.routes), recording.raw_bytes / 1e6
    for form in FORMS:
        for gaps in (False, True):
            name = f"{'gaps' if gaps else 'ids'} {form.name}"
            sizes = [len(form.encode(recording, gaps, level)) for level in LEVELS]
            with one_core():
                encode_s, data = typical(
                    lambda f=form, g=gaps: f.encode(recording, g, ours.LEVEL), repetitions
                )
                decode_s, arrays = typical(
                    lambda f=form, g=gaps, d=data: f.decode(d, recording, g), repetitions
                )
            same_sets(name, set_digests(arrays), expected)
            per = tuple(size / (recording.tokens * recording.layers) for size in sizes)
            yield Plain(name, per, mega / encode_s, mega / decode_s)


def limits_table(found: Sequence[Found]) -> Table:
    """Return the table that compares the size of Retrace's file with the best plain form."""
    rows = []
    for one in found:
        name, best = one.best
        ratio = one.retrace / best
        cells = (one.recording.name, name, f"{best:.3f}", f"{one.retrace:.3f}", f"{ratio:.3f}")
        rows.append((*cells, f"<= {MOST}", verdict(ratio <= MOST)))
    return Table(LIMIT_HEADERS, tuple(rows))


def bytes_table(found: Sequence[Found]) -> Table:
    """Return the table of bytes per token-layer by form and recording."""
    rows = [
        (form.name, *("  ".join(f"{b:.2f}" for b in one.forms[i].bytes_by_level) for one in found))
        for i, form in enumerate(found[0].forms)
    ]
    headers = tuple(one.recording.name for one in found)
    return Table(("B per token-layer at zstd 1, 3, 9", *headers), tuple(rows))


def speeds_table(found: Sequence[Found]) -> Table:
    """Return the table of encode and decode MB/s by form and recording."""
    rows = []
    for i, form in enumerate(found[0].forms):
        speeds = [one.forms[i] for one in found]
        rows.append((form.name, *(f"{s.encode_mb_s:,.0f}, {s.decode_mb_s:,.0f}" for s in speeds)))
    headers = tuple(one.recording.name for one in found)
    return Table((f"encode, decode MB/s at zstd {ours.LEVEL}", *headers), tuple(rows))


def main() -> None:
    arguments = arguments_of(argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]))
    recordings = fresh.recordings(arguments.quick)
    found = [measure(recording, 1 if arguments.quick else 3) for recording in recordings]
    where = machine("numpy", "pyarrow")
    publish(
        {
            "plain-parquet-limits": block(limits_table(found)),
            "plain-parquet": block(bytes_table(found), speeds_table(found), where),
        },
        arguments,
    )


if __name__ == "__main__":
    main()
