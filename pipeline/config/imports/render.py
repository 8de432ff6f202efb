"""Render sorted settings as a YAML file, in our order, with TODO lines for open decisions."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from pipeline.config.imports.sort import SortedSettings
from pipeline.config.keys import all_keys
from pipeline.config.reading.undecided import IMPORTED, TODO, UNKNOWN

_WIDTH = 100


@dataclass(frozen=True)
class _Entry:
    """A line of the file: a setting, or a comment for a setting that is still undecided."""

    key: str
    value: Any
    comment: str
    """The comment on a setting, or the reason for a TODO."""
    todo: bool = False


def render(settings: SortedSettings, origin: str, notes: Sequence[str]) -> str:
    """Return the content of the file.

    Args:
        settings: verl's settings, sorted by their treatment here.
        origin: Name of the imported file.
        notes: Remarks to write at the top of the file.
    """
    entries = [
        _Entry(key, value, settings.notes.get(key, "")) for key, value in settings.kept.items()
    ]
    todos = [_Entry(key, value, text, True) for key, (value, text) in settings.refused.items()]
    todos += [_Entry(key, ..., text, True) for key, text in settings.missing.items()]
    groups = {group for key in settings.kept for group in _groups(key)}
    placed = [todo for todo in todos if todo.key.rpartition(".")[0] in groups]
    elsewhere = [todo for todo in todos if todo not in placed]
    entries = sorted([*entries, *placed], key=lambda entry: _place(entry.key))
    lines = [
        *_head(settings, origin, notes),
        *_elsewhere(elsewhere),
        *_body(entries),
        *_tail(settings.ignored),
    ]
    return "\n".join(lines) + "\n"


def _head(settings: SortedSettings, origin: str, notes: Sequence[str]) -> Iterator[str]:
    dropped = sum(map(len, settings.ignored.values()))
    todos = len(settings.refused) + len(settings.missing)
    yield f"{IMPORTED} {origin}."
    decide = f"Undecided settings (marked TODO): {todos}" if todos else "Undecided settings: 0"
    yield from _comment(
        f"Settings: {len(settings.kept)}. Settings that are not taken over (listed at the end): "
        f"{dropped}. {decide}. docs/config.md explains all keys."
    )
    for note in notes:
        yield from _comment(f"- {note}")


def _elsewhere(todos: Sequence[_Entry]) -> Iterator[str]:
    """Yield the TODO lines whose group contains no kept setting; each reason appears once."""
    by_reason: dict[str, list[_Entry]] = {}
    for todo in todos:
        by_reason.setdefault(todo.comment, []).append(todo)
    for reason, of_reason in by_reason.items():
        yield ""
        for todo in of_reason:
            yield f"{TODO}{todo.key}: {_shown(todo.value)}"
        yield from _comment(reason, "#   ")


def _body(entries: Sequence[_Entry]) -> Iterator[str]:
    opened: list[str] = []
    for entry in entries:
        *path, name = entry.key.split(".")
        common = 0
        while common < min(len(path), len(opened)) and path[common] == opened[common]:
            common += 1
        for depth in range(common, len(path)):
            if depth == 0:
                yield ""
            yield f"{'  ' * depth}{path[depth]}:"
        opened = path
        indent = "  " * len(path)
        if entry.todo:
            yield from _todo(entry, indent)
        else:
            yield from _setting(entry, f"{indent}{name}: {_yaml(entry.value)}", indent)


def _setting(entry: _Entry, line: str, indent: str) -> Iterator[str]:
    """Yield a setting and its comment; the comment goes above it if the line would be too long."""
    if not entry.comment:
        yield line
    elif len(f"{line} # {entry.comment}") <= _WIDTH:
        yield f"{line} # {entry.comment}"
    else:
        yield from _comment(entry.comment, f"{indent}# ")
        yield line


def _todo(todo: _Entry, indent: str) -> Iterator[str]:
    yield f"{indent}{TODO}{todo.key}: {_shown(todo.value)}"
    yield from _comment(todo.comment, f"{indent}#   ")


def _shown(value: Any) -> str:
    return UNKNOWN if value is ... else _yaml(value)


def _tail(ignored: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if ignored:
        yield ""
        yield "# Left out:"
    for reason, settings in ignored.items():
        # Hydra's `_target_` entries, which name classes, would make up half of the list.
        shown = [f"{k}={_yaml(v)}" for k, v in settings.items() if not k.endswith("_target_")]
        if shown:
            yield from _comment(f"{', '.join(shown)}: {reason}", "# - ", "#   ")


def _comment(text: str, first: str = "# ", more: str | None = None) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=first if more is None else more,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _groups(key: str) -> Iterator[str]:
    parts = key.split(".")[:-1]
    yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _place(key: str) -> tuple[int, bool]:
    """Return the sort key: the position of a key, or the end of the group for an unknown key."""
    for nearest in (key, *reversed(list(_groups(key)))):
        if nearest in all_keys():
            below = [n for n, name in enumerate(all_keys()) if f"{name}.".startswith(f"{nearest}.")]
            return below[-1], nearest != key
    return len(all_keys()), True
