"""`retrace traces` verify, sweep and prune on a real store of each kind, as a user calls them."""

import json

import pytest
from typer.testing import CliRunner

from pipeline.cli.traces import app
from pipeline.store import Store, StoreError, keys, open_store
from pipeline.store.commit import new_attempt, put_data
from pipeline.traces import TraceError, read_manifest, read_routes, read_samples
from pipeline.traces.verify import verify
from tests.unit.traces.runs import long_run, whole_run

pytestmark = pytest.mark.integration


def command(*arguments: object, expect: int = 0) -> list[str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == expect, result.output
    return result.output.splitlines()


def objects(store: Store) -> dict[str, bytes]:
    return {info.key: store.read(info.key) for info in store.list("")}


def replace(store: Store, key: str, data: bytes | None) -> None:
    store.delete(key)
    if data is not None:
        store.create(key, data)


@pytest.mark.parametrize("mode", ["R3", "R2"])
def test_verify_names_each_damaged_object(place, tmp_path, mode):
    """Cut, flipped, swapped with another, foreign or lost, one after the other; exit code 1 and a
    line with its name."""
    store = open_store(place)
    whole_run(store, tmp_path, mode)
    whole = objects(store)
    (good,) = command("verify", place)
    assert good.startswith("all good; checked: 1 sealed steps, 6 samples, ")
    for number, (key, data) in enumerate(whole.items()):
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        others = [data[: len(data) // 2], bytes(flipped), whole[list(whole)[number - 1]], b"PAR1"]
        optional = key.endswith(".json") and not key.startswith("steps/") and key != "run.json"
        if not optional and key != keys.metrics(0):
            others.append(None)
        changed = others[number % len(others)]
        replace(store, key, changed)
        lines = command("verify", place, expect=1)
        assert any(key in line for line in lines), (key, lines)
        assert lines[-1].startswith("problems: ")
        replace(store, key, data)
    assert command("verify", place) == [good]


def test_readers_refuse_damaged_objects(place, tmp_path):
    """Of a step's data files and commits: an error, or, of parts that were not read, the truth."""
    store = open_store(place)
    whole_run(store, tmp_path)
    manifest = read_manifest(store, 0)
    ids = manifest.ids
    rows = manifest.rows.to_pylist()
    for key, data in objects(store).items():
        if not key.startswith("steps/000000/") or key in (keys.plan(0), keys.metrics(0)):
            continue
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        for changed in (data[: len(data) // 2], bytes(flipped), b"", None):
            replace(store, key, changed)
            try:
                found = read_manifest(store, 0)
                assert found.rows.to_pylist() == rows
                read_samples(store, found, ids)
                read_routes(store, found, ids)
                assert changed is not None
                assert len(changed) == len(data)
            except (TraceError, StoreError):
                assert verify(store).problems
            replace(store, key, data)
    assert not verify(store).problems


def test_sweep(place, tmp_path):
    """An unfinished upload and a file that no commit names; on a run that goes on, not yet."""
    store = open_store(place)
    whole_run(store, tmp_path)
    whole = set(objects(store))
    lone = keys.policy_file(2, new_attempt(), "model.safetensors")
    put_data(store, lone, b"12345")
    upload = store.upload(keys.rollout_file(1, 0, new_attempt(), "routes"))
    for _ in range(20):
        upload.write(bytes(1 << 20))
    assert command("sweep", place) == ["removed 0 objects, 0 bytes"]
    assert len(command("sweep", place, "--older-than", "0s", "--dry-run")) == 3
    assert set(objects(store)) == {*whole, lone}
    *gone, last = command("sweep", place, "--older-than", "0s")
    assert len(gone) == 2
    assert "an unfinished upload" in gone[0]
    assert gone[1].startswith(f"{lone}: 5 bytes, ")
    assert last.startswith("removed 2 objects, ")
    assert set(objects(store)) == whole
    assert not list(store.debris(""))
    with pytest.raises(StoreError):
        upload.finish()
    assert not verify(store).problems


def test_prune(place):
    """What was begun is completed, and nothing that a restart needs goes."""
    store = open_store(place)
    long_run(store, 4, (2, 3))
    data = [ref["key"] for ref in json.loads(store.read(keys.manifest(0)))["data"]]
    (error,) = command("prune", place, "--keep-steps", 1, expect=2)
    assert "keep at least 2 steps" in error
    assert command("prune", place, "--keep-steps", 2)[-1].startswith(
        "removed samples and routes of 2 steps: 8 files, "
    )
    assert not [key for key in data if store.size(key) is not None]
    put_data(store, data[0], b"as if its deletion had been cut off")
    assert command("prune", place, "--keep-steps", 4)[0].startswith("step 0: 1 files, ")
    assert "2 of them pruned" in command("verify", place)[0]
    assert command("sweep", place, "--older-than", "0s") == ["removed 0 objects, 0 bytes"]
