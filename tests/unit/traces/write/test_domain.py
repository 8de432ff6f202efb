"""Every public writer refuses values outside the format's domain before it writes."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from pipeline.traces import (
    Geometry,
    Provenance,
    Routes,
    ShardWriter,
    TraceError,
    VersionSpan,
    new_sample,
    open_shard,
    read_manifest,
    read_samples,
    seal,
    write_shard,
    write_step,
)
from tests.memory_store import MemoryStore

GEOMETRY = Geometry(experts=8, topk=2, layers=(0, 3))
R3 = Provenance("R3", 0, "sglang 0.5.15")
EXPERTS = np.array([[[0, 1], [7, 3]], [[2, 4], [5, 6]], [[1, 0], [2, 3]]])
"""The experts of a sample with 4 tokens."""
DEEP = functools.reduce(lambda inner, _: {"a": inner}, range(100_000), {})


def sample(**changes):
    """Return a valid sample with these changes, which may make it invalid."""
    made = new_sample(0, "17", 0, [1, 2], [3, 4], EXPERTS)
    return replace(made, **changes)


ARGUMENTS = {
    "step": [-1, 1_000_000, "3", True],
    "prompt_id": ["", "a/b", "..", "a\0b", "a\u202eb", "\ud800", "é" * 600, 17],
    "k": [-1, 1.0],
    "prompt_tokens": [[], [2**32], [-1], [1.5], [True], ["1"], [[1], [1, 2]]],
    "response_tokens": [np.ma.masked_array([3, 4], [0, 1])],
    "experts": [
        EXPERTS > 3,
        EXPERTS.astype(float),
        EXPERTS[0],
        [[[0, 1], [2]]],
        np.full_like(EXPERTS, -2),
        np.where(EXPERTS == 6, -1, EXPERTS),
        np.where(EXPERTS == 7, 250, EXPERTS).astype(np.int8),
    ],
    "logprobs": [[0.0], [1e300, 0.0], [None, 0.0], [1j, 0.0]],
    "loss_mask": [["", "no"], [0.5, 1.0], [0, 2], [True]],
    "reward": [float("nan"), float("inf"), 10**400, "1"],
    "finish_reason": [None, "st\nop"],
    "versions": [-1, 2**31, "3", [(3, 0, 2)], [], [VersionSpan(3, 0, 1)], [VersionSpan(3, 0, 2.0)]],
    "seed": [2**63, -2, None],
    "extras": [{"a": float("nan")}, {"a": object()}, {"a": "\ud800"}, {"a": 10**5000}, DEEP, [1]],
}
WORD = {
    "prompt_tokens": "token",
    "response_tokens": "token",
    "experts": "expert|row",
    "logprobs": "log-?probs",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_new_sample_names_values_outside_of_the_domain(name):
    arguments = {"step": 0, "prompt_id": "17", "k": 0, "experts": EXPERTS}
    arguments |= {"prompt_tokens": [1, 2], "response_tokens": [3, 4]}
    for value in ARGUMENTS[name]:
        with pytest.raises(TraceError, match=WORD.get(name, name.replace("versions", "version"))):
            new_sample(**arguments | {name: value})


def test_new_sample_accepts_output_of_engines_and_scripts():
    """Each value is stored as the one type that the format defines for it. Only rows of -1 are
    unknown."""

    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return np.array([3, 4], np.int64)

    experts = EXPERTS.copy()
    experts[1] = -1
    made = new_sample(
        *(3, "17", 1, (1, 2), Tensor(), experts.tolist()),
        logprobs=[-1, float("nan")],
        loss_mask=[1, 0],
        reward=np.float32(0.5),
        versions=np.int32(7),
    )
    assert made.response_tokens_G.dtype == np.uint32
    assert made.response_tokens_G.tolist() == [3, 4]
    assert made.loss_mask_G.tolist() == [True, False]
    assert made.logprobs_G.dtype == np.float32
    assert made.routes.valid_T.tolist() == [True, False, True]
    assert (made.reward, made.version_spans) == (0.5, (VersionSpan(7, 0, 2),))


ARRAY = np.array([1, 2], np.uint32)
VALID = np.ones(3, bool)
SAMPLES = [
    ({"id": "000000/17/00"}, "id 000000/17/00"),
    ({"id": "000000/18/0"}, "prompt"),
    ({"id": "000001/17/0", "group": "000001/17"}, "step"),
    ({"group": "000000/18"}, "group"),
    ({"branch_of": "000000/17/1"}, "branch_of"),
    ({"id": "000000/17/0.1"}, "branch_of"),
    ({"prompt_tokens_P": ARRAY.astype(np.int64)}, "int64"),
    ({"loss_mask_G": ARRAY}, "loss_mask_G"),
    ({"logprobs_G": np.zeros(1, np.float32)}, "logprobs_G"),
    ({"reward": 1.0, "reward_error": "no"}, "reward_error"),
    ({"version_spans": (VersionSpan(0, 0, 3),)}, "version spans"),
    ({"extras": None}, "extras"),
    ({"routes": None}, "no routes"),
    ({"routes": Routes(EXPERTS.tolist(), VALID)}, "sets_TLK"),
    ({"routes": Routes(EXPERTS * 0, VALID)}, "twice"),
    ({"routes": Routes(EXPERTS[:2], VALID[:2])}, "one row per token except the last"),
]


def write_one_by_one(store, samples):
    with ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, 1) as writer:
        for one in samples:
            writer.add(one)
        writer.commit()


WRITERS = [
    lambda store, samples: write_step(store, 0, samples, GEOMETRY, R3),
    lambda store, samples: write_shard(store, 0, 0, "0123abcd", samples, GEOMETRY, R3),
    write_one_by_one,
]


@pytest.mark.parametrize("changes_says", SAMPLES, ids=range(len(SAMPLES)))
def test_a_sample_outside_of_the_domain_leaves_the_store_untouched(changes_says):
    """The position of the sample does not matter, and a long value is cut off in the message."""
    changes, says = changes_says
    store, right = MemoryStore(), new_sample(0, "9", 0, [1, 2], [3, 4], EXPERTS)
    for write in WRITERS:
        with pytest.raises(TraceError, match=rf"sample .*{says}"):
            write(store, [right, sample(**changes)])
    assert store.objects == {}
    with pytest.raises(TraceError) as refused:
        write_step(store, 0, [sample(id="a" * 1_000)], GEOMETRY, R3)
    assert len(str(refused.value)) < 500


STEPS = [
    ({"samples": []}, "no samples"),
    ({"samples": [1]}, "expected a Sample"),
    ({"samples": 5}, "list of samples"),
    ({"samples": [sample(), sample()]}, "duplicated: 000000/17/0"),
    ({"step": 1}, "step 000001"),
    ({"geometry": None}, "only one of geometry and provenance"),
    ({"geometry": None, "provenance": None}, "routes in a shard without geometry"),
    ({"geometry": Geometry(8, 2, [0, 3])}, "tuple of layers"),
    ({"geometry": Geometry(65_537, 2, (0, 3))}, "experts"),
    ({"provenance": Provenance("R9", 0, "x")}, "R9"),
    ({"provenance": Provenance("R3", 2**31, "x")}, "policy version"),
]
SHARDS = [
    ({"shard": 100_000}, "shard: 100000"),
    ({"write_id": "../../etc"}, "write id"),
    ({"maker": {"a": float("inf")}}, "maker"),
    ({"maker": {"a": DEEP}}, "maker"),
    ({"policies": {0: "00"}}, "policy 0"),
    ({"policies": {np.int64(7): "00" * 32}}, "policy version 0"),
]


@pytest.mark.parametrize("changes_says", [*STEPS, *SHARDS], ids=range(len(STEPS + SHARDS)))
def test_a_step_or_shard_outside_of_the_domain_leaves_the_store_untouched(changes_says):
    changes, says = changes_says
    store = MemoryStore()
    arguments = {"step": 0, "samples": [sample()], "geometry": GEOMETRY, "provenance": R3}
    write = write_step
    if changes_says in SHARDS:
        write, arguments = write_shard, arguments | {"shard": 0, "write_id": "0123abcd"}
    with pytest.raises(TraceError, match=says):
        write(store, **arguments | changes)
    assert store.objects == {}


@pytest.mark.parametrize("step", [0, np.int64(0)])
def test_numbers_may_be_numpy_integers(step):
    """They are stored as plain integers."""
    store = MemoryStore()
    spans = [VersionSpan(np.int64(3), np.uint8(0), np.int32(1)), VersionSpan(np.int16(3), 1, 2)]
    made = new_sample(step, "17", 0, [1, 2], [3, 4], EXPERTS, versions=spans)
    made_by = Provenance("R3", np.int64(3), "sglang 0.5.15")
    policies = {np.int64(3): "00" * 32}
    write_shard(store, step, 0, "0123abcd", [made], GEOMETRY, made_by, policies=policies)
    seal(store, step, 1, lambda _: [made.id], policy_version=np.int64(3))
    found = read_manifest(store, 0)
    assert (found.provenance, found.policy_versions) == (Provenance("R3", 3, "sglang 0.5.15"), (3,))
    assert found.policies == {3: "00" * 32}
    (back,) = read_samples(store, found, found.ids)
    assert back.version_spans == (VersionSpan(3, 0, 1), VersionSpan(3, 1, 2))


def test_a_branch_needs_its_first_sequence_in_the_shard():
    store = MemoryStore()
    branch = sample(id="000000/17/0.1", branch_of="000000/17/0")
    for write in WRITERS:
        with pytest.raises(TraceError, match="first sequences of branches: 000000/17/0"):
            write(store, [branch])
    assert store.objects == {}
    assert write_step(store, 0, [branch, sample()], GEOMETRY, R3).samples == 2


def test_a_step_is_written_once_and_an_interrupted_one_can_be_sealed():
    """The error contains the call that completes the step."""
    store, made = MemoryStore(), sample()
    write_shard(store, 0, 0, "0123abcd", [made], GEOMETRY, R3)
    with pytest.raises(TraceError, match="already exists") as error:
        write_step(store, 0, [made], GEOMETRY, R3)
    call = str(error.value).partition(" complete the step with ")[2]
    sealed = eval(call, {"seal": seal, "open_shard": open_shard, "store": store})
    assert sealed.all().ids == [made.id]
    with pytest.raises(TraceError, match="already exists"):
        write_step(store, 0, [made], GEOMETRY, R3)
