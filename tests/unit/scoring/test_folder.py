"""A reward file is staged with the files that it uses from its folder, and with no others."""

import pytest

from pipeline.errors import InputError
from pipeline.scoring.folder import MOST_BYTES, MOST_FILES, with_neighbours
from pipeline.store import open_store

KEY = "custom_reward_function.path"


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def found(folder, content):
    return list(with_neighbours(KEY, str(folder), "reward.py", content.encode()))


FOLDER = {
    "a.py": "def one():\n    from b import two",
    "b.py": "import a, package.inner",
    "unused.py": "",
    "json.py": "shadows the standard library",
    "package/__init__.py": "from . import inner",
    "package/inner.py": "import c",
    "package/deep/data.txt": "",
    "package/.hidden": "",
    "package/__pycache__/inner.cpython-311.pyc": "",
    "c.py": "",
    "space/part.py": "",
    "yaml/notes.txt": "",
    "no_code/data.txt": "",
    "words.txt": "",
    "data/table.csv": "",
}


@pytest.mark.parametrize(
    ("content", "others"),
    [
        ("import json, numpy, yaml, no_code, absent", []),
        ("import importlib\nimportlib.import_module('c')", ["c.py"]),
        ("if x:\n    try:\n        from c import *\n    except ImportError: pass", ["c.py"]),
        ("import a.anything", ["a.py", "b.py", "c.py", "package/__init__.py",
                               "package/deep/data.txt", "package/inner.py"]),
        ("from space.part import x", ["space/part.py"]),
        ("from .c import x", []),
        ("open('words.txt')", []),
        ("open(__file__ + '/../' + 'words.txt'), './data/table.csv', 'none.txt', '../x.txt', 'c'",
         ["data/table.csv", "words.txt"]),
        ("load(__file__, 'a.py')", ["a.py", "b.py", "c.py", "package/__init__.py",
                                    "package/deep/data.txt", "package/inner.py"]),
        ("import reward, café", []),
        ("not python(", []),
    ],
)  # fmt: skip
def test_the_files_that_the_code_uses_are_found(tmp_path, content, others):
    write(tmp_path, FOLDER)
    first, *rest = found(tmp_path, content)
    assert (first, sorted(rest)) == ("reward.py", others)


@pytest.mark.parametrize(
    "files",
    [
        {"package/data.bin": "x" * MOST_BYTES},
        {f"package/{number}.txt": "" for number in range(MOST_FILES)},
    ],
)
def test_large_folders_are_refused(tmp_path, files):
    write(tmp_path, {"package/__init__.py": "", **files})
    with pytest.raises(InputError, match=rf"{KEY}: .* 8 MiB, or are more than 1000, with package/"):
        found(tmp_path, "import package")
    assert found(tmp_path, "import other") == ["reward.py"]


def test_neighbours_in_the_store_are_found(tmp_path):
    """The flow in a pod reads the reward file and its neighbours from a bucket."""
    store = open_store(str(tmp_path / "bucket"))
    source = b"from helper import compute_score"
    store.create("code/reward.py", source)
    store.create("code/helper.py", b"import deeper")
    store.create("code/deeper/__init__.py", b"")
    place = f"{store.uri}/code"
    assert list(with_neighbours(KEY, place, "reward.py", source))[1:] == [
        "helper.py",
        "deeper/__init__.py",
    ]
