"""examples/mismatch: the page says what the arms' numbers are, and has plots of them."""

import xml.etree.ElementTree as ET

import pytest

from benchmarks.page import blocks_of, read_table
from examples.mismatch import page, results
from examples.mismatch.arms import ARMS, ArmRun
from examples.mismatch.results import Result
from tests.paths import ROOT

ARM = {arm.name: arm for arm in ARMS}
LAYERS = {0: 0.9, 1: 0.8}


def result(name: str, rewards: list[float], seed: int = 1, **metrics: list[float | None]) -> Result:
    """A run with these rewards; other metrics by the name of their constant in results.py."""
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


def test_step_0_is_native_replayed_and_dense_beside_the_paper():
    table = page.first_step_table([NATIVE, R3, DENSE])
    assert table.rows == (
        ("native", "5.0e-04", "1.0e-03", "1.5e-03"),
        ("with R3", "1.0e-04", "0.0e+00", "7.5e-04"),
        ("dense twin", "5.0e-05", "0.0e+00", "6.4e-04"),
    )
    assert page.first_step_table([NATIVE]).rows[0] == table.rows[0], "without R3: GRPO's own"


def test_mismatch_is_of_the_steps_that_measured_it():
    native, r3 = page.mismatch_table([NATIVE, R3]).rows
    assert native == ("GRPO", "5.0e-04", "5.0e-04", "-", "1.0e-03", "1.0e-03", "-")
    assert r3 == ("GRPO + R3", "1.5e-04", "3.0e-04", "6.0e-04", "0.0e+00", "0.0e+00", "2.0e-03")


def test_learning_with_the_papers_arm_beside_it():
    native, r3 = page.learning_table([NATIVE, R3]).rows
    assert native[:4] == ("GRPO", "0.500", "0.600", "0.100")
    assert native[-2:] == ("step 5", "48.8, collapsed at step 120")
    assert r3[1:] == (
        *("0.500", "0.800", "0.800", "0.125", "1.500", "1.0%", "none in 6"),
        "68.1, no collapse in 180 steps",
    )


def test_seeds_are_shown_as_mean_and_range():
    other = result("r3", [0.3, 0.3], seed=2, KL=[3e-4, 3e-4])
    [row] = page.mismatch_table([R3, other]).rows
    assert row[1] == "2.2e-04 (1.5e-04 to 3.0e-04)"
    assert page.learning_table([R3, other]).rows[0][-2] == "none in 6, none in 2"


def test_agreement_is_of_arms_that_replayed():
    table, *_ = page.agreement_parts([NATIVE, R3])
    assert table.headers == ("arm", "seed", "layer 0", "layer 1")
    assert table.rows == (("GRPO + R3", "1", "90.0%", "80.0%"),)
    assert page.agreement_parts([NATIVE]) == ["No arm replayed, so nothing was compared."]


def test_costs_are_added():
    table = page.cost_table({"policies": (60.0, 120.0), "r3-1": (90.0, 60.0)})
    assert table.rows[-1] == ("all", "2.5", "3.0")


@pytest.fixture
def needs_matplotlib():
    pytest.importorskip("matplotlib", reason="no matplotlib in this environment: make install")


@pytest.mark.usefixtures("needs_matplotlib")
def test_a_page_keeps_its_prose_and_has_its_plots(tmp_path):
    """The plots are the same bytes each time, so a page made anew differs where numbers do."""
    path = tmp_path / "mismatch.md"
    page.write_page(path, [NATIVE, R3, DENSE], {"r3-1": (90.0, 60.0)})
    path.write_text("My words.\n" + path.read_text())
    images = {image.name: image.read_bytes() for image in (tmp_path / page.IMAGES).iterdir()}
    page.write_page(path, [NATIVE, R3], {"r3-1": (90.0, 60.0)})
    page.write_page(path, [NATIVE, R3, DENSE], {"r3-1": (90.0, 60.0)})
    text = path.read_text()
    assert text.startswith("My words.\n")
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
def test_a_page_of_arms_without_a_step(tmp_path):
    page.write_page(tmp_path / "mismatch.md", [], {})
    assert "| all" in (tmp_path / "mismatch.md").read_text()
