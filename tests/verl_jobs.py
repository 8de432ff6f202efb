"""The settings in verl's example scripts, and verl's generated YAML files.

`scripts/verl_sources.py` copies both. The YAML files are not part of this repository, so tests that
need them are marked `needs_verl`.
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
FILES = sorted(FOLDER.glob("ppo_megatron_trainer-*.yaml"))
"""The generated file of each version of verl, oldest first."""

needs_verl = pytest.mark.skipif(
    not FILES,
    reason="verl's generated settings files are not part of this repository; to compare with them, "
    "run python scripts/verl_sources.py CHECKOUT",
)


@cache
def examples() -> dict[str, list[str]]:
    """Return the arguments that each example script passes to verl's trainer, keyed by script."""
    scripts: dict[str, list[str]] = json.loads((FOLDER / "examples.json").read_text())["scripts"]
    return scripts


@cache
def algorithms() -> dict[str, list[str]]:
    """Return the algorithm settings of the scripts that train without Megatron, keyed by script."""
    settings: dict[str, list[str]] = json.loads((FOLDER / "examples.json").read_text())[
        "algorithms"
    ]
    return settings


def newest_defaults() -> dict[str, Any]:
    """Return the unresolved settings of the newest generated file, keyed by dotted key."""
    return dict(leaves(yaml.safe_load(FILES[-1].read_text())))


def write_script(folder: Path, name: str) -> Path:
    """Write a script that passes the arguments of an example to verl's trainer.

    Args:
        folder: The folder for the script.
        name: The example's name.

    Returns:
        The path of the script.
    """
    arguments = " \\\n    ".join(map(shlex.quote, examples()[name]))
    target = folder / Path(name).name
    target.write_text(
        f"set -xeuo pipefail\npython3 -m verl.trainer.main_ppo \\\n    {arguments} \\\n    $@\n"
    )
    return target
