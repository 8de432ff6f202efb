"""Each benchmark runs at a tiny size and its figures are sane. Nothing here depends on time.

Those that start processes are left to the integration tests: each imports what it measures.
"""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import handover, manifest, ours, traces
from benchmarks.measure import in_fresh_process
from benchmarks.peers import PEERS
from benchmarks.recordings import Recording, recorded, uniform, widened
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


@pytest.mark.integration
@pytest.mark.parametrize("recording", [*RECORDINGS, a_group()], ids=["uint8", "uint16", "group"])
def test_every_way_ends_with_the_sets_that_were_sent(recording, tmp_path):
    """`compare` itself refuses what comes out different, also of the trainer's process; here the
    table: all rows, a hand-over for each way that has one, and bytes as the formats say."""
    compared = traces.compare(recording, 30, 4, 1, tmp_path)
    names = [row.name for row in compared.rows]
    assert names == [*(peer.name for peer in PEERS), traces.CODING, traces.FILE, traces.STORE]
    assert [row.name for row in compared.rows if row.handover_s is None] == names[-3:-1]
    assert all(row.encode_mb_s > 0 and row.decode_mb_s > 0 for row in compared.rows)
    width, K = recording.routes[0].itemsize, recording.topk
    assert compared.row(names[0]).bytes_per > 4 / 3 * width * K  # base64
    assert compared.row(names[1]).bytes_per > 4 / 3 * 4 * K
    assert compared.row(names[2]).bytes_per > 2 * K
    assert compared.row(traces.CODING).bytes_per == width * K
    table = traces.table_of([compared], "here")
    assert table.row_count == len(names) + 1
    assert traces.limits_table([compared]).row_count == len(traces.limits(compared))


@pytest.mark.integration
def test_a_way_that_loses_a_set_ends_the_run(tmp_path, monkeypatch):
    recording = RECORDINGS[0]
    peer = PEERS[0]
    wrong = replace(peer, decode=lambda piece, shape: [a[::-1] for a in peer.decode(piece, shape)])
    monkeypatch.setattr(traces, "PEERS", (wrong,))
    with pytest.raises(ValueError, match="samples came out different"):
        traces.compare(recording, 30, 4, 1, tmp_path)


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
    assert handover.set_digests(sets) == handover.set_digests(other)
    other[0][0, 0, 0] = (other[0][0, 0, 0] + 1) % 16
    assert handover.set_digests(sets)[0] != handover.set_digests(other)[0]


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
    assert manifest.table_of({(24, 1_000_000): phases}).row_count == 6
    assert manifest.Step("", 24, 1_000_000).shards == 2
    with pytest.raises(ValueError, match="not a multiple"):
        manifest.measure(9, 8, tmp_path)


def test_a_process_that_fails_is_not_waited_for():
    with pytest.raises(RuntimeError, match="ended without an answer"):
        in_fresh_process(int, "no number")


@pytest.mark.integration
def test_replay_is_measured_against_native_routing():
    """A process of its own: Megatron joins a process group. Same bits, and the parts are there."""
    sizes = [
        "--layers",
        "1",
        "--tokens",
        "32",
        "--hidden",
        "64",
        "--experts",
        "8",
        "--ffn",
        "16",
        "--repetitions",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.replay", *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "same bits in the output" in done.stdout
    same = next(line for line in done.stdout.splitlines() if "same bits" in line)
    assert "yes" in same
    assert "replay: upload, order, gather" in done.stdout
