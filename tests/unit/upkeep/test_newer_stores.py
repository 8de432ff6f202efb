"""Damaged stores with format 1.1 features (tests/hostile/newer.py). All digests are remade."""

from collections.abc import Callable
from functools import cache

import pyarrow as pa
import pytest

from pipeline.store import StoreError
from pipeline.traces import TraceError, read_routes, used_routes, write_recorded_set
from pipeline.upkeep.verify import verify
from tests.hostile.parquet import rewritten, table_of, with_metadata, with_values
from tests.hostile.remake import remade
from tests.hostile.worlds import world
from tests.memory_store import MemoryStore

Objects = dict[str, bytes]


@cache
def stored(kind: str) -> Objects:
    """Return the objects of a run, or of the recorded set made from its only step.

    The training set of the step has two pipeline stages, and two context-parallel ranks that divide
    the rows of each sample.
    """
    run = dict(world("cut"))
    if kind == "run":
        return run
    target = MemoryStore()
    write_recorded_set(MemoryStore(run), target, 0)
    return target.objects


def part_of(objects: Objects, stage: int, cp_rank: int) -> str:
    """Return the key of a part's routes file."""
    name = f"/{stage:03d}-00000-{cp_rank:05d}." if cp_rank else f"/{stage:03d}-00000."
    [key] = [key for key in objects if name in key and key.endswith(".parquet")]
    return key


def changed(
    objects: Objects, changes: dict[str, Callable[[pa.Table], pa.Table | None]]
) -> MemoryStore:
    """Return a store with changed files, and with all digests of files and objects remade."""
    files = {}
    for key, change in changes.items():
        new = rewritten(objects[key], change)
        assert new is not None, key
        files[key] = new
    return MemoryStore({**objects, **remade(objects, files)})


def column(name: str, values_of: Callable[[list], list]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        kind = table.schema.field(name).type
        return with_values(table, name, values_of(table[name].to_pylist()), kind)

    return change


def problems(store: MemoryStore) -> list[str]:
    return [str(problem) for problem in verify(store).problems]


def read(store: MemoryStore) -> None:
    used = used_routes(store, 0)
    read_routes(store, used, used.ids)


@pytest.mark.parametrize("kind", ["run", "set"])
def test_undamaged_parts_have_no_problems(kind):
    assert problems(MemoryStore(dict(stored(kind)))) == []


@pytest.mark.parametrize("kind", ["run", "set"])
def test_a_row_that_is_not_valid_is_stored_as_filler(kind):
    objects = stored(kind)

    def other_sets(table: pa.Table) -> pa.Table:
        """Change the sets of the first row that is not valid."""
        at = next(i for i, bits in enumerate(table["validity"].to_pylist()) if bits is not None)
        bits = int.from_bytes(table["validity"][at].as_py(), "little")
        row = next(i for i in range(table["tokens"][at].as_py()) if not bits >> i & 1)
        coded = table["layer_00001"].to_pylist()
        data = bytearray(coded[at])
        data[4 * row : 4 * row + 4] = bytes([3, 3, 0, 0])
        coded[at] = bytes(data)
        return with_values(table, "layer_00001", coded, pa.binary())

    key = next(
        key
        for key in (part_of(objects, 0, 0), part_of(objects, 0, 1))
        if table_of(objects[key])["validity"].null_count < len(table_of(objects[key]))
    )
    store = changed(objects, {key: other_sets})
    text = "a row that is not valid contains"
    assert any(key in problem and text in problem for problem in problems(store)), problems(store)
    read(store)  # a reader may treat the row as 0..K-1


@pytest.mark.parametrize("kind", ["run", "set"])
def test_a_part_has_the_format_of_its_commit(kind):
    objects = stored(kind)
    key = part_of(objects, 1, 0)
    store = changed(objects, {key: lambda t: with_metadata(t, {b"retrace.format": b"1.0"})})
    assert any("its format is 1.0, but" in problem for problem in problems(store)), problems(store)


def own_first(owners: list[str]) -> list[str]:
    return [owners[0].rpartition("/")[0], *owners[1:]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: table.take(list(range(len(table)))[::-1]), "a segment from position"),
        (column("owner", own_first), "a segment of 000000/0, expected one of"),
        (
            column("owner", lambda names: ["000009/9", *names[1:]]),
            "a segment of 000009/9, expected",
        ),
        (column("token_start", lambda starts: [starts[0] + 1, *starts[1:]]), "position"),
    ],
    ids=["order", "a group", "an unknown sample", "another position"],
)
def test_segments_of_a_part_belong_to_its_samples_in_order(change, says):
    objects = stored("run")
    store = changed(objects, {part_of(objects, 0, 0): change})
    assert any(says in problem for problem in problems(store)), problems(store)
    with pytest.raises((TraceError, StoreError), match=says):
        read(store)


def exchanged(objects: Objects) -> MemoryStore:
    """Exchange the positions of one sample's first segments between the two ranks, in each stage.

    The segments of rank 0 and rank 1 begin at positions 0 and n, where n is the number of tokens of
    rank 0's segment. After the exchange, the positions still cover the sample.
    """
    changes = {}
    for stage in (0, 1):
        keys_ = [part_of(objects, stage, rank) for rank in (0, 1)]
        starts, tokens, owners = (
            [table_of(objects[key])[name].to_pylist() for key in keys_]
            for name in ("token_start", "tokens", "owner")
        )
        one, two = 0, owners[1].index(owners[0][0])
        assert (starts[0][one], starts[1][two]) == (0, tokens[0][one])
        starts[0][one], starts[1][two] = tokens[1][two], 0
        for key, values in zip(keys_, starts, strict=True):
            changes[key] = column("token_start", lambda _, values=values: values)
    return changed(objects, changes)


def test_exchanged_positions_are_noticed_only_in_a_recorded_set():
    """No digest in a run covers the joined rows of a sample, as docs/trace-format.md states."""
    assert problems(exchanged(stored("run"))) == []
    store = exchanged(stored("set"))
    assert any("have digest" in problem for problem in problems(store)), problems(store)
    with pytest.raises(TraceError, match="have digest"):
        read(store)


@pytest.mark.parametrize("planned", [True, False])
def test_a_cleared_baseline_is_noticed_only_with_a_plan(planned):
    """Only the plan shows which samples with a reward are not trained on."""
    whole = dict(world("filteredset"))
    objects = {key: data for key, data in whole.items() if planned or "/plan." not in key}
    assert problems(MemoryStore(dict(objects))) == []
    [manifest] = [key for key in objects if "/manifest." in key and key.endswith(".parquet")]
    store = changed(objects, {manifest: column("not_trained", lambda names: [None] * len(names))})
    found = problems(store)
    assert any("0 samples with not_trained 'greedy baseline'" in text for text in found) == planned
    assert bool(found) == planned


@pytest.mark.parametrize("kind", ["cut", "filtered"])
def test_a_run_without_its_description_is_not_taken_for_a_recorded_set(kind):
    """Such a run has staged files, which a recorded set does not have."""
    objects = dict(world(kind))
    del objects["run.json"]
    (problem, *_) = map(str, verify(MemoryStore(objects)).problems)
    assert problem.startswith("run.json: no such object, but inputs/")
