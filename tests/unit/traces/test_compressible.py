"""Data that compresses without bound (one token, one set or one error) is written and read."""

from dataclasses import replace

import numpy as np
import pytest

import retrace
from pipeline.model.limits import MOST_TOKENS
from pipeline.run import keys
from pipeline.traces import read_manifest, read_routes, read_samples
from pipeline.traces.format.domain import MOST_SPANS, TEXT_BYTES
from pipeline.traces.format.header import read_header
from pipeline.traces.format.manifest import file_of, open_manifest
from pipeline.traces.format.pages import FEW_BYTES
from pipeline.upkeep.verify import verify
from retrace import Geometry, Provenance, TraceError, VersionSpan
from tests.memory_store import MemoryStore
from tests.samples import R3

SMALL = Geometry(2, 1, (0,))


def one_sample(tokens: int, k: int = 0, prompt: int = 1) -> retrace.Sample:
    """Return a sample whose tokens, log-probs, masks and routes are all the same."""
    return retrace.new_sample(
        step=0,
        prompt_id="1",
        k=k,
        prompt_tokens=np.zeros(prompt, np.uint32),
        response_tokens=np.zeros(tokens - prompt, np.uint32),
        logprobs=np.zeros(tokens - prompt, np.float32),
        experts=np.zeros((tokens - 1, 1, 1), np.uint8),
        reward=1.0,
    )


def written(samples: list[retrace.Sample], geometry: Geometry | None) -> MemoryStore:
    store = MemoryStore()
    provenance: Provenance | None = R3 if geometry else None
    retrace.write_step(store, 0, samples, geometry, provenance)
    return store


@pytest.mark.parametrize("prompt", [1, MOST_TOKENS - 1])
def test_a_sample_of_millions_of_copies_of_one_token_is_written_and_read(prompt):
    sample = one_sample(MOST_TOKENS, prompt=prompt)
    store = written([sample], SMALL)
    assert max(len(data) for data in store.objects.values()) < 100_000
    manifest = read_manifest(store, 0)
    (found,) = read_samples(store, manifest, [sample.id])
    assert np.array_equal(found.tokens_S, sample.tokens_S)
    routes = read_routes(store, manifest, [sample.id])[sample.id]
    assert not routes.sets_TLK.any()
    assert verify(store).problems == []


def test_longer_samples_are_not_written():
    with pytest.raises(TraceError, match=r"number of tokens: 2097153, expected 1\.\.2097152"):
        written([replace(one_sample(MOST_TOKENS + 1), routes=None)], None)


def test_more_version_spans_are_not_written():
    sample = one_sample(2)
    spans = (*[VersionSpan(0, 0, 0)] * MOST_SPANS, VersionSpan(0, 0, 1))
    with pytest.raises(TraceError, match="65537 version spans, expected at most 65536"):
        written([replace(sample, version_spans=spans, routes=None)], None)


def test_the_longest_extras_are_stored_in_utf_8():
    """The limit is on the stored bytes, so é counts as 2 bytes, not as the 6 of its escape."""
    extras = {"a": "é" * ((TEXT_BYTES - len('{"a": ""}')) // 2)}
    store = written([replace(one_sample(2), routes=None, extras=extras)], None)
    manifest = read_manifest(store, 0)
    assert read_samples(store, manifest, manifest.ids)[0].extras == extras
    assert verify(store).problems == []


def test_one_long_error_in_all_samples_is_written_and_read():
    """Row groups with long texts contain few rows, so the bounds are never reached."""
    error = "x" * TEXT_BYTES
    samples = [
        replace(one_sample(2, k), routes=None, reward=None, reward_error=error)
        for k in range(FEW_BYTES // TEXT_BYTES + 10)
    ]
    store = written(samples, None)
    manifest = read_manifest(store, 0)
    ids = [samples[0].id, samples[-1].id]
    assert all(found.reward_error == error for found in read_samples(store, manifest, ids))
    file = file_of(read_header(store, keys.rollout(0, 0)), "samples")
    assert file is not None
    assert max(group.rows for group in file.row_groups) == 8
    assert max(group.rows for group in open_manifest(store, 0).file.row_groups) < 64
