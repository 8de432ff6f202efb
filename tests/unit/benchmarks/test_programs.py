"""Each benchmark runs at a tiny size and its figures are sane. Nothing here depends on time.

Those that start processes are left to the integration tests: each imports what it measures.
"""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import manifest, plain_parquet, traces
from benchmarks.measure import in_fresh_process
from benchmarks.page import read_table
from benchmarks.routes.recordings import (
    Recording,
    recorded,
    set_digests,
    skewed,
    uniform,
    widened,
)
from benchmarks.ways import ours
from benchmarks.ways.parquet_forms import FORMS
from benchmarks.ways.peers import PEERS
from tests.paths import ROOT

RECORDINGS = [
    uniform(16, 4, samples=5, rows=9, layers=2),
    uniform(512, 10, samples=3, rows=7, layers=3),
]


def a_group() -> Recording:
    """Samples of different lengths, the last two of one prompt with equal rows."""
    found = uniform(16, 4, samples=3, rows=9, layers=2)
    first, second, third = found.routes
    third = np.concatenate([second[:4], third[4:]])
    return replace(found, routes=(first[:6], second, third), prompts=(2, 4, 4), groups=(0, 1, 1))


def test_the_recorded_routes_are_what_their_readme_says():
    found = recorded()
    assert (found.experts, found.layers, found.topk, found.tokens) == (128, 6, 8, 32_768)
    assert found.raw_bytes == 64 * 512 * 6 * 8
    row = np.sort(np.concatenate(found.routes), axis=-1)
    assert (row[..., 1:] > row[..., :-1]).all()
    assert 5.0 < found.bound < 5.1


@pytest.mark.parametrize("recording", [*RECORDINGS, a_group()], ids=["uint8", "uint16", "group"])
def test_every_way_ends_with_the_sets_that_were_sent(recording, tmp_path):
    """`compare` itself refuses what comes out different; here the table: all rows, and bytes as
    the formats say."""
    compared = traces.compare(recording, 30, 4, 1, tmp_path)
    names = [row.name for row in compared.rows]
    assert names == [*(peer.name for peer in PEERS), traces.CODING, traces.FILE, traces.STORE]
    assert all(row.encode_mb_s > 0 and row.decode_mb_s > 0 for row in compared.rows)
    width, K = recording.routes[0].itemsize, recording.topk
    assert compared.row(names[0]).bytes_per > 4 / 3 * width * K  # base64
    assert compared.row(names[1]).bytes_per > 4 / 3 * 4 * K
    assert compared.row(names[2]).bytes_per > 2 * K
    assert compared.row(traces.CODING).bytes_per == width * K
    assert len(traces.table_of([compared]).rows) == len(names) + 1
    assert len(traces.limits_table([compared]).rows) == len(traces.limits(compared))


def test_a_way_that_loses_a_set_ends_the_run(tmp_path, monkeypatch):
    recording = RECORDINGS[0]
    peer = PEERS[0]
    wrong = replace(peer, decode=lambda piece, shape: [a[::-1] for a in peer.decode(piece, shape)])
    monkeypatch.setattr(traces, "PEERS", (wrong,))
    with pytest.raises(ValueError, match="samples came out different"):
        traces.compare(recording, 30, 4, 1, tmp_path)


@pytest.mark.parametrize("recording", [*RECORDINGS, a_group()], ids=["uint8", "uint16", "group"])
def test_plain_files_hold_the_same_sets_in_fewer_bytes_than_they_have(recording):
    """`measure` refuses what comes out different; the best form at Retrace's level is found."""
    found = plain_parquet.measure(recording, 1)
    assert len(found.forms) == 2 * len(FORMS)
    name, best = found.best
    at = plain_parquet.LEVELS.index(ours.LEVEL)
    assert best == min(form.bytes_by_level[at] for form in found.forms)
    (row,) = plain_parquet.limits_table([found]).rows
    assert (row[1], float(row[4])) == (name, pytest.approx(found.retrace / best, abs=1e-3))


def test_plain_files_have_the_encodings_they_are_named_for():
    import pyarrow as pa
    import pyarrow.parquet as pq

    for form in FORMS:
        data = form.encode(RECORDINGS[0], gaps=False, level=1)
        column = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0).column(0)
        wanted = "RLE_DICTIONARY" if form.encoding == "DICTIONARY" else form.encoding
        assert wanted in column.encodings
        assert column.compression == "ZSTD"


def test_skewed_routes_prefer_some_experts_and_keep_to_them():
    """The popular experts are those of the lowest ids, or not; a row is like the row before."""
    for by_id in (True, False):
        found = skewed(by_id, samples=4, rows=128, layers=2)
        sets = np.stack(found.routes)[:, :, 0]
        counts = np.bincount(sets.ravel(), minlength=128)
        assert counts.max() > 4 * counts.mean()
        assert (counts[:32].sum() > counts[32:].sum()) == by_id
        one_hot = np.zeros((*sets.shape[:2], 128), bool)
        np.put_along_axis(one_hot, sets.astype(int), True, axis=-1)
        assert (one_hot.sum(axis=-1) == 8).all()
        kept = (one_hot[:, 1:] & one_hot[:, :-1]).sum()
        others = (one_hot[:, 64:] & one_hot[:, :-64]).sum() * 127 / 64
        assert kept > 1.5 * others


def test_repeated_routes_have_other_names_of_experts():
    """So that no coder profits from the repetition; what was recorded stands first, as it is."""
    found = RECORDINGS[0]
    wide = widened(found, layers=4, tokens=2 * found.tokens)
    assert (wide.layers, wide.tokens, len(set(wide.groups))) == (4, 2 * found.tokens, 10)
    assert np.array_equal(wide.routes[0][:, :2], found.routes[0])
    assert not np.array_equal(wide.routes[0][:, 2:], found.routes[0])
    assert not np.array_equal(wide.routes[5][:, :2], found.routes[0])


def test_samples_of_a_group_share_their_prompt():
    samples = ours.samples_of(a_group())
    assert [sample.id for sample in samples] == ["000000/0/0", "000000/1/0", "000000/1/1"]
    assert np.array_equal(samples[1].prompt_tokens_P, samples[2].prompt_tokens_P)
    for sample in samples:
        assert len(sample.tokens_S) == len(sample.routes.valid_T) + 1


def test_digests_do_not_see_the_order_or_the_type():
    sets = RECORDINGS[0].routes
    other = [array[..., ::-1].astype(np.int32) for array in sets]
    assert set_digests(sets) == set_digests(other)
    other[0][0, 0, 0] = (other[0][0, 0, 0] + 1) % 16
    assert set_digests(sets)[0] != set_digests(other)[0]


@pytest.mark.integration
def test_a_manifest_of_fabricated_shards_is_sealed_and_looked_up(tmp_path, monkeypatch):
    """Two shards; the share of a rank has its rows; every phase ran in a process of its own."""
    phases = manifest.measure(24, 1_000_000, tmp_path)
    assert [phase.result for name, phase in phases.items() if name in manifest.PHASES][2:] == [
        24,
        24,
        1,
    ]
    assert all(phase.peak_bytes > 1 << 20 for phase in phases.values())
    assert len(manifest.table_of({(24, 1_000_000): phases}).rows) == 6
    assert manifest.Step("", 24, 1_000_000).shards == 2
    with pytest.raises(ValueError, match="not a multiple"):
        manifest.measure(9, 8, tmp_path)


def test_a_process_that_fails_is_not_waited_for():
    with pytest.raises(RuntimeError, match="ended without an answer"):
        in_fresh_process(int, "no number")


@pytest.mark.integration
def test_replay_is_measured_against_native_routing():
    """A process of its own: Megatron joins a process group. Same bits, and the parts are there."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.replay", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = {row[0]: row[1] for row in read_table(done.stdout).rows}
    assert rows["same bits in the output"] == "yes"
    assert "profiled: replay: upload, order, gather" in rows
