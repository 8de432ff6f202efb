"""`retrace traces sweep` and `retrace traces prune` on a real store of each kind.

test_damaged_stores.py tests `retrace traces verify`.
"""

import json

import pytest
from typer.testing import CliRunner

from pipeline.cli.traces import app
from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.store import Store, StoreError, open_store
from pipeline.upkeep.verify import verify
from tests.data_files import put_data
from tests.stored_runs import long_run, whole_run

pytestmark = pytest.mark.integration


def command(*arguments: object, expect: int = 0) -> list[str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == expect, result.output
    return result.output.splitlines()


def objects(store: Store) -> dict[str, bytes]:
    return {info.key: store.read(info.key) for info in store.list("")}


def test_sweep_removes_only_old_debris(place, tmp_path):
    """Sweep removes an unfinished upload and a file that no commit names, but no recent objects."""
    store = open_store(place)
    whole_run(store, tmp_path)
    whole = set(objects(store))
    lone = keys.policy_file(2, new_write_id(), "model.safetensors")
    put_data(store, lone, b"12345")
    upload = store.upload(keys.rollout_file(1, 0, new_write_id(), "routes"))
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


def test_prune_keeps_the_data_for_a_restart(place):
    """Prune completes an interrupted removal, and keeps everything that a restart needs."""
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
