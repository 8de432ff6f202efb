"""The advice in messages names settings that exist and that the user can change."""

import ast
import re
from collections.abc import Iterator

from pipeline.config.keys import all_keys
from tests.paths import ROOT


def test_workers_advice_can_be_followed_in_an_existing_run():
    """Workers advise users to change only the run's name, or settings that may be changed whenever
    a run is started."""
    may_change = {name for name, key in all_keys().items() if key.operational}
    may_change.add("trainer.experiment_name")  # a new run
    refused = [
        (path, name)
        for path, text in messages()
        if path.startswith(("operators", "pipeline/launch", "pipeline/run"))
        for name in advised(text)
        if name not in may_change
    ]
    assert not refused


def advised(text: str) -> list[str]:
    """Return the dotted keys of the settings that a text advises changing."""
    parts = re.findall(r"\b(?:raise|lower|set|write|choose|use|add the line) ([^;]*)", text)
    names = {
        name for part in parts for name in re.findall(r"(?<![\0.\w])(?:[a-z_]+\.)+[a-z_]+", part)
    }
    groups = {part for name in all_keys() for part in name.split(".")[:-1]}
    return sorted(name for name in names if name.partition(".")[0] in groups)


def messages() -> Iterator[tuple[str, str]]:
    """Yield every string in the source code except docstrings, with its module's path."""
    for package in ("pipeline", "operators", "retrace"):
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            skipped = {
                id(node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    skipped |= {id(part) for part in node.values}
                    parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                    yield str(path.relative_to(ROOT)), "".join(map(str, parts))
                elif id(node) not in skipped and isinstance(node, ast.Constant):
                    yield str(path.relative_to(ROOT)), str(node.value)


def test_advice_names_settings_that_exist():
    """Messages contain the full key of a setting, including all groups."""
    unknown = {
        (path, name)
        for path, text in messages()
        for name in advised(text)
        if name not in all_keys()
    }
    assert not unknown
