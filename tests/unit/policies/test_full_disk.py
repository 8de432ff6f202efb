"""A disk that really becomes full while a policy is fetched: nothing half-written is ever loaded.

Each case runs in a process with its own mounts, on a tmpfs of a few MB that the process fills.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.policies.versions import read_version
from pipeline.store import Store, open_store
from tests.paths import ROOT
from tests.policies import Weights, trained, write_policy

PROGRAM = r"""
import json, os, sys
from contextlib import closing
from pathlib import Path

from pipeline.policies import fetch
from pipeline.policies.cache import PolicyCache
from tests.weights import digest_of
from pipeline.store import StoreError, open_store

uri, disk, full_in, call = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
store, filler, calls = open_store(uri), disk / "filler", []

def filling(*arguments):
    calls.append(full_in)
    if len(calls) == call:
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == 28
    return real(*arguments)

def found_in(cache, version):
    with cache.held(version) as held:
        digest = digest_of(held.folder)
        assert digest == held.weights
        return digest

def failed(work):
    try:
        work()
    except StoreError as error:
        return str(error)
    raise SystemExit("the disk did not become full")

real = getattr(fetch, full_in)
answer = {}
with closing(PolicyCache(store, disk)) as cache:
    answer["before"] = found_in(cache, 1)
    cache.loaded(1)
    [folder] = disk.glob("retrace-policies-*")
    setattr(fetch, full_in, filling)
    answer["error"] = failed(lambda: cache.fetch(3))
    answer["marked"] = (folder / "version.json").exists()
    filler.unlink()
    if answer["marked"]:
        answer["kept"] = found_in(cache, 1)
    answer["retried"] = found_in(cache, 3)
print(json.dumps(answer))
"""


def in_small_disk(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in its own mounts, with a tmpfs of 6 MB at `folder`."""
    mounting = 'mount -t tmpfs -o size=6m tmpfs "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mounting, str(folder), *words]
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder for a small disk. Skip the test if this user is not allowed to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        tried = in_small_disk(folder, "true")
    except FileNotFoundError:
        pytest.skip("needs the program `unshare` (util-linux)")
    if tried.returncode:
        pytest.skip(f"must be allowed to mount a tmpfs, as root is: {tried.stderr.strip()}")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run with a whole policy of 2 MB and two differences of about 1 MB each."""
    store = open_store(str(tmp_path / "run"))
    versions: list[Weights] = [{"embed": noise(0), "head": noise(1)}]
    write_policy(store, 1, versions[0])
    for version in (2, 3):
        changed = {"embed": noise(2 * version), "head": versions[-1]["head"]}
        versions.append(trained(changed, version))
        write_policy(store, version, versions[-1], versions[-2])
    return store


def noise(seed: int) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 30_000, 1 << 19, dtype=np.uint16)
    return bits.view(np.float16)


def run(store: Store, disk: Path, full_in: str, call: int) -> dict[str, object]:
    """Patch a copy from version 1 to 3 while the disk becomes full; return the program's answer.

    Args:
        store: The run's store.
        disk: The folder of the disk.
        full_in: The function in pipeline.policies.fetch before which the disk becomes full.
        call: The call of that function before which this happens, counted from 1.
    """
    words = (sys.executable, "-c", PROGRAM, store.uri, str(disk), full_in, str(call))
    done = in_small_disk(disk, *words)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(
    ("full_in", "call", "keeps"),
    [("fetch_files", 1, True), ("fetch_files", 2, False), ("check_digests", 1, False)],
    ids=["first difference", "second difference", "end"],
)
def test_a_copy_on_a_disk_that_fills_up_holds_its_former_version_or_none(
    store: Store, disk: Path, full_in: str, call: int, keeps: bool
):
    """The first difference is fetched before the copy changes; later, the copy holds no version."""
    answer = run(store, disk, full_in, call)
    error = str(answer["error"])
    assert f"{disk}/retrace-policies-" in error
    assert "No space left on device" in error
    assert "free some space, or set store.policy_cache to " in error
    assert answer["marked"] == keeps
    if keeps:
        assert answer["kept"] == answer["before"]
    assert answer["retried"] == digest_of_newest(store)


def digest_of_newest(store: Store) -> str | None:
    """Return the weights digest of version 3."""
    return read_version(store, 3).weights_sha256
