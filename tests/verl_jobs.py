"""verl's example scripts and generated YAML files, made again from the fixtures."""

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.paths import ROOT

FOLDER = ROOT / "tests/unit/config/verl"
NEWEST = "v0.9.0"


@cache
def examples() -> dict[str, list[str]]:
    """The arguments that each example script gives to verl's trainer."""
    scripts: dict[str, list[str]] = json.loads((FOLDER / "examples.json").read_text())["scripts"]
    return scripts


@cache
def _defaults() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "defaults.json").read_text())
    return content


def revisions() -> list[str]:
    """The versions of verl whose generated file is known, from the oldest."""
    return list(_defaults()["commits"])


def generated(revision: str) -> dict[str, Any]:
    """The settings of a version's generated file for Megatron, by dotted key, not resolved."""
    until = revisions()[: revisions().index(revision) + 1]
    found = {}
    for key, changes in _defaults()["settings"].items():
        known = [value for at, *value in changes if at in until]
        if known and known[-1]:
            found[key] = known[-1][0]
    return found


def write_generated(folder: Path, revision: str) -> Path:
    """The generated file of a version."""
    root: dict[str, Any] = {}
    for key, value in generated(revision).items():
        *path, name = key.split(".")
        group = root
        for part in path:
            group = group.setdefault(part, {})
        group[name] = value
    target = folder / f"verl-{revision}.yaml"
    target.write_text(yaml.safe_dump(root))
    return target


def write_script(folder: Path, name: str) -> Path:
    """A script that gives to verl's trainer what the example of that name gives."""
    arguments = " \\\n    ".join(map(shlex.quote, examples()[name]))
    target = folder / Path(name).name
    target.write_text(
        f"set -xeuo pipefail\npython3 -m verl.trainer.main_ppo \\\n    {arguments} \\\n    $@\n"
    )
    return target
