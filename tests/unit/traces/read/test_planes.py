"""Row groups that are coded as planes: any selection is read correctly, and bad planes are
refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.traces import (
    Geometry,
    RouteStream,
    Sample,
    TraceError,
    read_manifest,
    read_routes,
    seal,
    write_shard,
)
from pipeline.traces.format.codec import PLANES, decode, encode
from pipeline.traces.format.header import read_header
from pipeline.traces.format.manifest import file_of
from pipeline.traces.format.planes import decode_planes, encode_planes
from pipeline.traces.read.parts import read_part
from pipeline.traces.write import segments
from pipeline.traces.write.routes_file import RoutesFile
from pipeline.upkeep.verify import verify
from tests.forging import Forgery
from tests.memory_store import MemoryStore
from tests.samples import GEOMETRY, R3, make_samples, random_sets


def step_in_planes(
    geometry: Geometry,
    stored: str,
    tokens: int,
    compression: str = "zstd",
    samples: int | None = None,
) -> tuple[MemoryStore, list[Sample]]:
    """Seal a step in this coding, with row groups of this many tokens; None means all samples."""
    store, samples = MemoryStore(), make_samples(known=0.8, geometry=geometry)[:samples]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "ROW_GROUP_TOKENS", tokens)
        patch.setattr(RoutesFile, "_choose_coding", lambda *_: stored)
        write_shard(store, 0, 0, "0123abcd", samples, geometry, R3, compression=compression)
    seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0)
    return store, samples


@given(st.integers(1, 600), st.integers(1, 12), st.integers(0, 50), st.booleans())
def test_decoding_returns_the_encoded_sets(experts, topk, rows, gaps):
    geometry = Geometry(experts, min(topk, experts), (0,))
    rng = np.random.default_rng(rows)
    sets_NK = np.sort(random_sets(rng, rows, geometry)[:, 0], axis=-1)
    coded = encode_planes(sets_NK, gaps=gaps)
    assert len(coded) == sets_NK.nbytes
    found_NK = np.full_like(sets_NK, 7)
    decode_planes(coded, found_NK, experts, gaps=gaps)
    assert np.array_equal(found_NK, sets_NK)


@pytest.mark.parametrize(
    ("experts", "coded", "gaps", "says"),
    [
        (16, [3, 5, 3, 7], False, r"ids \[3, 3\]: expected ascending ids"),
        (16, [3, 5, 2, 7], False, r"ids \[3, 2\]: expected ascending ids"),
        (16, [3, 5, 4, 16], False, "expert id 16: expected 0..15"),
        (16, [3, 5, 4, 10], True, "expert id 16: expected 0..15"),
        (256, [255, 5, 0, 10], True, "the gaps of a row add up to more than 255"),
        (256, [200, 5, 255, 10], True, "the gaps of a row add up to more than 255"),
        (300, [43, 0, 1, 0, 44, 1, 1, 0], False, "expert id 300: expected 0..299"),
        (300, [255, 0, 255, 0, 0, 1, 0, 0], True, "the gaps of a row add up to more than 299"),
    ],
)
def test_wrong_ids_are_refused(experts, coded, gaps, says):
    found_NK = np.empty((2, 2), np.uint8 if experts <= 256 else np.uint16)
    with pytest.raises(TraceError, match=says):
        decode_planes(np.array(coded, np.uint8), found_NK, experts, gaps=gaps)


@pytest.mark.parametrize("stored", PLANES.values())
@pytest.mark.parametrize("experts", [16, 300])
def test_any_segments_of_any_layers_are_read(experts, stored):
    """The rows equal those of a file that codes each segment separately."""
    geometry = Geometry(experts, 4, (1, 2, 5))
    files = {}
    for name in (stored, "gaps-uint8" if experts <= 256 else "gaps-uint16-planes"):
        store, _ = step_in_planes(geometry, name, 10)
        head = read_header(store, "steps/000000/rollout/00000.json")
        files[name] = store, file_of(head, "routes")
    rows = files[stored][1].rows
    assert len(files[stored][1].row_groups) > 3

    @given(st.sets(st.integers(0, rows - 1)), st.sets(st.sampled_from(geometry.layers)))
    def check(chosen, layers):
        found, expected = (
            read_part(store, file, geometry, sorted(layers) or [5], sorted(chosen))
            for store, file in files.values()
        )
        assert np.array_equal(found.sets_LNK, expected.sets_LNK)
        assert np.array_equal(found.valid_N, expected.valid_N)
        assert found.segments == expected.segments

    check()


@pytest.mark.parametrize("compression", ["zstd", "lz4", "none"])
@pytest.mark.parametrize("stored", PLANES.values())
def test_every_reader_reads_planes(stored, compression):
    store, samples = step_in_planes(GEOMETRY, stored, 40, compression)
    assert verify(store).problems == []
    manifest = read_manifest(store, 0)
    found = read_routes(store, manifest, manifest.ids)
    for layers in (GEOMETRY.layers, GEOMETRY.layers[1:2]):
        stream = RouteStream(store, manifest, layers)
        for sample in samples:
            known, at = sample.routes.valid_T, [GEOMETRY.layers.index(layer) for layer in layers]
            sets_TLK = sample.routes.sets_TLK[known]
            assert np.array_equal(found[sample.id].sets_TLK[known], sets_TLK)
            assert np.array_equal(stream[sample.id].sets_TLK[known], sets_TLK[:, at])


def moved(rows):
    """Move the planes from the first segment to the second."""
    rows[1]["layer_00002"], rows[0]["layer_00002"] = rows[0]["layer_00002"], b""


def more(rows):
    rows[-1]["layer_00002"] = b"\0"


def shorter(rows):
    rows[0]["layer_00002"] = rows[0]["layer_00002"][:-1]


def longer(rows):
    rows[0]["layer_00002"] += b"\0"


def descending(rows):
    rows[0]["layer_00002"] = rows[0]["layer_00002"][::-1]


def other_count(rows):
    rows[-1]["tokens"] += 1


def huge_count(rows):
    rows[-1]["tokens"] = 2**31 - 1


def negative_count(rows):
    rows[-1]["tokens"] = -1


def no_tokens(rows):
    rows[-2]["tokens"] += rows[-1]["tokens"]
    rows[-1]["tokens"] = 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (moved, "coded bytes after the first segment"),
        (more, "coded bytes after the first segment"),
        (shorter, r"row group 0: \d+ coded bytes, expected \d+ rows of 4"),
        (longer, r"row group 0: \d+ coded bytes, expected \d+ rows of 4"),
        (descending, "expected ascending ids"),
        (other_count, "coded bytes, expected"),
        (huge_count, "coded bytes, expected"),
        (negative_count, "a segment of -1 tokens"),
        (no_tokens, "a segment of 0 tokens"),
    ],
)
def test_bad_planes_are_refused(change, says):
    """All digests of files and objects are remade after the change."""
    forgery = Forgery(step_in_planes(GEOMETRY, "ids-planes", 10_000)[0])
    change(forgery.segments)
    store = forgery.sealed()
    manifest = read_manifest(store, 0)
    with pytest.raises(TraceError, match=says):
        read_routes(store, manifest, manifest.ids)
    assert verify(store).problems


@pytest.mark.parametrize(
    ("experts", "names"),
    [
        (16, ["gaps-uint8", "ids-uint8", "gaps-planes", "ids-planes"]),
        (300, ["gaps-uint16-planes", "ids-uint16", "gaps-planes", "ids-planes"]),
    ],
)
def test_codings_are_not_confused(experts, names):
    """A row group of one segment has the same length in each coding. If the metadata names another
    coding, the ids are out of order or bounds, or the routes digest differs."""
    geometry = Geometry(experts, 4, (1, 2, 5))
    for stored in names:
        for other in [name for name in names if name != stored]:
            forgery = Forgery(step_in_planes(geometry, stored, 10_000, samples=1)[0])
            assert len(forgery.segments) == 1
            forgery.shards[0].file("routes").metadata["retrace.coding"] = other
            store = forgery.sealed()
            manifest = read_manifest(store, 0)
            says = "expected ascending|expected 0..|add up to|its routes have digest"
            with pytest.raises(TraceError, match=says):
                read_routes(store, manifest, manifest.ids)


@pytest.mark.parametrize("stored", PLANES.values())
def test_functions_for_segments_refuse_planes(stored):
    sets_TK = np.array([[1, 2], [4, 9]], np.uint8)
    with pytest.raises(TraceError, match="is for row groups"):
        encode(sets_TK, 16, stored)
    with pytest.raises(TraceError, match="is for row groups"):
        decode(sets_TK.tobytes(), 2, 2, 16, stored)
