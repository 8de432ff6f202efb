"""Fuzz read_part with a routes file from a broken or hostile writer; all digests match.

The first byte of an input selects a seed file; the rest is the content of the routes file.
The description that read_part receives places the footer where the last bytes of the content
indicate. The positions of the column chunks come from the seed file.
"""

import itertools
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import atheris

with atheris.instrument_imports(include=["pipeline"]):
    from pipeline.run.commit import DataFile, sha256
    from pipeline.traces import Compression, Geometry, Provenance
    from pipeline.traces.format.chunks import TAIL, Range, RowGroup, TraceFile
    from pipeline.traces.format.header import read_header
    from pipeline.traces.format.manifest import file_of
    from pipeline.traces.read.parts import read_part
    from pipeline.traces.write.writer import write_shard

from fuzz.harness import run
from tests.memory_store import MemoryStore
from tests.samples import make_samples

COMPRESSIONS: tuple[Compression, ...] = ("zstd", "none")
GEOMETRIES = [Geometry(16, 4, (1, 2, 5)), Geometry(300, 5, (0, 3))]


def target(data: bytes) -> None:
    """Read the last segment in the last layer, then all segments in all layers."""
    if len(data) < 1 + TAIL:
        return
    number, content = data[0] % len(originals()), data[1:]
    original, geometry = originals()[number][0], GEOMETRIES[number % len(GEOMETRIES)]
    file = described(content, original)
    store = MemoryStore({file.data.key: content})
    read_part(store, file, geometry, geometry.layers[-1:], [file.rows - 1])
    read_part(store, file, geometry, geometry.layers, range(file.rows))


def described(content: bytes, original: TraceFile) -> TraceFile:
    """Return the description of `original`, but with this content's digests and footer."""
    length = min(int.from_bytes(content[-TAIL:-4], "little") + TAIL, len(content))
    groups = tuple(
        RowGroup(group.rows, tuple(_range(content, r.offset, r.length) for r in group.chunks))
        for group in original.row_groups
    )
    return replace(
        original,
        data=DataFile(original.data.key, len(content), sha256(content)),
        footer=_range(content, len(content) - length, length),
        row_groups=groups,
    )


def _range(content: bytes, offset: int, length: int) -> Range:
    return Range(offset, length, sha256(content[offset : offset + length]))


@cache
def originals() -> list[tuple[TraceFile, bytes]]:
    """Return seed files for each geometry: with one or several row groups, with or without zstd."""
    found = []
    for tokens, compression in itertools.product((32_768, 16), COMPRESSIONS):
        for geometry in GEOMETRIES:
            store = MemoryStore()
            samples = make_samples(prompts=2, geometry=geometry)
            made = Provenance("R3", 0, "vllm 0.32.0")
            with patch("pipeline.traces.write.segments.ROW_GROUP_TOKENS", tokens):
                write_shard(store, 0, 0, "0" * 8, samples, geometry, made, compression=compression)
            file = file_of(read_header(store, "steps/000000/rollout/00000.json"), "routes")
            assert file is not None
            found.append((file, store.read(file.data.key)))
    return found


if __name__ == "__main__":
    run(target, [bytes([i]) + content for i, (_, content) in enumerate(originals())])
