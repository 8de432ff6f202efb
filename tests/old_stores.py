"""Stores in trace format 1.0, as tests/data/README.md describes them."""

import json
import zipfile
from pathlib import Path

from pipeline.store import Store, open_store
from tests.paths import ROOT

_STORES = ROOT / "tests/data/format-1.0.zip"


def old_store(name: str, folder: Path) -> Store:
    """Unpack one store into a folder."""
    with zipfile.ZipFile(_STORES) as packed:
        mine = [member for member in packed.namelist() if member.startswith(f"{name}/")]
        packed.extractall(folder, mine)
    return open_store(f"file://{folder}/{name}")


def old_objects(name: str) -> dict[str, bytes]:
    """The objects of one store by key."""
    with zipfile.ZipFile(_STORES) as packed:
        mine = [m for m in packed.namelist() if m.startswith(f"{name}/") and not m.endswith("/")]
        return {member.removeprefix(f"{name}/"): packed.read(member) for member in mine}


def old_digests(name: str) -> dict[str, str | None]:
    """The routes digest that training used, by sample of step 0; None: it has no routes."""
    with zipfile.ZipFile(_STORES) as packed:
        return json.loads(packed.read("expected.json"))[name]
