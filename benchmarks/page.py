"""docs/performance.md: its tables, which programs write, between its sentences, which people do.

A program's tables and its line about the machine stand between `<!-- generated: NAME -->` and
`<!-- end: NAME -->`; everything else of the page is prose and stays as it is.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
_BLOCK = re.compile(r"<!-- generated: ([a-z-]+) -->\n(.*?)<!-- end: \1 -->", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A table. Example: Table(("", "MB/s"), (("files", "12"),))."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As Markdown, columns aligned so that it can be read in a terminal, too."""
        lines = [self.headers, *self.rows]
        if bad := [row for row in self.rows if len(row) != len(self.headers)]:
            raise ValueError(f"row {bad[0]}: {len(self.headers)} columns: {self.headers}")
        widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(self.headers))]
        shown = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
        shown.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join(shown) + "\n"


def read_table(text: str) -> Table:
    """The first table of a text. Raises ValueError when there is none."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    if len(lines) < 2 or set(lines[1]) - set("|- "):
        raise ValueError(f"no table in {text[:80]!r}")
    end = next((i for i, line in enumerate(text.splitlines()) if line == lines[0]), 0)
    rows = []
    for line in text.splitlines()[end:]:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    return Table(rows[0], tuple(rows[2:]))


def blocks_of(page: str) -> dict[str, str]:
    """The generated blocks of a page, by name."""
    return {match[1]: match[2] for match in _BLOCK.finditer(page)}


def with_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """The page with some blocks in place of those it has. Raises ValueError for an unknown one."""
    if unknown := sorted(set(blocks) - set(blocks_of(page))):
        raise ValueError(f"the page has no block {unknown}; it has {sorted(blocks_of(page))}")

    def renewed(match: re.Match[str]) -> str:
        text = blocks.get(match[1], match[2]).strip("\n")
        lines = (f"<!-- generated: {match[1]} -->", text, f"<!-- end: {match[1]} -->")
        return "\n".join(filter(None, lines))

    return _BLOCK.sub(renewed, page)


def block(*parts: Table | str) -> str:
    """Tables and sentences, an empty line between."""
    return "\n".join(p.markdown() if isinstance(p, Table) else p + "\n" for p in parts)


def verdict(met: bool) -> str:
    """How a limit that was kept, or was not, is marked."""
    return "met" if met else "**missed**"


def arguments_of(
    parser: argparse.ArgumentParser, words: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse a program's options, with those that all programs have."""
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works")
    parser.add_argument("--blocks", type=Path, help="also write the page's blocks to this file")
    return parser.parse_args(words)


def publish(blocks: Mapping[str, str], arguments: argparse.Namespace) -> None:
    """Print a program's blocks, and write them where `--blocks` says."""
    for text in blocks.values():
        print(text)
    if arguments.blocks:
        arguments.blocks.write_text(json.dumps(blocks))
