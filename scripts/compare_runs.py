"""Compare the policies of two runs bit for bit, and their plans, commits and manifests.

    python scripts/compare_runs.py outputs/before/quickstart outputs/after/quickstart

Use this script to check a code change that must not alter behaviour. Run the same settings before
and after the change on one machine, then compare the two runs. The comparison leaves out data that
differs between any two runs: attempts, write ids, times, and digests of objects that contain such
data. The script prints a line for each difference. If there are differences, its exit code is 1.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from pipeline.store import Store, open_store

_WRITE_ID = re.compile(r"(?<=[./])[0-9a-f]{8}(?=[./])")
_SET_ASIDE_KEYS = re.compile(
    r"attempts/|checkpoints/.*/(?!checkpoint\.json)|.*\.(parquet|safetensors)$"
)
"""Objects to leave out: attempts, and data files, whose digests are in the commits."""
_SET_ASIDE_FIELDS = {"attempt", "content_sha256", "commit_sha256", "maker", "time_s", "versions"}
"""Fields to leave out. The size and digest of a checkpoint's .metadata file are also left out,
because PyTorch writes a random id and a path into that file."""
_WHERE = {"store.uri", "trainer.default_local_dir"}


def main() -> int:
    """Compare the runs, print the differences, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before")
    parser.add_argument("after")
    arguments = parser.parse_args()
    before, after = _objects(open_store(arguments.before)), _objects(open_store(arguments.after))
    differences = list(_differences(before, after))
    for line in differences:
        print(line)
    policies = sum(key.endswith("policy.json") for key in before)
    print(
        f"{len(before)} and {len(after)} objects compared, {policies} policies among them: "
        f"{len(differences)} differences"
    )
    return 1 if differences else 0


def _objects(store: Store) -> dict[str, Any]:
    """Return the part of each object to compare, keyed by the object's key without write ids."""
    found: dict[str, Any] = {}
    for info in store.list(""):
        key = _WRITE_ID.sub("*", info.key)
        if info.key.endswith(".json") and not _SET_ASIDE_KEYS.match(info.key):
            found[key] = _settled(json.loads(store.read(info.key)))
        elif not info.key.startswith("attempts/"):
            found[key] = "there"
    return found


def _settled(value: Any, path: str = "") -> Any:
    """Return a JSON value without the data that differs between any two runs."""
    if isinstance(value, dict):
        return {
            name: _settled(inner, f"{path}.{name}".lstrip("."))
            for name, inner in value.items()
            if name not in _SET_ASIDE_FIELDS
            and not (name in ("size", "sha256") and str(value.get("key")).endswith("/.metadata"))
            and not name.startswith(("time/", "timing_s/", "perf/"))
            and f"{path}.{name}".removeprefix("config.") not in _WHERE
        }
    if isinstance(value, list):
        return [_settled(inner, path) for inner in value]
    return _WRITE_ID.sub("*", value) if isinstance(value, str) else value


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for key in sorted({*before, *after}):
        if key not in after:
            yield f"{key}: only in the first"
        elif key not in before:
            yield f"{key}: only in the second"
        else:
            yield from _changes(key, before[key], after[key])


def _changes(where: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}):
            if name not in one or name not in other:
                yield f"{where}: {name}: only in the {'first' if name in one else 'second'}"
            else:
                yield from _changes(f"{where}: {name}", one[name], other[name])
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _changes(f"{where}: {number}", a, b)
    elif one != other:
        yield f"{where}: {one!r}, then {other!r}"


if __name__ == "__main__":
    sys.exit(main())
