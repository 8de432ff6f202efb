"""Readers accept everything that the public writers accept.

Refused input leaves no object in the store.
"""

import importlib.util
import json
import re
import string
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import retrace
from pipeline.cli import traces
from pipeline.cli.printable import printable
from pipeline.store import Store
from pipeline.traces import Compression, write_shard
from pipeline.upkeep.export import export, export_for
from pipeline.upkeep.verify import verify
from retrace.traces import Geometry, Provenance, Sample, TraceError, VersionSpan
from tests.exhaustive import sample_or_all
from tests.memory_store import MemoryStore
from tests.samples import equal

TORCH = importlib.util.find_spec("torch") is not None
MOST = 2**31 - 1

ODD = ["[red]", ":smile:", "a_b", "%5F", "~", "CON", "-x", " ", "0.1", "\u00e9\U0001f600", "\ufeff"]
SHUNNED = {*map(chr, [*range(0x2028, 0x202F), *range(0x2066, 0x206A)]), "/"}
LETTERS = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters=SHUNNED)
NAMES = st.one_of(
    st.sampled_from([*ODD, "x" * 1_000]),
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
    made = retrace.traces.new_sample(
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
    """Check that readers return the samples, and that verify, show and exports accept them."""
    manifest = retrace.traces.read_manifest(store, step)
    assert set(manifest.ids) == wanted.keys()
    for found in retrace.traces.read_samples(store, manifest, manifest.ids):
        check_same(found, wanted[found.id])
    if geometry is not None:
        routes = retrace.traces.read_routes(store, manifest, manifest.ids)
        assert all(equal(routes[id], sample.routes_sorted) for id, sample in sorted_of(wanted))
        last = geometry.layers[-1]
        slices = retrace.traces.read_routes(store, manifest, manifest.ids, [last])
        for id, of_sample in slices.items():
            assert np.array_equal(of_sample.sets_TLK[:, 0], routes[id].sets_TLK[:, -1])
    assert verify(store).problems == []
    with tempfile.TemporaryDirectory() as folder:
        check_exported(store, step, Path(folder), wanted, geometry)
    check_shown(store, manifest.ids)


class Sorted:
    """A sample's routes, with each set sorted in ascending order."""

    def __init__(self, sample: Sample) -> None:
        routes = sample.routes
        self.routes_sorted = replace(routes, sets_TLK=np.sort(routes.sets_TLK, axis=-1))


def sorted_of(wanted: dict[str, Sample]) -> list[tuple[str, Sorted]]:
    return [(id, Sorted(sample)) for id, sample in wanted.items()]


def check_same(found: Sample, expected: Sample) -> None:
    for name, value in vars(expected).items():
        if name == "routes":
            continue
        if isinstance(value, np.ndarray):
            floats = value.dtype == np.float32
            assert np.array_equal(getattr(found, name), value, equal_nan=floats), name
        else:
            assert getattr(found, name) == value, name


def check_exported(store, step, folder, wanted, geometry) -> None:
    if geometry is None:
        with pytest.raises(TraceError, match="no routes were recorded"):
            export(store, step, folder / "npy", "npy")
    else:
        assert export(store, step, folder / "npy", "npy") == len(wanted)
        index = json.loads((folder / "npy/samples.json").read_text())
        assert {entry["id"] for entry in index["samples"]} == wanted.keys()
        assert len(list((folder / "npy").iterdir())) == 1 + 2 * len(wanted)
        for entry in index["samples"]:
            sets = np.load(folder / "npy" / entry["file"])
            expected = Sorted(wanted[entry["id"]]).routes_sorted
            assert np.array_equal(sets[expected.valid_T], expected.sets_TLK[expected.valid_T])
        if TORCH:
            assert export(store, step, folder / "pt", "pt") == len(wanted)
    if not TORCH:
        return
    if all(len(sample.tokens_S) == 1 for sample in wanted.values()):
        with pytest.raises(TraceError, match="no file for slime"):
            export_for(store, step, folder / "slime", "slime")
    else:
        made = export_for(store, step, folder / "slime", "slime")
        assert made.samples + made.left_out == len(wanted)
    taken = any(len(sample.response_tokens_G) for sample in wanted.values())
    if geometry is not None and geometry.experts > 32_768 and taken:
        with pytest.raises(TraceError, match="do not fit into int16"):
            export_for(store, step, folder / "verl", "verl")
    elif not taken:
        with pytest.raises(TraceError, match="no file for verl"):
            export_for(store, step, folder / "verl", "verl")
    else:
        made = export_for(store, step, folder / "verl", "verl")
        assert made.samples + made.left_out == len(wanted)


def check_shown(store: Store, ids: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrace.opened, "open_store", lambda _: store)
        for id in ids[:2]:
            done = CliRunner().invoke(traces.app, ["show", "memory", id])
            assert done.exit_code == 0, done.output
            assert printable(id) in done.output
        done = CliRunner().invoke(traces.app, ["ls", "memory", "--step", str(int(ids[0][:6]))])
        assert done.exit_code == 0, done.output
        assert all(printable(id) in done.output for id in ids)


EXAMPLES = settings(
    max_examples=sample_or_all(25, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@EXAMPLES
@given(steps(), st.sampled_from(get_args(Compression)))
def test_written_steps_are_read_verified_exported_and_shown(made, compression):
    step, shards, geometry = made
    store = MemoryStore()
    provenance = provenance_of(geometry)
    samples = {sample.id: sample for shard in shards for sample in shard}
    if len(shards) == 1:
        retrace.traces.write_step(store, step, shards[0], geometry, provenance)
    else:
        for number, shard in enumerate(shards):
            new, options = retrace.traces.new_write_id(), {"compression": compression}
            write_shard(store, step, number, new, shard, geometry, provenance, **options)
        ids = [[sample.id for sample in shard] for shard in shards]
        retrace.traces.seal(store, step, len(shards), ids.__getitem__, None)
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
    st.text(string.printable, max_size=5),
    st.binary(max_size=3),
    st.complex_numbers(),
    st.lists(st.integers(-2, 2**33), max_size=4),
    st.lists(st.floats(width=16), max_size=4),
    st.lists(st.none() | st.booleans() | st.text(max_size=1), max_size=4),
    st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=2) | st.integers(), st.floats() | st.binary(), max_size=2),
    st.builds(np.array, st.lists(st.floats() | st.integers(-5, 5), max_size=4)),
    st.builds(VersionSpan, st.integers(-1, 3), st.integers(-1, 3), st.floats()),
    st.lists(st.builds(VersionSpan, st.integers(-1, 3), st.just(0), st.just(2)), max_size=2),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
    st.builds(object),
)
PARAMETERS = (
    *("step", "prompt_id", "k", "prompt_tokens", "response_tokens", "experts", "logprobs"),
    *("loss_mask", "reward", "finish_reason", "versions", "seed", "extras"),
)
FIELDS = tuple(vars(retrace.traces.new_sample(0, "a", 0, [1], [2])))


def usual() -> dict:
    experts = [[[0, 1], [7, 3]], [[2, 4], [5, 6]], [[1, 0], [2, 3]]]
    values = (0, "17", 0, [1, 2], [3, 4], experts, [-1, -2], [1, 0], 1.0, "stop", 0, 5, {})
    return dict(zip(PARAMETERS, values, strict=True))


def check_refused(store: MemoryStore, error: TraceError) -> None:
    assert not re.search("[\0-\x1f\x7f-\x9f]", str(error))
    assert store.objects == {}


@settings(EXAMPLES, max_examples=sample_or_all(100, 2_000))
@given(st.dictionaries(st.sampled_from(PARAMETERS), ANYTHING, min_size=1, max_size=2))
@example({"extras": {"\ud800": 1}})
@example({"prompt_id": "\u2028"})
def test_any_argument_is_accepted_or_refused_before_writing(changes):
    """The arguments are passed to new_sample, and the resulting sample to write_step."""
    store, geometry = MemoryStore(), Geometry(8, 2, (0, 3))
    arguments = usual() | changes
    try:
        made = retrace.traces.new_sample(**arguments)
        given_geometry = None if made.routes is None else geometry
        step = arguments["step"]
        retrace.traces.write_step(
            store, step, [made], given_geometry, provenance_of(given_geometry)
        )
    except TraceError as error:
        check_refused(store, error)
    else:
        check_taken(store, step, {made.id: made}, given_geometry)


@settings(EXAMPLES, max_examples=sample_or_all(100, 2_000))
@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, min_size=1, max_size=2))
def test_any_sample_is_accepted_or_refused_before_writing(changes):
    """The sample is passed to write_step, even if new_sample could not have created it."""
    store, geometry = MemoryStore(), Geometry(8, 2, (0, 3))
    made = replace(retrace.traces.new_sample(**usual()), **changes)
    try:
        given_geometry = None if made.routes is None else geometry
        retrace.traces.write_step(store, 0, [made], given_geometry, provenance_of(given_geometry))
    except TraceError as error:
        check_refused(store, error)
    else:
        check_taken(store, 0, {made.id: made}, given_geometry)
