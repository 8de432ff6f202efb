"""The generated tables of docs/algorithms.md. `python -m tests.algorithms_page` writes them."""

import re

from pipeline.rl.estimator_table import ESTIMATORS
from tests.paths import ROOT

PAGE = ROOT / "docs/algorithms.md"


def render(page: str) -> str:
    """Return the page with newly generated tables."""
    return replaced(page, "estimators", estimators())


def replaced(page: str, name: str, table: str) -> str:
    """Return the page with a new table between the two comments with this name."""
    found = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    assert len(found.findall(page)) == 1, f"docs/algorithms.md: expected one pair of {name} marks"
    return found.sub(lambda match: match[1] + table + match[2], page)


def estimators() -> str:
    """Return the table of estimators, with one row for each estimator."""
    lines = ["| name | advantage of a token | settings | paper |", "|---|---|---|---|"]
    for name, one in ESTIMATORS.items():
        reads = ", ".join(f"`algorithm.{setting}`" for setting in one.settings)
        paper = f"[arXiv {one.paper}](https://arxiv.org/abs/{one.paper})"
        lines.append(f"| `{name}` | {one.advantage} | {reads} | {paper} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
