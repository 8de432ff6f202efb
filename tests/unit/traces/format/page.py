"""What docs/trace-format.md states, cut into pieces: the rows of its tables, and its rules.

A rule is a sentence or list item that says what must or may not be, in a section that says how
things are stored and read. Examples, test vectors and exports are tested elsewhere.
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
_RULE = re.compile(r"\b(must|never|may not|refuses?|cannot|always|each once|exactly)\b")


def sections() -> dict[str, str]:
    """The text under each heading."""
    parts = re.split(r"^#+ (.*)\n", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def plain(text: str) -> str:
    """A text without line breaks."""
    return re.sub(r"\s+", " ", text).strip()


def statements() -> Iterator[tuple[str, str]]:
    """Each table row and rule, with the section that it stands in."""
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
    """Headings that nobody has said how to test."""
    return sections().keys() - _SECTIONS - ELSEWHERE.keys()
