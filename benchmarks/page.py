"""Generated blocks of benchmarks/performance.md: programs write tables, and people write sentences.

A program's tables and its description of the machine are between `<!-- generated: NAME -->` and
`<!-- end: NAME -->`. The rest of the page is prose, which programs do not change.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("performance.md")
_BLOCK = re.compile(r"<!-- generated: ([a-z-]+) -->\n(.*?)<!-- end: \1 -->", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A table. Example: Table(("", "MB/s"), (("files", "12"),))."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table as Markdown, with aligned columns for reading in a terminal.

        Raises ValueError if a row does not have as many cells as there are headers.
        """
        lines = [self.headers, *self.rows]
        if bad := [row for row in self.rows if len(row) != len(self.headers)]:
            raise ValueError(f"row {bad[0]}: expected {len(self.headers)} columns: {self.headers}")
        widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(self.headers))]
        shown = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
        shown.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join(shown) + "\n"


def read_table(text: str) -> Table:
    """Return the first table of a text. Raises ValueError if the text does not contain a table."""
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
    """Return the generated blocks of a page, keyed by name."""
    return {match[1]: match[2] for match in _BLOCK.finditer(page)}


def with_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """Return a page with some blocks replaced. Raises ValueError for an unknown block."""
    if unknown := sorted(set(blocks) - set(blocks_of(page))):
        raise ValueError(
            f"the page does not contain block {unknown}, only {sorted(blocks_of(page))}"
        )

    def renewed(match: re.Match[str]) -> str:
        text = blocks.get(match[1], match[2]).strip("\n")
        lines = (f"<!-- generated: {match[1]} -->", text, f"<!-- end: {match[1]} -->")
        return "\n".join(filter(None, lines))

    return _BLOCK.sub(renewed, page)


def block(*parts: Table | str) -> str:
    """Join tables and sentences with empty lines between them."""
    return "\n".join(p.markdown() if isinstance(p, Table) else p + "\n" for p in parts)


def verdict(met: bool) -> str:
    """Return the mark that shows whether a limit is met."""
    return "met" if met else "**missed**"


def arguments_of(
    parser: argparse.ArgumentParser, words: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse a program's own options and the options that all programs share."""
    parser.add_argument(
        "--quick", action="store_true", help="use tiny sizes, to check that it works"
    )
    parser.add_argument("--blocks", type=Path, help="also write the page's blocks to this file")
    return parser.parse_args(words)


def publish(blocks: Mapping[str, str], arguments: argparse.Namespace) -> None:
    """Print a program's blocks, and write them to the file that `--blocks` names."""
    for text in blocks.values():
        print(text)
    if arguments.blocks:
        arguments.blocks.write_text(json.dumps(blocks))
