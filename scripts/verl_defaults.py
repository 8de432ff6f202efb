"""Make the fixture of the settings that verl's generated YAML file for Megatron has, by version.

`python scripts/verl_defaults.py CHECKOUT REVISION...` reads a git checkout of verl, bare or not,
and writes tests/unit/config/verl/defaults.json: for each key the revisions at which its value
changes, with the value, or without one where the key is gone.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TARGET = Path("tests/unit/config/verl/defaults.json")
SOURCE = "verl/trainer/config/_generated_ppo_megatron_trainer.yaml"


def main(checkout: str, *revisions: str) -> None:
    """Write the fixture in the working directory."""
    settings: dict[str, list[list[Any]]] = {}
    commits = {}
    for revision in revisions:
        commits[revision] = _git(checkout, "rev-parse", f"{revision}^{{commit}}").strip()
        found = dict(_leaves(yaml.safe_load(_git(checkout, "show", f"{revision}:{SOURCE}"))))
        for key in {**settings, **found}:
            changes = settings.setdefault(key, [])
            now = [found[key]] if key in found else []
            before = changes[-1][1:] if changes else []
            if now != before:
                changes.append([revision, *now])
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(settings[key])}" for key in settings)
    head = json.dumps({"source": f"{SOURCE} of verl (Apache-2.0)", "commits": commits})[:-1]
    TARGET.write_text(f'{head},\n"settings": {{\n{lines}\n}}}}\n', encoding="utf-8")
    print(f"{len(settings)} keys of {len(revisions)} revisions: {TARGET}")


def _leaves(group: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _git(checkout: str, *arguments: str) -> str:
    command = ("git", "-C", checkout, *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
