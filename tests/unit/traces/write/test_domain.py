"""Every public writer refuses values outside the format's domain before it writes."""

import functools
from dataclasses import replace

import numpy as np
import pytest

import retrace
from pipeline.traces import (
    NewTrainingSet,
    read_manifest,
    read_samples,
    write_shard,
    write_training_routes,
)
from pipeline.traces.format.domain import check_sample
from pipeline.traces.write.writer import write_samples
from pipeline.upkeep.verify import verify
from retrace.traces import Geometry, Provenance, Routes, Sample, TraceError, VersionSpan
from tests.memory_store import MemoryStore

GEOMETRY = Geometry(experts=8, topk=2, layers=(0, 3))
R3 = Provenance("R3", 0, "sglang 0.5.15")
EXPERTS = np.array([[[0, 1], [7, 3]], [[2, 4], [5, 6]], [[1, 0], [2, 3]]])
"""The experts of a sample with 4 tokens."""
UNKNOWN = np.full_like(EXPERTS, -1)
DEEP = functools.reduce(lambda inner, _: {"a": inner}, range(100_000), {})


def sample(**changes):
    """Return a valid sample with these changes, which may make it invalid."""
    made = retrace.traces.new_sample(0, "17", 0, [1, 2], [3, 4], EXPERTS)
    return replace(made, **changes)


class OnGpu:
    """An object that numpy cannot convert, like a torch tensor on a GPU."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


ARGUMENTS = [
    ({"step": -1}, "step: -1, expected 0..999999"),
    ({"step": 1_000_000}, "step: 1000000, expected 0..999999"),
    ({"step": "3"}, "step: 3 of type str, expected an integer"),
    ({"step": True}, "step: True of type bool, expected an integer"),
    ({"prompt_id": ""}, "expected a name without '/'"),
    ({"prompt_id": "a/b"}, "expected a name without '/'"),
    ({"prompt_id": "."}, "expected a name without '/'"),
    ({"prompt_id": ".."}, "expected a name without '/'"),
    ({"prompt_id": "a\0b"}, "contains U+0000"),
    ({"prompt_id": "a\x1b[31m"}, "contains U+001B"),
    ({"prompt_id": "a\x9bm"}, "contains U+009B"),
    ({"prompt_id": "a\u202eb"}, "contains U+202E, expected text without control characters, line"),
    ({"prompt_id": "a\u2066b"}, "characters that embed, isolate or override a writing direction"),
    ({"prompt_id": "\ud800"}, "contains U+D800"),
    ({"prompt_id": "é" * 600}, "1200 bytes of UTF-8, expected at most 1024"),
    ({"prompt_id": "a" * 1_020}, "expected at most 1024"),
    ({"prompt_id": 17}, "of type int, expected text"),
    ({"k": -1}, "k: -1, expected 0..2147483647"),
    ({"k": 1.0}, "of type float, expected an integer"),
    ({"prompt_tokens": []}, "no prompt token"),
    ({"prompt_tokens": [2**32]}, "expected 0..4294967295"),
    ({"prompt_tokens": [-1]}, "expected 0..4294967295"),
    ({"prompt_tokens": [2**70]}, "tokens of type object"),
    ({"prompt_tokens": [1.5]}, "tokens of type float64"),
    ({"prompt_tokens": [True]}, "tokens of type bool"),
    ({"prompt_tokens": ["1"]}, "tokens of type <U1"),
    ({"prompt_tokens": [[1], [1, 2]]}, "cannot become an array"),
    ({"prompt_tokens": OnGpu()}, "cannot become an array (can't convert cuda:0"),
    ({"response_tokens": np.ma.masked_array([3, 4], [0, 1])}, "is a masked array"),
    ({"experts": EXPERTS > 3}, "experts of type bool"),
    ({"experts": EXPERTS.astype(float)}, "experts of type float64"),
    ({"experts": EXPERTS.astype(object)}, "experts of type object"),
    ({"experts": EXPERTS[0]}, "expected integers [S - 1, L, K]"),
    ({"experts": [[[0, 1], [2]]]}, "cannot become an array"),
    ({"experts": UNKNOWN - 1}, "sample 000000/17/0: row 0 has the expert id -2, expected ids from"),
    ({"experts": np.where(EXPERTS == 6, -1, EXPERTS)}, "row 1 has the expert id -1, expected ids"),
    (
        {"experts": np.where(EXPERTS == 7, 250, EXPERTS).astype(np.int8)},
        "row 0 has the expert id -6",
    ),
    ({"experts": EXPERTS - 2**32}, "row 0 has the expert id -4294967"),
    ({"logprobs": [0.0]}, "1 values of logprobs_G, expected 2, one per response token"),
    ({"logprobs": [1e300, 0.0]}, "infinite log-probs"),
    ({"logprobs": [-np.inf, 0.0]}, "infinite log-probs"),
    ({"logprobs": [None, 0.0]}, "logprobs of type object"),
    ({"logprobs": [1j, 0.0]}, "logprobs of type complex128"),
    ({"loss_mask": ["", "no"]}, "loss_mask of type <U2"),
    ({"loss_mask": [0.5, 1.0]}, "loss_mask of type float64"),
    ({"loss_mask": [0, 2]}, "expected True and False, or 1 and 0"),
    ({"loss_mask": [True]}, "1 values of loss_mask_G, expected 2, one per response token"),
    ({"reward": float("nan")}, "reward nan, expected a finite number"),
    ({"reward": float("inf")}, "reward inf, expected a finite number"),
    ({"reward": 10**400}, "expected a finite number"),
    ({"reward": 10**5000}, "expected a finite number"),
    ({"reward": "1"}, "reward 1 of type str, expected a finite number"),
    ({"finish_reason": None}, "finish_reason: None of type NoneType, expected text"),
    ({"finish_reason": "st\nop"}, "contains U+000A"),
    ({"versions": -1}, "versions: -1, expected 0..2147483647"),
    ({"versions": 2**31}, "versions: 2147483648, expected 0..2147483647"),
    ({"versions": "3"}, "versions: 3 of type str"),
    ({"versions": None}, "versions: None of type NoneType"),
    ({"versions": [(3, 0, 2)]}, "expected a tuple of VersionSpan"),
    ({"versions": []}, "do not cover its 2 response tokens"),
    ({"versions": [VersionSpan(3, 0, 1)]}, "do not cover its 2 response tokens"),
    ({"versions": [VersionSpan(3, 0, 1.0), VersionSpan(3, 1, 2)]}, "of type float"),
    (
        {"versions": [VersionSpan(3, 0, 2), VersionSpan(3, 2, 1), VersionSpan(3, 1, 2)]},
        "do not cover its 2 response tokens",
    ),
    ({"seed": 2**63}, "seed: 9223372036854775808, expected -1..9223372036854775807"),
    ({"seed": -2}, "seed: -2, expected -1.."),
    ({"seed": None}, "seed: None of type NoneType"),
    ({"extras": {"a": float("nan")}}, "extras: key a: nan, expected finite numbers"),
    ({"extras": {"a": object()}}, "of type object is not JSON"),
    ({"extras": {"a": "\ud800"}}, "extras: key a: a surrogate"),
    ({"extras": {"\ud800": 1}}, "extras: a surrogate"),
    ({"extras": {1: 2}}, "extras: key 1, expected text keys"),
    *(
        (
            {"extras": {"a": {"b": [number]}}},
            "extras: key b: an integer of more than 100 characters",
        )
        for number in (10**5000, 10**100, -(10**99))
    ),
    ({"extras": DEEP}, "nested too deep"),
    ({"extras": {"a": "é" * (1 << 19)}}, "bytes of UTF-8, expected at most 1048576"),
    ({"extras": {"a": "x" * (1 << 20)}}, "bytes of UTF-8, expected at most 1048576"),
    ({"extras": [1]}, "extras of type list, expected a JSON object"),
]


@pytest.mark.parametrize(("changes", "says"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_new_sample_names_values_outside_of_the_domain(changes, says):
    arguments = {
        "step": 0,
        "prompt_id": "17",
        "k": 0,
        "prompt_tokens": [1, 2],
        "response_tokens": [3, 4],
        "experts": EXPERTS,
    }
    with pytest.raises(TraceError) as refused:
        retrace.traces.new_sample(**arguments | changes)
    assert says in str(refused.value)
    assert str(refused.value).isprintable()


def test_long_values_are_cut_off_in_messages():
    for changes in ({"id": "a" * 1_000}, {"group": "a" * 1_000}, {"branch_of": "a" * 1_000}):
        with pytest.raises(TraceError) as refused:
            retrace.traces.write_step(MemoryStore(), 0, [sample(**changes)], GEOMETRY, R3)
        assert "a" * 100 + "..." in str(refused.value)
        assert "a" * 101 not in str(refused.value)


@pytest.mark.parametrize("number", [10**100 - 1, 10**99, 1 - 10**99])
def test_an_integer_of_100_characters_is_written_and_read(number):
    made = retrace.traces.new_sample(0, "17", 0, [1, 2], [3, 4], EXPERTS, extras={"a": number})
    store = MemoryStore()
    retrace.traces.write_step(store, 0, [made], GEOMETRY, R3)
    assert read_samples(store, read_manifest(store, 0), [made.id])[0].extras == {"a": number}
    assert verify(store).problems == []


def test_new_sample_accepts_output_of_engines_and_scripts():
    """Each value is stored as the one type that the format defines for it."""

    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return np.array([3, 4], np.int64)

    made = retrace.traces.new_sample(
        3,
        "17",
        1,
        (1, 2),
        Tensor(),
        EXPERTS.tolist(),
        logprobs=[-1, float("nan")],
        loss_mask=[1, 0],
        reward=np.float32(0.5),
        versions=np.int32(7),
    )
    check_sample(made)
    assert made.response_tokens_G.dtype == np.uint32
    assert made.response_tokens_G.tolist() == [3, 4]
    assert made.loss_mask_G.tolist() == [True, False]
    assert made.logprobs_G.dtype == np.float32
    assert (made.reward, made.version_spans) == (0.5, (VersionSpan(7, 0, 2),))


def test_only_rows_of_minus_one_are_unknown():
    experts = np.concatenate([EXPERTS[:1], UNKNOWN[:1], EXPERTS[2:]])
    made = retrace.traces.new_sample(0, "17", 0, [1, 2], [3, 4], experts)
    assert made.routes.valid_T.tolist() == [True, False, True]


ARRAY = np.array([1, 2], np.uint32)
SAMPLES = [
    ({"reward": float("nan")}, "reward nan"),
    ({"id": None}, "id: None of type NoneType"),
    ({"id": "17"}, "id 17, expected the form 'STEP/PROMPT_ID/K'"),
    ({"id": "000000/17/00"}, "id 000000/17/00, expected the form"),
    ({"id": "000000/18/0"}, "its id contains prompt 18, but its prompt_id is 17"),
    ({"id": "000001/17/0", "group": "000001/17"}, "its id contains step 000001, expected step"),
    ({"group": "000000/18"}, "group 000000/18, expected '000000/17'"),
    ({"prompt_id": "18"}, "its id contains prompt 17, but its prompt_id is 18"),
    ({"branch_of": "000000/17/1"}, "branch_of 000000/17/1, expected null"),
    ({"id": "000000/17/0.1"}, "branch_of null, expected 000000/17/0"),
    ({"prompt_tokens_P": [1, 2]}, "prompt_tokens_P of type list, expected an array"),
    ({"prompt_tokens_P": ARRAY.astype(float)}, "of type float64 and shape (2,), expected uint32"),
    ({"prompt_tokens_P": ARRAY.astype(np.int64)}, "of type int64 and shape (2,), expected uint32"),
    ({"response_tokens_G": ARRAY[None]}, "shape (1, 2), expected uint32 in one dimension"),
    ({"loss_mask_G": ARRAY}, "loss_mask_G of type uint32"),
    ({"logprobs_G": np.zeros(2)}, "logprobs_G of type float64"),
    ({"reward_error": "\ud800"}, "reward_error: a surrogate"),
    ({"reward_error": 1}, "reward_error: 1 of type int, expected text"),
    (
        {"reward": 1.0, "reward_error": "no"},
        "a reward and a reward_error, expected at most one of the two",
    ),
    ({"extras": None}, "extras: None of type NoneType, expected a JSON object"),
    ({"version_spans": [VersionSpan(0, 0, 2)]}, "expected a tuple of VersionSpan"),
    ({"routes": None}, "no routes"),
    ({"routes": EXPERTS}, "routes of type ndarray, expected Routes"),
    ({"routes": Routes(EXPERTS.tolist(), np.ones(3, bool))}, "sets_TLK of type list"),
    ({"routes": Routes(EXPERTS, [True] * 3)}, "valid_T of type list"),
    ({"routes": Routes(EXPERTS, np.ones(3))}, "validity is float64, expected bool"),
    ({"routes": Routes(EXPERTS > 1, np.ones(3, bool))}, "expert ids: bool"),
    ({"routes": Routes(EXPERTS.astype(float), np.ones(3, bool))}, "expert ids: float64"),
    ({"routes": Routes(EXPERTS.astype(object), np.ones(3, bool))}, "expert ids: object"),
    ({"routes": Routes(EXPERTS + 1, np.ones(3, bool))}, "expert id 8: expected 0..7"),
    ({"routes": Routes(EXPERTS * 0, np.ones(3, bool))}, "contains an expert twice"),
    ({"routes": Routes(EXPERTS[:2], np.ones(2, bool))}, "one row per token except the last"),
    ({"routes": Routes(EXPERTS[:, :1], np.ones(3, bool))}, "expected (3, 2, 2)"),
]


@pytest.mark.parametrize("step", [0, np.int64(0)])
def test_policy_versions_may_be_numpy_integers(step):
    """They are stored as plain integers."""
    store = MemoryStore()
    spans = [VersionSpan(np.int64(3), np.uint8(0), np.int32(1)), VersionSpan(np.int16(3), 1, 2)]
    made = retrace.traces.new_sample(step, "17", 0, [1, 2], [3, 4], EXPERTS, versions=spans)
    made_by = Provenance("R3", np.int64(3), "sglang 0.5.15")
    write_shard(store, step, 0, "0123abcd", [made], GEOMETRY, made_by)
    retrace.traces.seal(store, step, 1, lambda _: [made.id], policy_version=np.int64(3))
    found = read_manifest(store, 0)
    assert (found.provenance, found.policy_versions) == (Provenance("R3", 3, "sglang 0.5.15"), (3,))
    (back,) = retrace.traces.read_samples(store, found, found.ids)
    assert back.version_spans == (VersionSpan(3, 0, 1), VersionSpan(3, 1, 2))


def write_one_by_one(store, samples):
    with retrace.traces.ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, 1) as writer:
        for one in samples:
            writer.add(one)
        writer.commit()


WRITERS = {
    "step": lambda store, samples: retrace.traces.write_step(store, 0, samples, GEOMETRY, R3),
    "shard": lambda store, all: write_shard(store, 0, 0, "0123abcd", all, GEOMETRY, R3),
    "writer": write_one_by_one,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize(("changes", "says"), SAMPLES, ids=range(len(SAMPLES)))
def test_a_sample_outside_of_the_domain_leaves_the_store_untouched(write, changes, says):
    """The position of the sample does not matter: all samples are checked before anything is
    written."""
    store = MemoryStore()
    wrong = sample(**changes)
    right = retrace.traces.new_sample(0, "9", 0, [1, 2], [3, 4], EXPERTS)
    with pytest.raises(TraceError) as refused:
        write(store, [right, wrong])
    assert says in str(refused.value)
    assert "sample " in str(refused.value)
    assert str(refused.value).isprintable()
    assert store.objects == {}


STEPS = [
    ({"samples": []}, "no samples, expected at least one"),
    ({"samples": [1]}, "1 of type int, expected a Sample"),
    ({"samples": [sample(), sample()]}, "duplicated: 000000/17/0"),
    ({"step": -1}, "step: -1"),
    ({"step": 1_000_000}, "step: 1000000"),
    ({"step": 1}, "its id contains step 000000, expected step 000001"),
    ({"provenance": None}, "only one of geometry and provenance"),
    ({"geometry": None}, "only one of geometry and provenance"),
    ({"geometry": None, "provenance": None}, "routes in a shard without geometry"),
    ({"geometry": Geometry(8, 2, ())}, "at least one layer"),
    ({"geometry": Geometry(8, 2, (3, 0))}, "layers ascending"),
    ({"geometry": Geometry(8, 2, (0, 0))}, "layers ascending"),
    ({"geometry": Geometry(8, 2, (0, 100_000))}, "layers ascending up to 99999"),
    ({"geometry": Geometry(8, 2, [0, 3])}, "expected a Geometry with a tuple of layers"),
    ({"geometry": Geometry(8, 2, (0, True))}, "layers ascending"),
    ({"geometry": Geometry(65_537, 2, (0, 3))}, "experts <= 65536"),
    ({"geometry": Geometry(100, 65, (0, 3))}, "topk <= 64"),
    ({"geometry": Geometry(1, 2, (0, 3))}, "topk <= experts"),
    ({"geometry": Geometry("8", 2, (0, 3))}, "0 < topk"),
    ({"geometry": (8, 2, (0, 3))}, "expected a Geometry"),
    ({"provenance": Provenance("R9", 0, "x")}, "kind of trace R9"),
    ({"provenance": Provenance(["R3"], 0, "x")}, "kind of trace ['R3']"),
    ({"provenance": Provenance("R3", -1, "x")}, "policy version of the provenance: -1"),
    ({"provenance": Provenance("R3", 2**31, "x")}, "policy version of the provenance: 2147483648"),
    ({"provenance": Provenance("R3", 0, None)}, "engine of the provenance: None"),
    ({"provenance": Provenance("R3", 0, "a\nb")}, "contains U+000A"),
    ({"provenance": "R3"}, "expected a Provenance"),
    ({"samples": None}, "samples None, expected a list of samples"),
    ({"samples": 5}, "samples 5, expected a list of samples"),
]


@pytest.mark.parametrize(("changes", "says"), STEPS, ids=range(len(STEPS)))
def test_a_step_outside_of_the_domain_leaves_the_store_untouched(changes, says):
    store = MemoryStore()
    arguments = {"step": 0, "samples": [sample()], "geometry": GEOMETRY, "provenance": R3}
    with pytest.raises(TraceError) as refused:
        retrace.traces.write_step(store, **arguments | changes)
    assert says in str(refused.value)
    assert store.objects == {}


SHARDS = [
    ({"shard": -1}, "shard: -1, expected 0..99999"),
    ({"shard": 100_000}, "shard: 100000, expected 0..99999"),
    ({"write_id": "../../etc"}, "expected 8 lower-case hexadecimal digits"),
    ({"write_id": None}, "expected 8 lower-case hexadecimal digits"),
    ({"maker": {"a": float("inf")}}, "maker: key a: inf"),
    ({"maker": {"a": DEEP}}, "nested too deep"),
    ({"maker": 3}, "maker of type int"),
    ({"policies": {"0": "00" * 32}}, "version of a policy: 0 of type str"),
    ({"policies": {0: "00"}}, "policy 0 has weights '00'"),
    ({"policies": [0]}, "policies of type list"),
    ({"policies": {np.int64(0): "00"}}, "policy 0 has weights '00'"),
    ({"policies": {np.int64(7): "00" * 32}}, "found digests for versions [7], pass one for each"),
]


@pytest.mark.parametrize(("changes", "says"), SHARDS, ids=range(len(SHARDS)))
def test_a_shard_outside_of_the_domain_leaves_the_store_untouched(changes, says):
    store = MemoryStore()
    arguments = {"step": 0, "shard": 0, "write_id": "0123abcd", "samples": [sample()]}
    with pytest.raises(TraceError) as refused:
        write_shard(store, **arguments | {"geometry": GEOMETRY, "provenance": R3} | changes)
    assert says in str(refused.value)
    assert store.objects == {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"group_size": 0}, "group_size: 0"), ({"memory_bytes": -1}, "memory_bytes: -1")],
)
def test_the_sizes_of_a_writer_are_checked(changes, says):
    arguments = {"group_size": 1, "memory_bytes": 0} | changes
    with pytest.raises(TraceError, match=says):
        retrace.traces.ShardWriter(MemoryStore(), 0, 0, "0123abcd", GEOMETRY, R3, **arguments)


def test_a_sample_after_finish_and_a_maker_other_than_json_are_refused():
    store = MemoryStore()
    with retrace.traces.ShardWriter(store, 0, 0, "0123abcd", GEOMETRY, R3, 1) as writer:
        writer.add(sample())
        with pytest.raises(TraceError, match=r"maker: .* is not JSON"):
            writer.commit({"worker": object()})
        assert store.objects == {}
        writer.finish()
        with pytest.raises(TraceError, match="000000/18/0 added after finish"):
            writer.add(retrace.traces.new_sample(0, "18", 0, [1, 2], [3, 4], EXPERTS))
        assert writer.commit().ours


def test_versions_of_policies_may_be_numpy_integers():
    store = MemoryStore()
    policies = {np.int64(0): "00" * 32}
    found = retrace.traces.write_step(store, 0, [sample()], GEOMETRY, R3, policies=policies)
    assert found.head.policies == {0: "00" * 32}


def test_a_branch_needs_its_first_sequence_in_the_shard():
    store = MemoryStore()
    branch = sample(id="000000/17/0.1", branch_of="000000/17/0")
    for write in WRITERS.values():
        with pytest.raises(TraceError, match="missing first sequences of branches: 000000/17/0"):
            write(store, [branch])
    assert store.objects == {}
    assert retrace.traces.write_step(store, 0, [branch, sample()], GEOMETRY, R3).samples == 2


TRAINING = [
    ({"stage": 1_000}, {}, "stage: 1000, expected 0..999"),
    ({"dp_rank": -1}, {}, "dp_rank: -1"),
    ({"cp_rank": -1}, {}, "cp_rank: -1"),
    ({}, {"id": "x"}, "expected 8 lower-case hexadecimal digits"),
    ({"routes": {"": sample().routes}}, {}, "unknown"),
    ({"routes": {"000000/17/0": None}}, {}, "no routes"),
    ({"routes": {"000000/17/0": Routes(EXPERTS + 1, np.ones(3, bool))}}, {}, "expert id 8"),
    ({"routes": {"000000/17/0": Routes(EXPERTS, np.ones(4, bool))}}, {}, "validity bits"),
    ({"geometry": Geometry(8, 2, ())}, {}, "at least one layer"),
    ({}, {"provenance": Provenance("R2", -1, "x")}, "policy version of the provenance: -1"),
    ({}, {"provenance": Provenance("R3", 0, "x")}, "routes of kind R3, expected R2"),
]


@pytest.mark.parametrize(("changes", "of_set", "says"), TRAINING, ids=range(len(TRAINING)))
def test_a_trainers_routes_outside_of_the_domain_leave_the_store_untouched(changes, of_set, says):
    store = MemoryStore()
    retrace.traces.write_step(store, 0, [replace(sample(), routes=None)], None, None)
    manifest = replace(read_manifest(store, 0), training=True)
    arguments = {
        "stage": 0,
        "dp_rank": 0,
        "routes": {"000000/17/0": sample().routes},
        "geometry": GEOMETRY,
    }
    common = {"provenance": Provenance("R2", 0, "megatron-core 0.16.1")}
    before = dict(store.objects)
    with pytest.raises(TraceError) as refused:
        write_training_routes(
            store, NewTrainingSet(manifest, **common | of_set), **arguments | changes
        )
    assert says in str(refused.value)
    assert store.objects == before


def test_validation_samples_have_separate_ids():
    store = MemoryStore()
    validated = sample(id="val-000000/17/0", group="val-000000/17", routes=None)
    write_samples(store, "validations/000000/00000.0123abcd.samples.parquet", [validated])
    with pytest.raises(TraceError, match="its id contains step val-000000"):
        retrace.traces.write_step(MemoryStore(), 0, [validated], None, None)


def test_a_step_of_an_interrupted_writer_can_be_sealed():
    """The error contains the call that completes the step."""
    store = MemoryStore()
    made: Sample = sample()
    write_shard(store, 0, 0, "0123abcd", [made], GEOMETRY, R3)
    with pytest.raises(TraceError, match="already exists, but a step is written once") as error:
        retrace.traces.write_step(store, 0, [made], GEOMETRY, R3)
    call = str(error.value).partition(" complete the step with ")[2]
    sealed = eval(
        call, {"seal": retrace.traces.seal, "open_shard": retrace.traces.open_shard, "store": store}
    )
    assert sealed.all().ids == [made.id]
    with pytest.raises(TraceError, match="it already exists, and a step is written once"):
        retrace.traces.write_step(store, 0, [made], GEOMETRY, R3)
