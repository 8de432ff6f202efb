"""The public names of `retrace` and `retrace.traces` are documented.

tests/unit/traces/test_alone.py checks which packages `import retrace` needs.
"""

import inspect
import tomllib

import pytest

import retrace
from tests.paths import ROOT

NAMES = [
    (package, name)
    for package in (retrace, retrace.traces)
    for name in package.__all__
    if name not in ("__version__", "traces")
]


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_every_name_and_its_members_have_a_docstring(package: object, name: str):
    value = getattr(package, name)
    if inspect.isfunction(value):
        assert value.__doc__
    if not inspect.isclass(value):
        return
    bases = (b for b in value.__mro__ if b.__module__.partition(".")[0] in ("retrace", "pipeline"))
    members = {name: found for base in bases for name, found in vars(base).items()}
    documented = {
        name: bool(found.__doc__)
        for name, found in members.items()
        if not name.startswith("_") and (callable(found) or hasattr(found, "__get__"))
    }
    assert value.__doc__
    assert [name for name, there in documented.items() if not there] == []


def test_library_md_lists_every_name():
    page = (ROOT / "docs/library.md").read_text()
    assert [name for _, name in NAMES if name not in page] == []


def test_no_other_name_is_public():
    """Names that the package's modules import do not become names of the package."""
    modules = {"local_logs", "opened", "sealed", "starting", "tokenizer"}
    found = {name for name in vars(retrace) if not name.startswith("_")}
    assert found - modules == {*retrace.__all__} - {"__version__"}


def test_the_version_matches_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert retrace.__version__ == project["version"]
