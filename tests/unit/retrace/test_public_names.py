"""The public names of `retrace` are documented.

tests/unit/traces/test_alone.py checks which packages `import retrace` needs.
"""

import inspect
import tomllib

import retrace
from tests.paths import ROOT

NAMES = [name for name in retrace.__all__ if name != "__version__"]


def undocumented(name: str) -> list[str]:
    """Return those of a public name and its public members that have no docstring.

    Only members that this project defines are checked.
    """
    value = getattr(retrace, name)
    code = inspect.isclass(value) or inspect.isfunction(value)
    missing = [name] if code and not value.__doc__ else []
    if inspect.isclass(value):
        members = {
            member: found
            for base in value.__mro__
            if base.__module__.partition(".")[0] in ("retrace", "pipeline")
            for member, found in vars(base).items()
            if not member.startswith("_") and (callable(found) or hasattr(found, "__get__"))
        }
        missing += [f"{name}.{member}" for member, found in members.items() if not found.__doc__]
    return missing


def test_every_name_exists_and_is_documented():
    assert [line for name in NAMES for line in undocumented(name)] == []


def test_library_md_lists_every_name():
    page = (ROOT / "docs/library.md").read_text()
    assert [name for name in NAMES if name not in page] == []


def test_no_other_name_is_public():
    """Names that the package's modules import do not become names of the package."""
    modules = {"imports", "local_logs", "opened", "sealed", "starting", "tokenizer"}
    found = {name for name in vars(retrace) if not name.startswith("_")}
    assert found - modules == set(NAMES)


def test_the_version_matches_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert retrace.__version__ == project["version"]
