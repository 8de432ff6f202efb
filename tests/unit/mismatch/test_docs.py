"""examples/mismatch/README.md: a list of all arms, and their results."""

import re

from benchmarks.page import Table, blocks_of, read_table
from examples.mismatch import paper
from examples.mismatch.arms import ARMS
from tests.paths import ROOT

PAGE = ROOT / "examples/mismatch/README.md"
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


def test_the_prose_repeats_the_tables():
    """The numbers of README.md and of the findings follow from the generated tables."""
    text = PAGE.read_text()
    results = blocks_of(text)["results"]
    prose = " ".join((text[: text.index("<!-- generated")]).split())
    readme = " ".join((ROOT / "README.md").read_text().split())
    arms = {row[0]: row for row in table_below(results, "Mismatch during training").rows}
    kl, native = 1, 3
    replayed = ["GRPO + R3", "GSPO + R3", "GRPO + R3 + TIS"]
    factors = {label: mean(arms[label][native]) / mean(arms[label][kl]) for label in replayed}
    main = f"{factors['GRPO + R3']:.0f}"
    assert f"R3 lowered the mean KL of GRPO by a factor of {main} " in prose
    assert (
        f"R3 reduced the mean KL divergence between engine and trainer by a factor of {main}."
        in (readme)
    )
    for label, factor in factors.items():
        assert f"{factor:.0f} ({label})" in prose
    extreme = [number for label in replayed for number in numbers(arms[label][6])]
    assert f"{1e4 * min(extreme):.1f} to {1e4 * max(extreme):.1f} of every 10,000" in prose
    first = {row[0]: float(row[1]) for row in table_below(results, "before training").rows}
    assert f"{first['native'] / first['with R3']:.1f} times lower than the native KL" in prose
    last = {row[0]: mean(row[3]) for row in table_below(results, "Learning").rows}
    assert max(last, key=lambda label: last[label]) == "GRPO + R3 + TIS"
    for label in ("GRPO + R3 + TIS", "GRPO + R3"):
        assert f"{last[label]:.3f} ({label})" in prose
    assert sum(reward > last["GRPO + R3"] for reward in last.values()) == 7


def numbers(cell: str) -> list[float]:
    """Return the numbers in a cell: the mean over the seeds, the lowest and the highest value."""
    return [float(number) for number in re.findall(r"[\d.]+(?:e-\d+)?", cell)]


def mean(cell: str) -> float:
    return numbers(cell)[0]


def table_below(text: str, title: str) -> Table:
    return read_table(text[text.index(f"{title}\n") :])


def test_figures_of_the_paper_belong_to_known_arms():
    assert paper.ARMS.keys() <= {arm.name for arm in ARMS}
