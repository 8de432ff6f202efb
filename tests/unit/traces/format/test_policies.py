"""Weights digests of policy versions, in the shards' commits and in the manifest that combines
them."""

import json

import pytest

from pipeline.run import keys
from pipeline.run.commit import content_digest, new_write_id
from pipeline.store.file import FileStore
from pipeline.traces import TraceError, open_manifest, read_manifest, seal, write_shard
from pipeline.traces.format.policies import parse_policies, policies_json, united
from tests.samples import GEOMETRY, R3, by_shard, make_samples, sealed_r3

A, B = "a" * 64, "b" * 64


def test_policies_are_stored_by_ascending_version():
    assert policies_json({3: B, 2: A}) == [
        {"version": 2, "weights_sha256": A},
        {"version": 3, "weights_sha256": B},
    ]
    assert parse_policies(policies_json({3: B, 2: A}), "x") == {2: A, 3: B}
    assert policies_json(None) is parse_policies(None, "x") is None
    assert parse_policies([], "x") == {}


@pytest.mark.parametrize(
    "value",
    [
        *({}, "x", 1, [1], ["x"], [{}], [{"version": 0}], [{"weights_sha256": A}]),
        [{"version": -1, "weights_sha256": A}],
        [{"version": True, "weights_sha256": A}],
        [{"version": 2**31, "weights_sha256": A}],
        [{"version": "0", "weights_sha256": A}],
        [{"version": 0, "weights_sha256": None}],
        [{"version": 0, "weights_sha256": A[:-1]}],
        [{"version": 0, "weights_sha256": A.upper()}],
        [{"version": 1, "weights_sha256": A}, {"version": 0, "weights_sha256": A}],
        [{"version": 1, "weights_sha256": A}, {"version": 1, "weights_sha256": A}],
    ],
)
def test_malformed_lists_of_policies_are_refused(value):
    with pytest.raises(TraceError, match=r"^x: "):
        parse_policies(value, "x")


def test_the_policies_of_shards_are_combined():
    assert united([("a", {0: A}), ("b", {0: A, 1: B})]) == {0: A, 1: B}
    assert united([("a", {0: A}), ("b", None)]) is None
    with pytest.raises(TraceError, match=f"b: policy 0 has weights {B}, but a names {A}; remake"):
        united([("a", {0: A}), ("b", {0: B})])
    with pytest.raises(TraceError, match="c: policy 0"):  # even if other shards do not name weights
        united([("a", {0: A}), ("b", None), ("c", {0: B})])


def shards(store: FileStore, *policies: dict[int, str] | None) -> list[str]:
    samples = make_samples()
    for shard, named in enumerate(policies):
        mine = [s for s in samples if int(s.prompt_id) % len(policies) == shard]
        id = new_write_id()
        write_shard(store, 0, shard, id, mine, GEOMETRY, R3, policies=named)
    return [sample.id for sample in samples]


def test_the_seal_names_the_weights_of_all_shards(store):
    ids = shards(store, {0: A}, {0: A})
    seal(store, 0, 2, by_shard(ids, 2), 0)
    assert open_manifest(store, 0).head.policies == {0: A}


def test_shards_with_different_weights_are_not_sealed(store):
    ids = shards(store, {0: A}, {0: B})
    with pytest.raises(TraceError, match=f"{keys.rollout(0, 1)}: policy 0 has weights {B}"):
        seal(store, 0, 2, by_shard(ids, 2), 0)
    assert store.size(keys.manifest(0)) is None


def test_a_manifest_records_the_arguments_of_its_seal(store):
    ids = shards(store, None)
    seal(store, 0, 1, lambda _: ids, 0, training=True)
    found = read_manifest(store, 0)
    assert (found.policies, found.training, found.rejected) == (None, True, ())
    assert (found.format, found.sha256) == ("1.1", json_of(store)["content_sha256"])


def test_by_default_the_trainer_does_not_record_a_step(store):
    assert sealed_r3(store, make_samples()).training is False


def json_of(store: FileStore) -> dict:
    return json.loads(store.read(keys.manifest(0)))


def resigned(store: FileStore, path, **changes: object) -> None:
    body = {**json_of(store), **changes}
    body = {key: value for key, value in body.items() if value is not ...}
    del body["content_sha256"]
    body["content_sha256"] = content_digest(body)
    (path / keys.manifest(0)).write_text(json.dumps(body))


@pytest.mark.parametrize("name", ["training", "rejected"])
@pytest.mark.parametrize("value", [..., None, 1, "true", {}, [1], [{"group": "g"}]])
def test_a_current_manifest_needs_these_keys_in_the_correct_form(store, tmp_path, name, value):
    sealed_r3(store, make_samples())
    resigned(store, tmp_path, **{name: value})
    with pytest.raises(TraceError, match=f"manifest.json in .*: .*{name}"):
        read_manifest(store, 0)


def test_a_current_commit_has_the_key_policies(store, tmp_path):
    sealed_r3(store, make_samples())
    resigned(store, tmp_path, policies=None)
    assert read_manifest(store, 0).policies is None
    resigned(store, tmp_path, policies=...)
    with pytest.raises(TraceError, match="no policies in the commit, expected a list, or null"):
        read_manifest(store, 0)


def test_in_a_manifest_of_format_1_0_these_keys_mean_nothing(store, tmp_path):
    sealed_r3(store, make_samples())
    resigned(store, tmp_path, format="1.0", training=True, rejected=..., policies="x")
    found = read_manifest(store, 0)
    assert (found.format, found.training, found.rejected) == ("1.0", False, ())
    assert found.policies is None


def test_samples_without_reward_are_marked_as_not_trained_on(store):
    samples = make_samples()
    masked = samples[1].id
    samples = [
        s if s.id != masked else type(s)(**{**vars(s), "reward": None, "reward_error": "x"})
        for s in samples
    ]
    rows = sealed_r3(store, samples).rows.select(["id", "not_trained"]).to_pylist()
    assert {row["id"]: row["not_trained"] for row in rows if row["not_trained"]} == {
        masked: "no reward"
    }
