"""Each benchmark runs at a tiny size and gives plausible numbers. No test depends on measured
times.

Benchmarks that start processes are slower, because each process imports the code that it measures.
Integration tests cover these benchmarks.
"""

import math
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import codings, manifest, plain_parquet, traces
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
from benchmarks.ways import differences, ours
from benchmarks.ways.peers import PEERS
from tests.paths import ROOT

RECORDINGS = [
    uniform(16, 4, samples=5, rows=9, layers=2),
    uniform(512, 10, samples=3, rows=7, layers=3),
]


def a_group() -> Recording:
    """Return samples of different lengths; the last two share a prompt and its rows."""
    found = uniform(16, 4, samples=3, rows=9, layers=2)
    first, second, third = found.routes
    third = np.concatenate([second[:4], third[4:]])
    return replace(found, routes=(first[:6], second, third), prompts=(2, 4, 4), groups=(0, 1, 1))


def test_the_recorded_routes_agree_with_their_readme():
    found = recorded()
    assert (found.experts, found.layers, found.topk, found.tokens) == (128, 6, 8, 32_768)
    assert found.raw_bytes == 64 * 512 * 6 * 8
    row = np.sort(np.concatenate(found.routes), axis=-1)
    assert (row[..., 1:] > row[..., :-1]).all()
    assert 5.0 < found.bound < 5.1


@pytest.mark.parametrize("recording", [*RECORDINGS, a_group()], ids=["uint8", "uint16", "group"])
def test_every_format_decodes_to_the_original_sets(recording, tmp_path):
    """`compare` raises an error if sets differ. This test checks the table's rows and the number of
    bytes."""
    compared = traces.compare(recording, 30, 4, 1, tmp_path)
    names = [row.name for row in compared.rows]
    assert names == [*(peer.name for peer in PEERS), traces.FILE, traces.STORE]
    assert all(row.encode_mb_s > 0 and row.decode_mb_s > 0 for row in compared.rows)
    width, K = recording.routes[0].itemsize, recording.topk
    assert compared.row(names[0]).bytes_per > 4 / 3 * width * K  # base64
    assert compared.row(names[1]).bytes_per > 4 / 3 * 4 * K
    assert compared.row(names[2]).bytes_per > 2 * K
    assert len(traces.table_of([compared]).rows) == len(names) + 1
    assert len(traces.limits_table([compared]).rows) == len(traces.limits(compared))


def test_a_format_that_changes_a_set_ends_the_run(tmp_path, monkeypatch):
    recording = RECORDINGS[0]
    peer = PEERS[0]
    wrong = replace(peer, decode=lambda piece, shape: [a[::-1] for a in peer.decode(piece, shape)])
    monkeypatch.setattr(traces, "PEERS", (wrong,))
    with pytest.raises(ValueError, match="samples differ from the original"):
        traces.compare(recording, 30, 4, 1, tmp_path)


@pytest.mark.parametrize("recording", [*RECORDINGS, a_group()], ids=["uint8", "uint16", "group"])
def test_every_plain_form_is_measured(recording):
    """`size_of` raises an error if ids differ."""
    table = plain_parquet.table_of([recording])
    assert [row[0] for row in table.rows[1:]] == [form.name for form in plain_parquet.FORMS]


def test_rows_of_a_prompt_are_left_out_once_and_gaps_give_the_ids():
    """The third sample of the group repeats the first four rows of the second."""
    every, once = (plain_parquet.rows_of(a_group(), once) for once in (False, True))
    assert np.array_equal(once, np.delete(every, slice(15, 19), axis=1))
    gaps = plain_parquet.gaps_of(every)
    gaps[..., 1:] += 1
    assert np.array_equal(np.cumsum(gaps, axis=-1), every)


def a_few_steps(rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Return a small tensor before and after three steps of the benchmark's Adam."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 30_000).astype(np.float32)
    (_, (old,)), (_, (new,)) = codings.adam(weights, (rate,), (3,), rng)
    return old, new


def test_adams_steps_change_few_words_at_small_rates():
    """A step moves a weight by at most about the learning rate, which here is far less than the
    spacing between bf16 numbers."""
    for rate, least, most in [(1e-6, 0.01, 0.05), (1e-5, 0.1, 0.3), (5e-4, 0.8, 1)]:
        old, new = a_few_steps(rate)
        moved = (old.astype(np.uint32) << 16).view(np.float32) - (new.astype(np.uint32) << 16).view(
            np.float32
        )
        assert least < np.mean(old != new) < most
        assert np.abs(moved).max() < 10 * rate + 2**-11  # bf16's spacing at 0.1


def test_every_coding_restores_the_new_version():
    """`measure` raises an error if the patched words differ."""
    row = codings.Row.empty()
    codings.measure(row, *a_few_steps(1e-5))
    found = {way.name: row.ways[way.name].coded for way in differences.WAYS}
    assert (row.words, row.bytes) == (30_000, 60_000)
    assert 0 < found[differences.OURS.name] == min(found.values())
    assert max(found.values()) < row.bytes / 2
    assert codings.table_of({"some": row}).headers == codings.HEADERS
    assert [line[0] for line in codings.ways_of(row).rows] == [w.name for w in differences.WAYS]


def test_a_coding_that_loses_a_change_ends_the_run():
    lossy = differences.OURS._replace(patch=lambda coded, target: None)
    with pytest.raises(
        ValueError, match="gaps, steps: the patched words differ from the new version"
    ):
        codings.measure(codings.Row.empty(), *a_few_steps(1e-5), ways=(lossy,))


def test_the_synthetic_policy_has_the_size_of_a_real_one():
    sizes = [2 * math.prod(shape) for shape, _, _ in codings.shapes()]
    assert sum(sizes) >= 1e9
    assert max(sizes) < sum(sizes) / 50


def test_every_cell_is_measured_and_memory_is_that_of_one_tensor():
    """With more tensors, the results grow but the peak does not."""
    peaks = []
    for count in (2, 8):
        tensors = [((64, 1024), 0.0, 0.02)] * count
        tracemalloc.start()
        try:
            rows = codings.synthetic(tensors)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert {row.bytes for row in rows.values()} == {count * 2 * 64 * 1024}
    assert list(rows) == [codings.cell(rate, n) for rate in codings.RATES for n in codings.STEPS]
    assert len(rows) == 9
    assert codings.cell(*codings.GOAL) in rows
    assert peaks[1] < 1.2 * peaks[0]


def test_skewed_routes_prefer_some_experts_and_resemble_the_previous_row():
    """With `by_id`, the most popular experts have the lowest ids."""
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


def test_repeated_routes_use_renamed_experts():
    """The renaming prevents codings from benefiting from the repetition. The original routes come
    first and are unchanged."""
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


def test_digests_ignore_order_and_type():
    sets = RECORDINGS[0].routes
    other = [array[..., ::-1].astype(np.int32) for array in sets]
    assert set_digests(sets) == set_digests(other)
    other[0][0, 0, 0] = (other[0][0, 0, 0] + 1) % 16
    assert set_digests(sets)[0] != set_digests(other)[0]


@pytest.mark.integration
def test_a_manifest_of_fabricated_shards_is_sealed_and_looked_up(tmp_path, monkeypatch):
    """There are two shards, a rank finds the rows of its share, and every phase runs in a separate
    process."""
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


def test_a_failed_process_raises_instead_of_hanging():
    with pytest.raises(RuntimeError, match="ended without an answer"):
        in_fresh_process(int, "no number")


@pytest.mark.integration
def test_replay_is_measured_against_native_routing():
    """Both outputs have the same bits, and the profile lists the parts of replay. Megatron needs a
    separate process."""
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
