"""The table of store schemes. No other code names a remote scheme."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.docs import render
from pipeline.store import StoreError, is_remote, open_store, same_place, schemes, shown_uri
from pipeline.store.schemes import SCHEMES, Scheme, make_container
from tests.memory_store import MemoryStore
from tests.paths import ROOT

REMOTE = [f"{scheme.name}://" for scheme in SCHEMES if scheme.remote]


def test_nothing_outside_the_store_names_a_remote_scheme():
    """Messages, docstrings and descriptions of settings take the scheme from the table."""
    sources = [
        path
        for package in ("pipeline", "operators", "retrace")
        for path in ROOT.glob(f"{package}/**/*.py")
        if not path.is_relative_to(ROOT / "pipeline/store")
    ]
    assert len(sources) > 100
    found = {
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for scheme in REMOTE
        if scheme in line
    }
    assert found == set()


@pytest.mark.parametrize(
    ("place", "remote"),
    [
        ("s3://bucket/prefix", True),
        ("S3://bucket", True),
        ("/folder", False),
        ("folder/s3:", False),
        ("file:///folder", False),
        ("ftp://host/folder", False),
        ("//[", False),
        ("", False),
    ],
)
def test_a_place_is_remote_if_its_scheme_is(place, remote):
    assert is_remote(place) == remote


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("s3://bucket/prefix", "s3://bucket/prefix/", True),
        ("s3://bucket/prefix", "s3://bucket/other", False),
        ("/a/b/../c", "file:///a/c", True),
        ("file://localhost/a%20b", "/a b", True),
        ("here", str(Path("here").absolute()), True),
        ("here", "there", False),
        ("/bucket/prefix", "s3://bucket/prefix", False),
        ("file://[/x", "/x", True),
        ("~/a", os.path.expanduser("~/a"), True),
        ("$HOME/a", "file:///a", os.path.expanduser("~") == "/"),
    ],
)
def test_two_names_of_the_same_place_are_recognised(one, other, same):
    assert same_place(one, other) == same_place(other, one) == same


def test_paths_and_uris_can_be_opened(tmp_path):
    root = tmp_path / "a store"
    for place in (root, str(root), root.as_uri(), f"file://localhost{root.as_uri()[7:]}"):
        assert open_store(place).uri == root.as_uri()
    assert open_store("s3://bucket/prefix/").uri == "s3://bucket/prefix"


@pytest.mark.parametrize(
    "place",
    ["~/a store", "$HOME/a store", "file://~/a%20store", "file:~/a%20store", Path("~/a store")],
)
def test_home_and_variables_are_expanded_as_a_shell_does(tmp_path, monkeypatch, place):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store = open_store(place)
    store.create("object", b"x")
    assert store.uri == (tmp_path / "home/a store").as_uri()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("ftp://me:pass@host/a", r"ftp://\*\*\*@host/a'.*'ftp' is not known; use a folder, file:"),
        ("file://host/a", "found a host, expected none"),
        ("file://[/a", "found a host, expected none"),
        ("s3://me:pass@bucket/a", "credentials are never part of a URI"),
    ],
)
def test_invalid_uris_cannot_be_opened(uri, said):
    for use in (open_store, lambda uri: make_container(uri, 1.0)):
        if use is open_store or not uri.startswith("file:"):
            with pytest.raises(StoreError, match=said) as error:
                use(uri)
            assert "pass@" not in str(error.value)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (None, "found a value of type NoneType, expected a str or a Path"),
        (5, "found a value of type int, expected a str or a Path"),
        (b"here", "found a value of type bytes, expected a str or a Path"),
        ("a\0b", r"found 'a\\x00b', expected text without U\+0000 and surrogates"),
        (Path("a\0b"), r"found .*, expected text without U"),
        ("\ud800", r"found '\\ud800', expected text without U"),
        ("s3://me:pass@bucket/\0", r"found 's3://\*\*\*@bucket/"),
        ("", "found an empty text, expected a path or URI"),
        ("$NO_SUCH_VARIABLE/store", "found '.*', but the variable NO_SUCH_VARIABLE is not set"),
        ("~no-such-user/store", "found '.*', but the user 'no-such-user' has no folder"),
    ],
)
def test_places_that_cannot_exist_are_refused(place, said):
    with pytest.raises(StoreError, match=f"^store: {said}"):
        open_store(place)


def test_a_file_name_that_is_not_utf_8_is_a_place(tmp_path):
    place = os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9")
    assert open_store(place).size("object") is None


def test_a_password_is_not_shown():
    assert shown_uri("s3://me:pass@bucket/prefix") == "s3://***@bucket/prefix"


def test_folders_are_not_created_beforehand(tmp_path):
    assert not make_container(str(tmp_path / "store"), 1.0)
    assert not (tmp_path / "store").exists()


def test_a_new_scheme_is_one_row(monkeypatch):
    """docs/store.md promises that messages and the descriptions of settings follow the table."""
    row = Scheme(
        "az",
        "az://ACCOUNT/CONTAINER/PREFIX",
        "as Azure's SDK finds them",
        True,
        lambda uri: MemoryStore(),
        lambda uri, patience_s: True,
    )
    monkeypatch.setattr(schemes, "SCHEMES", (*SCHEMES, row))
    assert isinstance(open_store("az://account/container/runs"), MemoryStore)
    assert make_container("az://account/container/runs", 1.0)
    assert is_remote("az://account/container/runs")
    assert same_place("az://a/c/runs/", "az://a/c/runs")


def test_the_docs_of_settings_agree_with_the_table():
    for text in (schemes.STORE_SHAPES, schemes.REMOTE_URI, schemes.CREDENTIALS):
        assert text in render()


def test_words_are_joined_as_in_a_sentence():
    """This holds for any number of schemes."""
    assert schemes.one_of(["a"]) == "a"
    assert schemes.one_of(["a", "b"]) == "a or b"
    assert schemes.one_of(["a", "b", "c"]) == "a, b or c"


def test_a_folder_is_opened_without_loading_a_client():
    program = (
        "import sys; from pipeline.store import open_store; open_store('here'); "
        "print('boto3' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
