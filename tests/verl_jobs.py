"""verl's example scripts and generated YAML files, which `scripts/verl_sources.py` copies.

They are not part of this repository. Tests that compare with them carry `needs_verl`.
"""

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.dotted import leaves
from tests.paths import ROOT

FOLDER = ROOT / "tests/unit/config/verl"
THERE = (FOLDER / "examples.json").exists()
FILES = sorted(FOLDER.glob("ppo_megatron_trainer-*.yaml"))
"""The generated file of each version, from the oldest."""

needs_verl = pytest.mark.skipif(
    not THERE,
    reason="verl's own scripts and settings are no part of this repository; to compare with them: "
    "python scripts/verl_sources.py CHECKOUT",
)


@cache
def examples() -> dict[str, list[str]]:
    """The arguments that each example script gives to verl's trainer; none without verl's files."""
    if not THERE:
        return {}
    scripts: dict[str, list[str]] = json.loads((FOLDER / "examples.json").read_text())["scripts"]
    return scripts


@cache
def algorithms() -> dict[str, list[str]]:
    """The settings of the algorithm that each script for another engine than Megatron gives."""
    if not THERE:
        return {}
    settings: dict[str, list[str]] = json.loads((FOLDER / "examples.json").read_text())[
        "algorithms"
    ]
    return settings


def newest_defaults() -> dict[str, Any]:
    """The settings of the newest generated file for Megatron, by dotted key, not resolved."""
    return dict(leaves(yaml.safe_load(FILES[-1].read_text())))


def write_script(folder: Path, name: str) -> Path:
    """A script that gives to verl's trainer what the example of that name gives."""
    arguments = " \\\n    ".join(map(shlex.quote, examples()[name]))
    target = folder / Path(name).name
    target.write_text(
        f"set -xeuo pipefail\npython3 -m verl.trainer.main_ppo \\\n    {arguments} \\\n    $@\n"
    )
    return target
