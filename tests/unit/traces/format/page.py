"""Splitting docs/trace-format.md into statements: the rows of its tables, and its rules.

A rule is a sentence or list item that requires or forbids something, in a section about storing or
reading. Other tests cover examples, test vectors and exports.
"""

import re
from collections.abc import Iterator

from tests.paths import ROOT

PAGE = (ROOT / "docs/trace-format.md").read_text()

_SECTIONS = {
    "Meaning",
    "Limits",
    "Identity",
    "Objects of a step",
    "Parquet files",
    "samples",
    "routes",
    "manifest",
    "Branches",
    "Segments",
    "Coding of a layer's sets",
    "Digests",
    "Commits",
    "R2: routes of the trainer",
    "Recorded sets",
    "Writing",
    "Reading",
    "Later versions",
    "What 1.1 added",
}
ELSEWHERE = {
    "The trace format, version 1.1": "the introduction",
    "Test vectors": "test_format_doc.py computes them",
    "Reading a shard with pyarrow and numpy": "test_format_doc.py runs it",
    "Exported arrays": "tests/unit/upkeep/test_export.py",
    "For other trainers": "tests/unit/traces/read/test_peers.py",
    "Size": "benchmarks",
}
_RULE = re.compile(r"\b(must|never|may not|refuses?|cannot|always|once|exactly|compare)\b")


def sections() -> dict[str, str]:
    """Return the text under each heading, keyed by heading."""
    parts = re.split(r"^#+ (.*)\n", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def plain(text: str) -> str:
    """Return a text without line breaks."""
    return re.sub(r"\s+", " ", text).strip()


def statements() -> Iterator[tuple[str, str]]:
    """Yield each table row and rule, with the heading of its section."""
    for section, text in sections().items():
        if section not in _SECTIONS:
            continue
        lines = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
        below = [*lines[1:], ""]
        for line, following in zip(lines, below, strict=True):
            heading = re.fullmatch(r"[|\- :]+", following) is not None
            if line.startswith("|") and not heading and not re.fullmatch(r"[|\- :]+", line):
                yield section, plain(line)
        prose = "\n".join("" if line.startswith("|") else line for line in lines)
        for piece in re.split(r"(?<=[.;:])\s+(?=[A-Z`*\-\d])|(?<=;)\s|\n\n|\n- ", prose):
            if _RULE.search(piece):
                yield section, plain(piece)


def strange_sections() -> set[str]:
    """Return the headings of sections that are covered neither by this module nor by ELSEWHERE."""
    return sections().keys() - _SECTIONS - ELSEWHERE.keys()
