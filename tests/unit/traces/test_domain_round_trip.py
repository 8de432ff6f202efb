"""Readers accept everything that the public writers accept.

Refused input leaves no object in the store.
"""

import json
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.run.commit import new_write_id
from pipeline.store import Store
from pipeline.traces import (
    Compression,
    Geometry,
    Provenance,
    Routes,
    Sample,
    TraceError,
    VersionSpan,
    new_sample,
    read_manifest,
    read_routes,
    read_samples,
    seal,
    token_digest,
    write_shard,
    write_step,
)
from pipeline.traces.format import parquet
from pipeline.traces.write import rows as rows_module
from pipeline.upkeep.verify import verify
from tests.exhaustive import sample_or_all
from tests.memory_store import MemoryStore
from tests.samples import equal

MOST = 2**31 - 1

ODD = ["[red]", "%5F", "-x", " ", "0.1", "\u00e9\U0001f600", "\ufeff", "x" * 1_000]
SHUNNED = {*map(chr, [*range(0x2028, 0x202F), *range(0x2066, 0x206A)]), "/"}
LETTERS = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters=SHUNNED)
NAMES = st.one_of(
    st.sampled_from(ODD),
    st.text(LETTERS, min_size=1, max_size=30).filter(lambda name: name not in (".", "..")),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abé\n", max_size=3), inner)
    ),
    max_leaves=5,
)
VERSIONS = st.integers(0, 3) | st.just(MOST)


@st.composite
def geometries(draw) -> Geometry:
    E = draw(st.sampled_from([1, 2, 8, 64, 255, 256, 257, 40_000, 65_536]))
    K = draw(st.integers(1, min(E, 4)) | st.just(min(E, 64)))
    layers = draw(st.sets(st.integers(0, 5) | st.just(99_999), min_size=1, max_size=3))
    return Geometry(E, K, tuple(sorted(layers)))


@st.composite
def spans(draw, G: int) -> tuple[VersionSpan, ...]:
    ends = [0, *sorted(draw(st.lists(st.integers(0, G), max_size=2))), G]
    return tuple(VersionSpan(draw(VERSIONS), start, end) for start, end in pairwise(ends))


@st.composite
def samples_of(draw, step: int, prompt_id: str, k: int, geometry: Geometry | None) -> Sample:
    P, G = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    tokens = st.integers(0, 9) | st.just(2**32 - 1)
    experts = None
    if geometry is not None:
        rng = np.random.default_rng(draw(st.integers(0, 3)))
        sets = [
            [rng.choice(geometry.experts, geometry.topk, replace=False) for _ in geometry.layers]
            for _ in range(P + G - 1)
        ]
        shape = (P + G - 1, len(geometry.layers), geometry.topk)
        experts = np.array(sets, draw(st.sampled_from([np.int32, np.int64]))).reshape(shape)
        experts[draw(st.lists(st.booleans(), min_size=len(experts), max_size=len(experts)))] = -1
    reward = draw(st.none() | st.floats(-1e308, 1e308) | st.integers(-(2**60), 2**60))
    lists = {"min_size": G, "max_size": G}
    logprobs = st.floats(-(2.0**100), 0, width=32) | st.just(float("nan"))
    made = new_sample(
        step,
        prompt_id,
        k,
        draw(st.lists(tokens, min_size=P, max_size=P)),
        draw(st.lists(tokens, **lists)),
        experts,
        logprobs=draw(st.none() | st.lists(logprobs, **lists)),
        loss_mask=draw(st.none() | st.lists(st.booleans(), **lists)),
        reward=reward,
        finish_reason=draw(st.sampled_from(["stop", "length", "abort", ""]) | NAMES),
        versions=draw(spans(G)),
        seed=draw(st.sampled_from([-1, 0, 2**63 - 1])),
        extras=draw(st.dictionaries(st.text("a[]é", max_size=3), JSON, max_size=2)),
    )
    if reward is None and draw(st.booleans()):
        error = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
        made = replace(made, reward_error=draw(error))
    return made


@st.composite
def steps(draw) -> tuple[int, list[list[Sample]], Geometry | None]:
    """Draw a step's number, the samples of its shards, and their geometry."""
    step = draw(st.sampled_from([0, 3, 999_999]))
    geometry = draw(st.none() | geometries())
    prompts = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    shards: list[list[Sample]] = [[] for _ in range(draw(st.integers(1, 2)))]
    for number, prompt_id in enumerate(prompts):
        ks = draw(st.sampled_from([[0], [0, 1], [MOST, 7]]))
        group = [draw(samples_of(step, prompt_id, k, geometry)) for k in ks]
        if draw(st.booleans()):
            branch = draw(samples_of(step, prompt_id, ks[0], geometry))
            first = group[0].id
            group.insert(
                0, replace(branch, id=f"{first}.{draw(st.integers(1, 12))}", branch_of=first)
            )
        shards[number % len(shards)] += group
    return step, shards, geometry


def provenance_of(geometry: Geometry | None) -> Provenance | None:
    return geometry and Provenance("R3", MOST, "an engine é 1.0")


def check_taken(store: Store, step: int, wanted: dict[str, Sample], geometry: Geometry | None):
    """Check that readers return the samples, and that verify accepts them."""
    manifest = read_manifest(store, step)
    assert set(manifest.ids) == wanted.keys()
    ids = manifest.ids[::-1]
    found = read_samples(store, manifest, ids)
    assert [sample.id for sample in found] == ids
    for sample in found:
        check_same(sample, wanted[sample.id])
    rows = {row["id"]: row for row in manifest.rows.to_pylist()}
    for id, sample in wanted.items():
        assert rows[id]["token_digest"] == token_digest(sample.tokens_S)
        assert rows[id]["rows_total"] == len(sample.tokens_S) - 1
    if geometry is not None:
        routes = read_routes(store, manifest, ids)
        assert list(routes) == ids
        assert all(rows[id]["rows_valid"] == of.valid_T.sum() for id, of in routes.items())
        assert all(equal(routes[id], sorted_routes(sample)) for id, sample in wanted.items())
        last = read_routes(store, manifest, manifest.ids, [geometry.layers[-1]])
        for id, of_sample in last.items():
            assert np.array_equal(of_sample.sets_TLK[:, 0], routes[id].sets_TLK[:, -1])
    assert verify(store).problems == []


def sorted_routes(sample: Sample) -> Routes:
    """Return a sample's routes, with each set sorted in ascending order."""
    return replace(sample.routes, sets_TLK=np.sort(sample.routes.sets_TLK, axis=-1))


def check_same(found: Sample, expected: Sample) -> None:
    for name, value in vars(expected).items():
        if isinstance(value, np.ndarray):
            floats = value.dtype == np.float32
            assert np.array_equal(getattr(found, name), value, equal_nan=floats), name
        elif name == "extras":
            assert found.extras == json.loads(json.dumps(value))
        elif name != "routes":
            assert getattr(found, name) == value, name


EXAMPLES = settings(
    max_examples=sample_or_all(25, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@EXAMPLES
@given(steps(), st.sampled_from(get_args(Compression)), st.booleans(), st.sampled_from([2, 32_768]))
def test_written_steps_are_read_and_verified(made, compression, whole, row_group):
    """Files are fetched whole or in ranges, and have one or several row groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_SMALL", 1 << 20 if whole else 0)
        patch.setattr(rows_module, "ROUTES_ROWS", row_group)
        check_written(*made, compression)


def check_written(step, shards, geometry, compression) -> None:
    store = MemoryStore()
    provenance = provenance_of(geometry)
    samples = {sample.id: sample for shard in shards for sample in shard}
    if len(shards) == 1:
        write_step(store, step, shards[0], geometry, provenance)
    else:
        for number, shard in enumerate(shards):
            new, options = new_write_id(), {"compression": compression}
            write_shard(store, step, number, new, shard, geometry, provenance, **options)
        ids = [[sample.id for sample in shard] for shard in shards]
        seal(store, step, len(shards), ids.__getitem__, None)
    check_taken(store, step, samples, geometry)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([10**400, 2**31, 2**32, 2**63, 2**64, -1]),
    # Hypothesis may print a strategy, and Python cannot print an integer with so many digits.
    st.just(5_000).map(lambda digits: -(10**digits)),
    st.floats(),
    st.text(st.characters(), max_size=5),
    st.binary(max_size=3),
    st.complex_numbers(),
    st.lists(st.integers(-2, 2**33) | st.floats(width=16) | st.none() | st.text(), max_size=4),
    st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=2) | st.integers(), st.floats() | st.binary(), max_size=2),
    st.builds(np.array, st.lists(st.floats() | st.integers(-5, 5), max_size=4)),
    st.lists(st.builds(VersionSpan, st.integers(-1, 3), st.just(0), st.just(2)), max_size=2),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
    st.builds(object),
)
EXPERTS = [[[0, 1], [7, 3]], [[2, 4], [5, 6]], [[1, 0], [2, 3]]]
USUAL = {
    "step": 0,
    "prompt_id": "17",
    "k": 0,
    "prompt_tokens": [1, 2],
    "response_tokens": [3, 4],
    "experts": EXPERTS,
    "logprobs": [-1, -2],
    "loss_mask": [1, 0],
    "reward": 1.0,
    "finish_reason": "stop",
    "versions": 0,
    "seed": 5,
    "extras": {},
}
FIELDS = tuple(vars(new_sample(0, "a", 0, [1], [2])))


def anything_for(names, most: int):
    return st.dictionaries(st.sampled_from(sorted(names)), ANYTHING, max_size=most)


@settings(EXAMPLES, max_examples=sample_or_all(150, 4_000))
@given(anything_for(USUAL, 2), st.just({}) | anything_for(FIELDS, 2))
@example({"extras": {"\ud800": 1}}, {})
@example({"prompt_id": "\u2028"}, {})
def test_any_sample_is_accepted_or_refused_before_writing(arguments, fields):
    """The arguments are those of new_sample; the fields are changed afterwards."""
    store, geometry = MemoryStore(), Geometry(8, 2, (0, 3))
    arguments = USUAL | arguments
    try:
        made = replace(new_sample(**arguments), **fields)
        given_geometry = None if made.routes is None else geometry
        step = arguments["step"]
        write_step(store, step, [made], given_geometry, provenance_of(given_geometry))
    except TraceError:
        assert store.objects == {}
    else:
        check_taken(store, step, {made.id: made}, given_geometry)
