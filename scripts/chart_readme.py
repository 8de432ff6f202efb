"""Generate the Helm chart's documentation from the comments in charts/retrace/values.yaml.

`python scripts/chart_readme.py` writes charts/retrace/README.md (with a table for each group of
values) and the descriptions in charts/retrace/values.schema.json. With `--check`, the script does
not write anything, but fails if one of the files is not up to date. A test makes the same check.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "charts" / "retrace"

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]\w*):(?P<rest>.*)$")
_PIPE = r"\|"
_TABLE = "\n| value | default | |\n|---|---|---|\n"


@dataclass
class Value:
    """A key of values.yaml. Example: Value(('store', 'uri'), 'Store of the runs.', '', {})."""

    path: tuple[str, ...]
    doc: str
    default: Any
    below: dict[str, "Value"] = field(default_factory=dict)
    """Documented keys below this key. A value without such keys is a leaf."""


def read_values(text: str) -> dict[str, Value]:
    """Return the keys of values.yaml that have a comment above them.

    A key without a comment, such as resources.requests.cpu, belongs to the leaf above it. Raises
    ValueError if a key has neither a comment nor a leaf above it.
    """
    defaults = yaml.safe_load(text)
    top: dict[str, Value] = {}
    comment: list[str] = []
    open_keys: list[tuple[int, Value]] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip().removeprefix("#").strip())
            continue
        match = _KEY.match(line)
        if match is None:
            comment = []  # A blank line ends the file's introduction.
            continue
        indent, key, doc = len(match["indent"]), match["key"], " ".join(comment)
        comment = []
        open_keys = [(depth, value) for depth, value in open_keys if depth < indent]
        parent = open_keys[-1][1] if open_keys else None
        if not doc:
            if parent is None or parent.below:
                raise ValueError(
                    f"values.yaml: {key} has no comment above it; add one that describes it"
                )
            continue
        path = (*(parent.path if parent else ()), key)
        value = Value(path, doc, _at(defaults, path))
        (parent.below if parent else top)[key] = value
        open_keys.append((indent, value))
    return top


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def render_readme(values: dict[str, Value], introduction: str) -> str:
    """Return README.md: the introduction, the ungrouped values, and a section for each group."""
    rows = [_row(value) for value in values.values() if not value.below]
    parts = [introduction.rstrip("\n"), "\n\n## Values\n", _TABLE, *rows]
    for name, group in values.items():
        if group.below:
            parts += [f"\n### {name}\n\n{group.doc}\n", _TABLE, *_rows(group)]
    return "".join(parts)


def _rows(group: Value) -> Iterator[str]:
    """Yield the rows of a group's values, and a row without a default for each inner group."""
    for value in group.below.values():
        if value.below:
            yield _table_row(value, "")
            yield from _rows(value)
        else:
            yield _row(value)


def _row(value: Value) -> str:
    return _table_row(value, f"`{json.dumps(value.default, ensure_ascii=False)}`")


def _table_row(value: Value, default: str) -> str:
    cells = f"`{'.'.join(value.path)}`", default, value.doc
    return f"| {' | '.join(cell.replace('|', _PIPE) for cell in cells)} |\n"


def describe(schema: dict[str, Any], values: dict[str, Value]) -> None:
    """Put the documentation of values into a schema. Raises ValueError if the keys differ."""
    properties = schema["properties"]
    if set(properties) - {"global"} != set(values):
        differing = sorted((set(properties) - {"global"}) ^ set(values))
        raise ValueError(f"values.yaml and values.schema.json differ in {', '.join(differing)}")
    for name, value in values.items():
        properties[name] = {
            "description": value.doc,
            **{key: item for key, item in properties[name].items() if key != "description"},
        }
        if value.below:
            describe(properties[name], value.below)


def outputs() -> dict[Path, str]:
    """Return the expected contents of the generated files, keyed by path."""
    values = read_values((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema_file = CHART / "values.schema.json"
    schema = json.loads(schema_file.read_text(encoding="utf-8"))
    describe(schema, values)
    introduction = (CHART / "README.head.md").read_text(encoding="utf-8")
    return {
        CHART / "README.md": render_readme(values, introduction),
        schema_file: json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
    }


def main() -> None:
    """Write or check the generated files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is not up to date")
    check = parser.parse_args().check
    stale = {path: text for path, text in outputs().items() if _text(path) != text}
    if check and stale:
        names = ", ".join(path.name for path in stale)
        sys.exit(f"charts/retrace: {names} not up to date; run `python scripts/chart_readme.py`")
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    main()
