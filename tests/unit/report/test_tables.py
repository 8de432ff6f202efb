"""The tables and lines that show a run to users."""

from pipeline.report.run_metrics import StepMetrics
from pipeline.report.tables import closing_table, step_line
from tests.unit.report.values import VALUES, text_of


def test_the_closing_table_fits_80_characters_and_marks_unmeasured_values():
    steps = [StepMetrics(0, VALUES), StepMetrics(1, VALUES)]
    text = text_of(closing_table(steps, {0: 0.25, 2: 0.75}))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    first, second, end = [line.split() for line in text.splitlines() if "0." in line]
    assert first[:4] == ["0", "0.500", "1.5e-03", "—"]
    assert (first[-1], second[-1], end[-1]) == ("0.250", "12.3", "0.750")


def test_the_line_of_a_step_omits_unmeasured_values():
    line = step_line(StepMetrics(1, VALUES), 8)
    assert line.startswith("step 1 of 8")
    assert "reward 0.500" in line
    assert "native" not in line


def test_the_line_of_a_step_reports_routes_that_do_not_fit():
    line = step_line(StepMetrics(1, {**VALUES, "replay/unhealthy": 2}), 8)
    assert line.endswith("routes that do not fit (2 findings, see the training log)")
    assert "fit" not in step_line(StepMetrics(1, {**VALUES, "replay/unhealthy": 0}), 8)


def test_the_line_of_a_step_reports_skipped_mini_batches():
    line = step_line(StepMetrics(1, {**VALUES, "update/skipped": 1}), 8)
    assert line.endswith("skipped 1 mini-batches (gradients not finite)")
    line = step_line(StepMetrics(1, {**VALUES, "update/skipped_empty": 2}), 8)
    assert line.endswith("skipped 2 mini-batches (no token in the loss)")
    none = {"update/skipped": 0, "update/skipped_empty": 0}
    assert "skipped" not in step_line(StepMetrics(1, {**VALUES, **none}), 8)


def test_the_line_of_a_step_omits_shares_of_samples_that_are_zero():
    counts = {"reward/masked": 25, "response_length/clip_ratio": 0, "response/aborted_ratio": None}
    line = step_line(StepMetrics(1, {**VALUES, "response/count": 64, **counts}), 8)
    assert line.endswith("train s 12.3, masked 39.1% (25 of 64)")
    counts = {
        "reward/masked": 0,
        "response_length/clip_ratio": 1.0,
        "response/aborted_ratio": 1 / 64,
    }
    line = step_line(StepMetrics(1, {**VALUES, "response/count": 64, **counts}), 8)
    assert line.endswith("train s 12.3, truncated 100.0% (64 of 64), aborted 1.6% (1 of 64)")
    without_count = step_line(StepMetrics(1, {**VALUES, "reward/masked": 25}), 8)
    assert without_count.endswith("train s 12.3")
