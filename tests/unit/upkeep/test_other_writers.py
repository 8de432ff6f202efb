"""What docs/trace-format.md allows other writers to do, and what it requires of them."""

import json
import re
import struct
from dataclasses import replace

import numpy as np
import pytest

from pipeline.run import keys
from pipeline.traces import (
    NewTrainingSet,
    Routes,
    TraceError,
    read_manifest,
    read_routes,
    read_samples,
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
    """Return the sample with a prompt of one token and no response, and thus without a row."""
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
    """A step with a training set. One of the step's samples has one token."""
    *samples, last = make_samples()
    store = MemoryStore()
    sealed_r2(store, [*samples, one_token(last)])
    return store, last.id


def left_out(store, id) -> None:
    """Remove a sample from all parts of the training set."""
    for key in training_commits(store):
        digests = [said for said in json.loads(store.read(key))["digests"] if said[0] != id]
        resign(store, key, digests=digests, samples=len(digests))
    store.delete(keys.training_set(0))
    name_all(store, NewTrainingSet(read_manifest(store, 0), R2))


def problems(store) -> list[str]:
    return [str(problem) for problem in verify(store).problems]


def test_parts_may_omit_a_sample_of_one_token():
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


def test_row_groups_without_rows_are_accepted_as_pyarrow_writes_them():
    """The chunks of such a row group contain only a dictionary page. According to the footer that
    pyarrow writes, their data begins at byte 0."""
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


def with_statistics():
    """Return a forgery of a step whose files have statistics, and its files by role."""
    store = MemoryStore()
    sealed_r3(store, make_samples())
    forgery = Forgery(store)
    files = {"manifest": forgery.manifest.file("manifest")}
    files |= {role: forgery.shards[0].file(role) for role in ("samples", "routes")}
    assert all("write_statistics" not in file.options for file in files.values())
    return forgery, files


@pytest.mark.parametrize("role", ["manifest", "samples"])
@pytest.mark.parametrize("extreme", [min, max])
def test_statistics_agree_with_the_values(role, extreme):
    """Other Parquet tools would skip or miscount rows. Correct statistics are accepted."""
    forgery, files = with_statistics()
    assert problems(forgery.sealed()) == []
    wrong = extreme(row["reward"] for row in files[role].rows)

    def changed(content: bytes) -> bytes:
        at = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        old, new = (struct.pack("<d", value) for value in (wrong, -7.0))
        assert old in content[at:]
        return content[:at] + content[at:].replace(old, new)

    files[role].changed = changed
    found = problems(forgery.sealed())
    assert any("column reward has statistics that differ from its values" in f for f in found)


@pytest.mark.parametrize("role", ["manifest", "samples", "routes"])
def test_page_indexes_are_refused(role):
    forgery, files = with_statistics()
    files[role].options = {**files[role].options, "write_page_index": True}
    found = problems(forgery.sealed())
    assert any(files[role].key in f and "has a page index" in f for f in found)


@pytest.mark.parametrize(
    "extras",
    [
        '{"a":"' + "é" * 300_000 + '"}',  # Python would write 6 bytes for each é
        '{"a":[' + ",".join(["0"] * 400_000) + "]}",  # Python would add spaces
    ],
    ids=["not escaped", "without spaces"],
)
def test_the_limit_on_extras_is_on_the_bytes_that_are_stored(extras):
    store = MemoryStore()
    sealed_r3(store, make_samples())
    forgery = Forgery(store)
    forgery.samples[0].update(extras=extras)
    forged = forgery.sealed()
    assert problems(forged) == []
    id = forgery.samples[0]["id"]
    assert read_samples(forged, read_manifest(forged, 0), [id])[0].extras == json.loads(extras)


def test_long_values_are_cut_off_in_problems():
    store = MemoryStore()
    sealed_r3(store, make_samples())
    for change in ("group", "attempt"):
        forgery = Forgery(store)
        if change == "attempt":
            forgery.shards[0].body["attempt"] = "a" * 1_000
        else:
            forgery.samples[0][change] = "a" * 1_000
        found = problems(forgery.sealed())
        assert any("a" * 99 in problem for problem in found)
        assert not any("a" * 101 in problem for problem in found), found


def test_data_may_name_the_shards_in_any_order():
    store = MemoryStore()
    sealed_r3(store, make_samples())
    forgery = Forgery(store)
    data = forgery.manifest.body["data"]
    last = len(data) - 1
    data.reverse()
    for row in forgery.rows:
        row["samples"]["file"] = last - row["samples"]["file"]
        row["routes"][0]["file"] = last - row["routes"][0]["file"]
    assert problems(forgery.sealed()) == []
    forgery.rows.reverse()
    assert any("not in shard order" in problem for problem in problems(forgery.sealed()))


def test_rows_of_a_group_end_with_the_prompt():
    """A group with rows beyond the prompt is refused.

    The prompts of the group's two samples have the same length.
    """
    store = MemoryStore()
    sealed_r3(store, make_samples())
    forgery = Forgery(store)
    sample = next(s for s in forgery.samples if s["prompt_length"] < s["rows_total"])
    for place in sample["segments"]:
        forgery.segments[place["row"]]["owner"] = sample["group"]
    forged = forgery.sealed()
    assert any("from its group" in problem for problem in problems(forged))
    manifest = read_manifest(forged, 0)
    with pytest.raises(TraceError, match="from its group"):
        read_routes(forged, manifest, [sample["id"]])


def renamed(store, old: str, new: str) -> None:
    """Rename a part of the training set, with its file."""
    for info in list(store.list(keys.trainings(0))):
        if old in info.key:
            store.create(info.key.replace(old, new), store.read(info.key))
            store.delete(info.key)
    (key,) = [key for key in training_commits(store) if new in key]
    (file,) = json.loads(store.read(key))["files"]
    resign(store, key, files=[{**file, "key": file["key"].replace(old, new)}])


def other_name(store) -> None:
    renamed(store, "/001-00001.", "/001-00007.")


def first_with_cp_rank(store) -> None:
    renamed(store, "/001-00001.", "/001-00001-00000.")


def other_write_id(store) -> None:
    resign(store, training_commits(store)[1], attempt="01234567")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_name, "expected steps/000000/training/001-00001"),
        (first_with_cp_rank, "expected steps/000000/training/001-00001"),
        (other_write_id, "write id 01234567, but the set that names it has"),
    ],
)
def test_parts_have_one_name_and_one_write_id(change, says):
    store, _ = trained()
    change(store)
    store.delete(keys.training_set(0))
    name_all(store, NewTrainingSet(read_manifest(store, 0), R2))
    assert any(says in problem for problem in problems(store)), problems(store)


def test_a_set_names_its_parts_in_order():
    store, _ = trained()
    body = json.loads(store.read(keys.training_set(0)))
    resign(store, keys.training_set(0), commits=body["commits"][::-1])
    assert any("each once and ascending" in problem for problem in problems(store))


@pytest.mark.parametrize("name", ["step", "samples", "stage", "dp_rank", "cp_rank"])
def test_integers_of_a_part_have_no_fraction(name):
    store, _ = trained()
    key = training_commits(store)[0]
    resign(store, key, **{name: float(json.loads(store.read(key)).get(name, 0))})
    store.delete(keys.training_set(0))
    name_all(store, NewTrainingSet(read_manifest(store, 0), R2))
    assert any(key in problem for problem in problems(store))
    with pytest.raises(TraceError, match=r"\d\.0"):
        used_routes(store, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stage": 7}, "the ones in its key"),
        ({"dp_rank": 7}, "the ones in its key"),
        ({"cp_rank": 1}, "the ones in its key"),
        ({"attempt": "01234567"}, "write id 01234567, expected the ones in its key"),
        ({"step": 1}, "the commit of {'step': 1}"),
        ({"manifest_sha256": "x"}, "manifest_sha256 'x', expected 64"),
        ({"digests": 3}, r"\d+ valid rows, but its file contains 3 rows of the sample"),
        ({"digests": 4}, r"has \d+ rows, 3 of them valid; steps/000000/manifest.json has"),
    ],
)
def test_a_part_in_a_recorded_set_is_compared_with_its_key_and_the_manifest(changes, says):
    run, _ = trained()
    record = MemoryStore()
    write_recorded_set(run, record, 0)
    assert not problems(record)
    key = training_commits(record)[0]
    if "digests" in changes:
        digests = json.loads(record.read(key))["digests"]
        digests[0][changes["digests"]] = 3
        changes = {"digests": digests}
    resign(record, key, **changes)
    data = json.loads(record.read(keys.manifest(0)))["data"]
    for ref in data:
        if ref["commit"] == key:
            ref["commit_sha256"] = json.loads(record.read(key))["content_sha256"]
    resign(record, keys.manifest(0), data=data)
    assert any(key in problem and re.search(says, problem) for problem in problems(record)), (
        problems(record)
    )
