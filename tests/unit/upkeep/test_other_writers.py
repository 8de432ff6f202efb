"""What writers of other makers may do, and what they may not, by docs/trace-format.md."""

import json
from dataclasses import replace

import numpy as np
import pytest

from pipeline.run import keys
from pipeline.traces import (
    NewTrainingSet,
    Routes,
    read_manifest,
    read_routes,
    used_routes,
    write_recorded_set,
)
from pipeline.traces.format.types import VersionSpan
from pipeline.upkeep.verify import verify
from tests.forged_sets import name_all, resign, training_commits
from tests.forging import Forgery
from tests.memory_store import MemoryStore
from tests.samples import R2, equal, make_samples, sealed_r2, sealed_r3


def one_token(sample):
    """The sample with a prompt of one token and no response: it has no row."""
    sets_TLK, nothing = sample.routes.sets_TLK[:0], np.empty(0)
    return replace(
        sample,
        prompt_tokens_P=sample.prompt_tokens_P[:1],
        response_tokens_G=nothing.astype(np.uint32),
        loss_mask_G=nothing.astype(np.bool_),
        logprobs_G=nothing.astype(np.float32),
        version_spans=(VersionSpan(0, 0, 0),),
        routes=Routes(sets_TLK, nothing.astype(np.bool_)),
    )


def trained():
    """A step with a training set, one of whose samples has one token."""
    *samples, last = make_samples()
    store = MemoryStore()
    sealed_r2(store, [*samples, one_token(last)])
    return store, last.id


def left_out(store, id) -> None:
    """Name a sample in no part of the training set."""
    for key in training_commits(store):
        digests = [said for said in json.loads(store.read(key))["digests"] if said[0] != id]
        resign(store, key, digests=digests, samples=len(digests))
    store.delete(keys.training_set(0))
    name_all(store, NewTrainingSet(read_manifest(store, 0), R2))


def problems(store) -> list[str]:
    return [str(problem) for problem in verify(store).problems]


def test_parts_may_leave_out_a_sample_of_one_token():
    store, id = trained()
    left_out(store, id)
    assert problems(store) == []
    used = used_routes(store, 0)
    assert read_routes(store, used, [id])[id].sets_TLK.shape == (0, 3, 4)
    target = MemoryStore()
    write_recorded_set(store, target, 0)
    assert problems(target) == []


@pytest.mark.parametrize("digests", [None, []])
def test_a_sample_of_one_token_needs_no_part_in_a_recorded_set(digests):
    store, id = trained()
    target = MemoryStore()
    write_recorded_set(store, target, 0)
    forgery = Forgery(target)
    (row,) = [row for row in forgery.rows if row["id"] == id]
    row.update(routes=[], part_digests=digests)
    forged = forgery.sealed()
    assert problems(forged) == []
    copy = read_manifest(forged, 0)
    found, expected = (read_routes(s, used_routes(s, 0), copy.ids) for s in (forged, store))
    assert all(equal(found[id], expected[id]) for id in copy.ids)
    row["routes_digest"] = "0" * 64
    assert any("have digest" in problem for problem in problems(forgery.sealed()))


def test_row_groups_without_rows_as_pyarrow_writes_them():
    """Their chunks are a dictionary page alone, and pyarrow says that data begin at byte 0."""
    samples = make_samples()
    store = MemoryStore()
    sealed_r3(store, samples)
    forgery = Forgery(store)
    for made in (*forgery.shards, forgery.manifest):
        for file in made.files:
            file.empty_group = True
    forged = forgery.sealed()
    assert problems(forged) == []
    manifest = read_manifest(forged, 0)
    found = read_routes(forged, manifest, manifest.ids)
    assert all(equal(found[sample.id], sample.routes) for sample in samples)
