"""docs/mismatch.md lists the arms that there are, and shows the results of the short ones."""

import re

from benchmarks.page import Table, blocks_of, read_table
from examples.mismatch import paper
from examples.mismatch.arms import ARMS
from tests.paths import ROOT

PAGE = ROOT / "docs/mismatch.md"
SHORT = [arm.label for arm in ARMS if not arm.full]


def test_it_lists_the_arms_and_what_runs_them():
    listed = read_table(PAGE.read_text())
    assert [(row[0], row[2]) for row in listed.rows] == [
        (arm.label, "`--full`" if arm.full else "`make mismatch`") for arm in ARMS
    ]


def test_it_shows_each_short_arm_and_its_plots():
    results = blocks_of(PAGE.read_text())["results"]
    tables = [table_below(results, title) for title in ("Mismatch while training", "Learning")]
    for table in tables:
        assert [row[0] for row in table.rows] == SHORT
        assert all(re.match(r"[\d.]", row[1]) for row in table.rows)
    images = re.findall(r"\]\((images/mismatch/\w+\.svg)\)", results)
    assert len(images) == 6
    for image in images:
        assert (PAGE.parent / image).stat().st_size < 60_000


def table_below(text: str, title: str) -> Table:
    return read_table(text[text.index(f"### {title}") :])


def test_the_papers_figures_are_of_arms():
    assert paper.ARMS.keys() <= {arm.name for arm in ARMS}
