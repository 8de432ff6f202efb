"""The tables and lines that people see of a run."""

from pipeline.report.run_metrics import StepMetrics
from pipeline.report.tables import closing_table, step_line
from tests.unit.report.values import VALUES, text_of


def test_the_closing_table_fits_80_characters_and_shows_what_was_not_measured():
    steps = [StepMetrics(0, VALUES), StepMetrics(1, VALUES)]
    text = text_of(closing_table(steps, {0: 0.25, 2: 0.75}))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    first, second, end = [line.split() for line in text.splitlines() if "0." in line]
    assert first[:4] == ["0", "0.500", "1.5e-03", "—"]
    assert (first[-1], second[-1], end[-1]) == ("0.250", "12.3", "0.750")


def test_the_line_of_a_step_leaves_out_what_was_not_measured():
    line = step_line(StepMetrics(1, VALUES), 8)
    assert line.startswith("step 1 of 8")
    assert "reward 0.500" in line
    assert "native" not in line


def test_the_line_of_a_step_says_when_routes_did_not_fit():
    line = step_line(StepMetrics(1, {**VALUES, "replay/unhealthy": 2}), 8)
    assert line.endswith("routes that do not fit (2 findings, see the training log)")
    assert "fit" not in step_line(StepMetrics(1, {**VALUES, "replay/unhealthy": 0}), 8)


def test_the_line_of_a_step_says_what_was_skipped():
    line = step_line(StepMetrics(1, {**VALUES, "update/skipped": 1}), 8)
    assert line.endswith("skipped 1 mini-batches (gradients not finite)")
    line = step_line(StepMetrics(1, {**VALUES, "update/skipped_empty": 2}), 8)
    assert line.endswith("skipped 2 mini-batches (no token that counts)")
    none = {"update/skipped": 0, "update/skipped_empty": 0}
    assert "skipped" not in step_line(StepMetrics(1, {**VALUES, **none}), 8)


def test_the_line_of_a_step_has_shares_of_samples_where_they_are_not_zero():
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
    of_an_older_version = step_line(StepMetrics(1, {**VALUES, "reward/masked": 25}), 8)
    assert of_an_older_version.endswith("train s 12.3")
