"""`retrace policies`: listing, export and refusals."""

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import retrace
from pipeline.cli import _app
from pipeline.policies.versions import read_version
from pipeline.run import keys
from pipeline.store import open_store
from tests.policies import write_chain
from tests.stored_runs import whole_run
from tests.weights import digest_of


@pytest.fixture(name="run")
def run_of_a_chain(tmp_path, monkeypatch):
    """A run with the whole policies 1 and 5, and the differences 6 and 7."""
    monkeypatch.setenv("COLUMNS", "100")
    store = open_store(str(tmp_path / "run"))
    whole_run(store, tmp_path)
    write_chain(store, 5, 3)
    return store


def command(*words: object, expect: int = 0) -> str:
    result = CliRunner().invoke(_app, ["policies", *map(str, words)])
    assert result.exit_code == expect, result.output
    return result.output


def rows(store, expect: int = 0) -> tuple[list[list[str]], list[str]]:
    """Return the rows of the table, and the lines below it."""
    lines = command("ls", store.uri, expect=expect).splitlines()
    assert lines[0].split() == ["version", "stored", "as", "size", "to", "fetch", "weights"]
    count = len(retrace.open_run(store.uri).policies())
    return [line.split() for line in lines[1 : count + 1]], lines[count + 1 :]


def test_ls_shows_sizes_and_digests(run):
    found, below = rows(run)
    assert [row[:2] for row in found] == [
        ["1", "whole"],
        ["5", "whole"],
        ["6", "difference"],
        ["7", "difference"],
    ]
    assert [row[3] for row in found[2:]] == ["5", "6"]
    sizes = {v: sum(file.size for file in read_version(run, v).files) for v in (5, 6, 7)}
    assert found[3][4:] == [
        str(sizes[7]), "bytes", f"{sum(sizes.values()) / 1000:.1f}", "kB",
        read_version(run, 7).weights_sha256[:16],
    ]  # fmt: skip
    assert below == []


def test_the_library_lists_the_same_versions(run):
    found = retrace.open_run(run.uri).listed_policies()
    assert [(policy.version, policy.base, policy.problem) for policy in found] == [
        (1, None, ""),
        (5, None, ""),
        (6, 5, ""),
        (7, 6, ""),
    ]
    assert found[3].chain_size == sum(policy.size for policy in found[1:])


@pytest.mark.parametrize(
    ("lost", "problems"),
    [
        (keys.policy(5), ["6: it is the difference from policy 5, which does not exist"]),
        ("file", ["5: policies/000005/.* is missing", "6: it is the difference from policy 5"]),
        ("damaged", ["5: policies/000005/policy.json .*: not a JSON", "6: it is the difference"]),
    ],
)  # fmt: skip
def test_versions_that_cannot_be_fetched_are_named(run, tmp_path, lost, problems):
    if lost == "damaged":
        (tmp_path / "run" / keys.policy(5)).write_text("{")
    else:
        run.delete(read_version(run, 5).files[1].key if lost == "file" else lost)
    _, below = rows(run, expect=1)
    problems = [*problems, "7: it is the difference from policy 6, which cannot be fetched"]
    assert len(below) == len(problems)
    for line, problem in zip(below, problems, strict=True):
        assert re.match(f"policy {problem}", line)


def test_export_writes_a_hugging_face_folder(run, tmp_path):
    printed = command("export", run.uri, 5, tmp_path / "model")
    assert printed.startswith(f"{tmp_path / 'model'}: policy 5 of ")
    assert digest_of(tmp_path / "model") == read_version(run, 5).weights_sha256
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_export_builds_the_tensors_of_a_difference(run, tmp_path):
    command("export", run.uri, 7, tmp_path / "model")
    assert digest_of(tmp_path / "model") == read_version(run, 7).weights_sha256
    command("export", run.uri, 5, tmp_path / "whole")
    assert digest_of(tmp_path / "whole") != digest_of(tmp_path / "model")
    names = [{path.name for path in (tmp_path / of).iterdir()} for of in ("model", "whole")]
    assert names[0] == names[1]


def test_export_of_a_damaged_version_leaves_an_empty_folder(run, tmp_path):
    """An engine must not find an incomplete model in this folder."""
    (file, _) = read_version(run, 6).files
    path = tmp_path / "run" / file.key
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    text = command("export", run.uri, 7, tmp_path / "model", expect=2)
    assert file.key in text.replace("\n", "")
    assert list((tmp_path / "model").iterdir()) == []


def test_export_overwrites_nothing(run, tmp_path):
    (tmp_path / "model").mkdir()
    command("export", run.uri, 5, tmp_path / "model")
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "model").iterdir())
    assert "is not empty" in command("export", run.uri, 5, tmp_path / "model", expect=2)
    assert before == sorted(path.stat().st_mtime_ns for path in (tmp_path / "model").iterdir())


def test_export_of_a_version_that_is_not_stored_is_refused(run, tmp_path):
    text = command("export", run.uri, 4, tmp_path / "model", expect=2)
    assert "policy version 4 is not stored" in text
    assert text.rstrip().endswith("; give a version that can be fetched: 1, 5, 6, 7")


def test_export_from_a_run_without_policies_gives_a_fix(run, tmp_path):
    for version in (1, 5, 6, 7):
        run.delete(keys.policy(version))
    text = command("export", run.uri, 1, tmp_path / "model", expect=2)
    assert "policy version 1 is not stored" in text
    assert text.rstrip().endswith(
        "; no version can be fetched yet; try again when the run has written one"
    )


@pytest.mark.parametrize("version", ["latest", "7.0", "²", "+7", "-1"])
def test_export_of_text_instead_of_a_version_names_the_list(run, tmp_path, version):
    text = command("export", run.uri, version, tmp_path / "model", expect=2)
    shown = " ".join(text.replace("│", " ").split())
    assert f"found '{version}', expected the number of a version" in shown
    assert "`retrace policies ls RUN` lists the stored versions" in shown
    assert not (tmp_path / "model").exists()


def test_export_of_a_version_without_its_chain_is_refused(run, tmp_path):
    """The version is stored, but a version in its chain is not."""
    run.delete(keys.policy(5))
    text = command("export", run.uri, 7, tmp_path / "model", expect=2)
    assert "policy version 7 cannot be fetched (" in text
    assert text.rstrip().endswith("; give a version that can be fetched: 1")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_run_name_is_refused(name):
    text = " ".join(command("ls", name, expect=2).replace("│", " ").split())
    assert f"found '{name}', expected a folder, a URI or the name of a run" in text
    assert "`retrace runs ls` lists the runs" in text


def test_export_to_a_disk_that_is_too_small_names_the_bytes_and_the_fix(run, tmp_path, monkeypatch):
    """The chain needs space for the whole version and, at the same time, for one difference."""
    sizes = {version: read_version(run, version).size for version in (5, 6, 7)}
    needed = sizes[5] + max(sizes[6], sizes[7])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    text = command("export", run.uri, 7, tmp_path / "model", expect=2)
    assert text.rstrip() == (
        f"error: {tmp_path}/model: found {needed - 1:,} bytes free, expected at least {needed:,} "
        "bytes to fetch policy 7; free some space, or give a folder on a larger disk"
    )
    assert list((tmp_path / "model").iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    command("export", run.uri, 7, tmp_path / "model")


def test_export_to_a_file_is_refused(run, tmp_path):
    (tmp_path / "model").write_text("")
    text = command("export", run.uri, 7, tmp_path / "model", expect=2)
    assert "it is not a folder; give a new or an empty folder" in text.replace("\n", " ")


def test_export_to_a_folder_that_cannot_be_created_is_refused(run, tmp_path):
    """The line names the path, the operating system's error, and the fix."""
    (tmp_path / "file").write_text("mine")
    below = tmp_path / "file" / "model"
    for folder, found in (
        (below, f"Not a directory ({below})"),
        (Path("/proc/none/model"), "No such file or directory (/proc/none)"),
    ):
        text = command("export", run.uri, 7, folder, expect=2).replace("\n", " ")
        assert f"error: {folder}: found {found}, expected a writable folder" in text
        assert text.rstrip().endswith("; give a different one")
