"""examples/mismatch: the tables and plots on the page."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from benchmarks.page import blocks_of, read_table
from examples.mismatch import page, results
from examples.mismatch.arms import ARMS, ArmRun
from examples.mismatch.results import Result
from tests.paths import ROOT

ARM = {arm.name: arm for arm in ARMS}
LAYERS = {0: 0.9, 1: 0.8}


def result(name: str, rewards: list[float], seed: int = 1, **metrics: list[float | None]) -> Result:
    """Return the result of a run with these rewards.

    Other metrics are named by their constants in results.py.
    """
    named = {getattr(results, key): values for key, values in metrics.items()}
    replayed = name.startswith("r")
    layers = [LAYERS if replayed else None for _ in rewards]
    run = ArmRun(ARM[name], seed, ROOT / "outputs")
    return Result(run, {results.REWARD: [*rewards], **named}, layers)


NATIVE = result("native", [0.5, 0.6, 0.7, 0.1, 0.1, 0.1], KL=[5e-4] * 6, EXTREME=[1e-3] * 6)
R3 = result(
    "r3",
    [0.5, 0.6, 0.7, 0.8, 0.8, 0.8],
    KL=[1e-4, 2e-4, 3e-4, 1e-4, 1e-4, 1e-4],
    KL_NATIVE=[5e-4, None, 7e-4, None, None, None],
    EXTREME=[0.0] * 6,
    EXTREME_NATIVE=[1e-3, None, 3e-3, None, None, None],
    GRAD_NORM=[1.0, 2.0, 3.0, 1.0, 1.0, 1.0],
    ENTROPY=[0.2, 0.2, 0.2, 0.2, 0.2, 0.125],
    CLIPPED=[0.01] * 6,
)
DENSE = result("dense", [0.5] * 6, KL=[5e-5] * 6, EXTREME=[0.0] * 6)


def test_step_0_compares_native_replayed_and_dense_with_the_paper():
    table = page.first_step_table([NATIVE, R3, DENSE])
    assert table.rows == (
        ("native", "5.0e-04", "1.0e-03", "1.5e-03"),
        ("with R3", "1.0e-04", "0.0e+00", "7.5e-04"),
        ("dense twin", "5.0e-05", "0.0e+00", "6.4e-04"),
    )
    assert page.first_step_table([NATIVE]).rows[0] == table.rows[0], (
        "without R3, native values are those of GRPO"
    )


def test_mismatch_is_averaged_over_the_steps_that_measured_it():
    native, r3 = page.mismatch_table([NATIVE, R3]).rows
    assert native == ("GRPO", "5.0e-04", "5.0e-04", "-", "1.0e-03", "1.0e-03", "-")
    assert r3 == ("GRPO + R3", "1.5e-04", "3.0e-04", "6.0e-04", "0.0e+00", "0.0e+00", "2.0e-03")


def test_learning_is_shown_with_the_papers_arm():
    native, r3 = page.learning_table([NATIVE, R3]).rows
    assert native[:4] == ("GRPO", "0.500", "0.600", "0.100")
    assert native[-2:] == ("step 5", "48.8, collapsed at step 120")
    assert r3[1:] == (
        *("0.500", "0.800", "0.800", "0.125", "1.500", "1.0%", "none in 6 steps"),
        "68.1, no collapse in 180 steps",
    )


def test_seeds_are_shown_as_mean_and_range():
    other = result("r3", [0.3, 0.3], seed=2, KL=[3e-4, 3e-4])
    [row] = page.mismatch_table([R3, other]).rows
    assert row[1] == "2.2e-04 (1.5e-04 to 3.0e-04)"
    assert page.learning_table([R3, other]).rows[0][-2] == "none in 6 steps, none in 2 steps"


def test_runs_that_failed_are_listed_with_the_step_and_the_error():
    """A run that failed in its first step has no values."""
    native, r3 = replace(NATIVE, failure="NaN"), replace(result("r3", []), failure="no fit")
    assert page.failed_parts([native, DENSE, r3]) == [
        "- native-1 ended at step 6: NaN\n- r3-1 ended at step 0: no fit"
    ]
    assert page.failed_parts([DENSE]) == []
    cells = [row[-2] for row in page.learning_table([native, DENSE, r3]).rows]
    assert cells == ["step 5; ended at step 6", "none in 6 steps", "ended at step 0"]
    text = page.results_block([native, DENSE, r3], {})
    assert text.index("### Learning") < text.index("- r3-1 ended at") < text.index("### Costs")


def test_agreement_is_shown_for_arms_with_replay():
    table, *_ = page.agreement_parts([NATIVE, R3])
    assert table.headers == ("arm", "seed", "layer 0", "layer 1")
    assert table.rows == (("GRPO + R3", "1", "90.0%", "80.0%"),)
    assert page.agreement_parts([NATIVE]) == [
        "No arm replayed routes, so no agreement was measured."
    ]


def test_costs_are_added_up():
    table = page.cost_table({"policies": (60.0, 120.0), "r3-1": (90.0, 60.0)})
    assert table.rows[-1] == ("all", "2.5", "3.0")


@pytest.fixture
def needs_matplotlib():
    pytest.importorskip("matplotlib", reason="no matplotlib in this environment: make install")


@pytest.mark.usefixtures("needs_matplotlib")
def test_a_page_keeps_its_prose_and_has_its_plots(tmp_path):
    """Plots of the same numbers have the same bytes."""
    path = tmp_path / "mismatch.md"
    page.write_page(path, [NATIVE, R3, DENSE], {"r3-1": (90.0, 60.0)})
    path.write_text("User's prose.\n" + path.read_text())
    images = {image.name: image.read_bytes() for image in (tmp_path / page.IMAGES).iterdir()}
    page.write_page(path, [NATIVE, R3], {"r3-1": (90.0, 60.0)})
    page.write_page(path, [NATIVE, R3, DENSE], {"r3-1": (90.0, 60.0)})
    text = path.read_text()
    assert text.startswith("User's prose.\n")
    assert read_table(blocks_of(text)["results"]).headers[0] == "step 0"
    for name, image in images.items():
        assert f"]({page.IMAGES}/{name})" in text
        assert (tmp_path / page.IMAGES / name).read_bytes() == image
        assert ET.fromstring(image).tag.endswith("svg")
        assert len(image) < 60_000
    assert sorted(images) == sorted(
        f"{n}.svg" for n in ("kl", "extreme", "reward", "entropy", "grad_norm", "agreement")
    )


@pytest.mark.usefixtures("needs_matplotlib")
def test_a_page_can_be_written_without_results(tmp_path):
    page.write_page(tmp_path / "mismatch.md", [], {})
    assert "| all" in (tmp_path / "mismatch.md").read_text()
