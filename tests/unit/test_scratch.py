"""Scratch folders: those of killed processes are removed, all others stay."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import scratch
from pipeline.scratch import Identity, remove_abandoned, scratch_folder, this_process
from tests.paths import ROOT

HOLD = """
import sys
from pipeline.scratch import scratch_folder
with scratch_folder("policy") as folder:
    (folder / "model.safetensors").write_bytes(b"weights")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(temporary):
    """Another process, and its scratch folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    with process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def left_by(owner: Identity, purpose: str = "policy", random: str = "abcd1234") -> Path:
    folder = Path(tempfile.gettempdir(), f"retrace-{purpose}-{owner}-{random}")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def ended() -> Identity:
    """Return the identity of a process that ran on this host and has ended."""
    return replace(this_process(), started=this_process().started + 1)


def test_a_folder_lasts_as_long_as_its_block(temporary):
    with scratch_folder("model") as folder:
        assert folder.parent == temporary
        assert folder.name.startswith(f"retrace-model-{this_process()}-")
        (folder / "file").write_bytes(b"1")
    assert list(temporary.iterdir()) == []


def test_a_live_process_keeps_its_folder(holder):
    process, folder = holder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    remove_abandoned()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    process.communicate("")
    assert not folder.exists()


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_creating_a_folder_removes_that_of_a_killed_process(holder, temporary, reaped):
    """The killed process may still be a zombie, whose parent has not collected its exit code."""
    process, folder = holder
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        process.wait()
    assert folder.exists()
    with scratch_folder("policy") as own:
        assert list(temporary.iterdir()) == [own]


def test_a_reused_pid_is_not_the_owner(temporary):
    """A live process has the owner's pid, but it started at a different time."""
    folder = left_by(ended())
    remove_abandoned()
    assert not folder.exists()
    mine = left_by(this_process())
    remove_abandoned()
    assert list(temporary.iterdir()) == [mine]


def test_folders_from_an_earlier_boot_are_removed():
    folder = left_by(replace(this_process(), boot="00000000"))
    remove_abandoned()
    assert not folder.exists()


@pytest.mark.parametrize(
    "other",
    [{"host": "00000000"}, {"host": "00000000", "boot": "00000000"}, {"namespace": 1}],
    ids=["host", "host and boot", "container"],
)
def test_folders_of_other_hosts_and_containers_stay(other):
    folder = left_by(replace(ended(), **other))
    remove_abandoned()
    assert folder.exists()


def test_entries_without_an_owner_in_their_names_stay(temporary):
    names = [
        "retrace-inputs",
        "retrace-policy-abcd1234",
        f"other-policy-{ended()}-abcd1234",
        f"retrace-policy-{ended()}",
        f"retrace-policy-{ended()}-abcd1234.safetensors",
    ]
    for name in names:
        (temporary / name).mkdir()
    (temporary / f"retrace-policy-{ended()}-isafile1").write_bytes(b"1")
    (temporary / "elsewhere").mkdir()
    (temporary / f"retrace-policy-{ended()}-linked12").symlink_to(temporary / "elsewhere")
    before = sorted(temporary.iterdir())
    remove_abandoned()
    assert sorted(temporary.iterdir()) == before


def test_other_users_folders_stay(monkeypatch):
    folder = left_by(ended())
    monkeypatch.setattr(os, "getuid", lambda: os.stat(folder).st_uid + 1)
    remove_abandoned()
    assert folder.exists()


def test_links_in_a_folder_are_not_followed(temporary):
    (temporary / "kept").mkdir()
    (temporary / "kept" / "file").write_bytes(b"1")
    (left_by(ended()) / "link").symlink_to(temporary / "kept")
    remove_abandoned()
    assert [path.name for path in temporary.iterdir()] == ["kept"]
    assert (temporary / "kept" / "file").exists()


def test_several_threads_may_remove_folders_simultaneously(temporary, caplog):
    """Each folder is removed once, and no thread fails because of another thread."""
    caplog.set_level("INFO", scratch.__name__)
    folders = {left_by(ended(), random=f"{number:08x}") for number in range(200)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: remove_abandoned(), range(8)))
    assert list(temporary.iterdir()) == []
    told = [re.search(r"folder (\S+) of process", line)[1] for line in caplog.messages]
    assert sorted(told) == sorted(map(str, folders))


def test_a_folder_whose_remover_was_killed_is_removed(temporary):
    """A process that removes a folder renames it first, and is the folder's owner from then on."""
    folder = left_by(ended(), purpose="abandoned")
    remove_abandoned()
    assert not folder.exists()


def test_scratch_folders_in_another_place_are_cleaned_up_there(temporary):
    parent = temporary / "copy"
    parent.mkdir()
    left = left_by(ended())
    abandoned = left.rename(parent / left.name)
    with scratch_folder("fetch", parent) as folder:
        assert folder.parent == parent
        assert not abandoned.exists()
    assert list(parent.iterdir()) == []


def test_modules_use_only_scratch_folders():
    """Other temporary folders would remain after a kill."""
    makers = re.compile(r"TemporaryDirectory|mkdtemp|NamedTemporaryFile|mkstemp")
    found = [
        str(path.relative_to(ROOT))
        for package in ("pipeline", "operators", "retrace")
        for path in ROOT.glob(f"{package}/**/*.py")
        if makers.search(path.read_text())
    ]
    assert found == ["pipeline/scratch.py"]
