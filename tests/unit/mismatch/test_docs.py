"""docs/mismatch.md: a list of all arms, and their results."""

import re

from benchmarks.page import Table, blocks_of, read_table
from examples.mismatch import paper
from examples.mismatch.arms import ARMS
from tests.paths import ROOT

PAGE = ROOT / "docs/mismatch.md"
LABELS = [arm.label for arm in ARMS]


def test_the_page_lists_each_arm_with_its_command():
    listed = read_table(PAGE.read_text())
    assert [(row[0], row[2]) for row in listed.rows] == [
        (arm.label, "`--full`" if arm.full else "`make mismatch`") for arm in ARMS
    ]


def test_the_page_shows_results_and_plots_of_each_arm():
    results = blocks_of(PAGE.read_text())["results"]
    tables = [table_below(results, title) for title in ("Mismatch during training", "Learning")]
    for table in tables:
        assert [row[0] for row in table.rows] == LABELS
        assert all(re.match(r"[\d.]", row[1]) for row in table.rows)
    images = re.findall(r"\]\((images/mismatch/\w+\.svg)\)", results)
    assert len(images) == 6
    for image in images:
        assert (PAGE.parent / image).stat().st_size < 60_000


def table_below(text: str, title: str) -> Table:
    return read_table(text[text.index(f"### {title}") :])


def test_figures_of_the_paper_belong_to_known_arms():
    assert paper.ARMS.keys() <= {arm.name for arm in ARMS}
