"""Metrics for users: a line for each finished step, and a table at the end of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.metrics.metric import Metrics
from pipeline.report.run_metrics import StepMetrics


@dataclass(frozen=True)
class Column:
    """A column of the closing table: a metric, its heading and its format."""

    key: str
    heading: str
    form: str

    def text(self, values: Metrics) -> str:
        """Return the metric as text; an em dash if it was not measured."""
        value = values.get(self.key)
        return "—" if value is None else format(value, self.form)


COLUMNS = (
    Column("critic/rewards/mean", "reward", ".3f"),
    Column("mismatch/kl", "KL", ".1e"),
    Column("mismatch/kl_native", "KL native", ".1e"),
    Column("replay/coverage", "coverage", ".1%"),
    Column("replay/agreement", "agree", ".1%"),
    Column("timing_s/gen", "rollout s", ".1f"),
    Column("timing_s/train", "train s", ".1f"),
)

SHARES = {"truncated": "response_length/clip_ratio", "aborted": "response/aborted_ratio"}
"""Metrics that are shares of samples, keyed by the name that a step's line gives them.

The line omits shares that are zero.
"""

NOTES = {
    "update/skipped": "skipped {:.0f} mini-batches (gradients not finite)",
    "update/skipped_empty": "skipped {:.0f} mini-batches (no token in the loss)",
    "replay/unhealthy": "routes that do not fit ({:.0f} findings, see the training log)",
}
"""Texts about metrics that are zero in a healthy step, keyed by metric."""

SHOWN_STEPS = 100
"""Maximum number of rows in Prefect's table, limited because each step sends all rows."""


def recent_table(recent: Sequence[StepMetrics], uri: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of the table in Prefect's UI, and a line that describes them.

    Args:
        recent: The newest finished steps of the run: at least one, at most SHOWN_STEPS.
        uri: The run's root in the store.
    """
    rows = [{"step": step.step, **step.values} for step in recent]
    finished = recent[-1].step + 1
    note = f"The newest {len(rows)} of {finished} finished steps; all in {uri}/steps/*/metrics.json"
    return rows, note


def closing_table(steps: Sequence[StepMetrics], validation: Mapping[int, float | None]) -> Table:
    """Return a table of all steps of a run, at most 80 characters wide.

    Args:
        steps: The finished steps, from step 0 on.
        validation: Mean validation rewards, by policy version. A step's row shows the reward of the
            version that the step starts with; the last row shows the reward of the final version.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("step", justify="right")
    for column in COLUMNS:
        table.add_column(column.heading, justify="right")
    table.add_column("val", justify="right")
    for step in steps:
        cells = [column.text(step.values) for column in COLUMNS]
        table.add_row(str(step.step), *cells, _validation_text(validation, step.step))
    if (last := len(steps)) in validation:
        table.add_row("end", *["" for _ in COLUMNS], _validation_text(validation, last))
    return table


def summary(steps: Sequence[StepMetrics], validation: Mapping[int, float | None]) -> list[str]:
    """Return lines about a run's results: the rewards at its start and end, and its mismatch.

    Args:
        steps: The finished steps, from step 0 on.
        validation: Mean validation rewards, by policy version.

    Returns:
        Up to three lines. Lines about metrics that were not measured are omitted.
    """
    lines = []
    if steps:
        first, last = (step.values.get("critic/rewards/mean") for step in (steps[0], steps[-1]))
        lines.append(f"reward   {reward_text(first)} in step 0, {reward_text(last)} in the last")
    if len(validation) > 1:
        first, last = validation[min(validation)], validation[max(validation)]
        lines.append(f"val      {reward_text(first)} before, {reward_text(last)} after training")
    both = [
        (kl, native)
        for step in steps
        if (kl := step.values.get("mismatch/kl")) is not None
        and (native := step.values.get("mismatch/kl_native")) is not None
    ]
    if both:
        kl, native = (sum(column) / len(both) for column in zip(*both, strict=True))
        lines.append(
            f"mismatch KL(engine, trainer) per token, mean of {len(both)} steps: {kl:.1e} as "
            f"trained, {native:.1e} with native routing"
        )
    return lines


def step_line(step: StepMetrics, total: int) -> str:
    """Return the line about a finished step; the run has `total` steps.

    The line includes the shares of truncated, aborted and masked samples, if they are not zero.
    """
    parts = [f"{column.heading} {column.text(step.values)}" for column in COLUMNS]
    shown = [part for part in parts if not part.endswith("—")]
    measured = {name: value for name, value in step.values.items() if value}
    if samples := measured.get("response/count"):  # older versions did not store the count
        shares = {"masked": measured.get("reward/masked", 0.0) / samples}
        shares |= {name: measured.get(key, 0.0) for name, key in SHARES.items()}
        for name, share in shares.items():
            if share:
                shown.append(f"{name} {share:.1%} ({share * samples:.0f} of {samples:.0f})")
    shown += [text.format(measured[name]) for name, text in NOTES.items() if name in measured]
    return f"step {step.step} of {total}: {', '.join(shown)}"


def _validation_text(validation: Mapping[int, float | None], version: int) -> str:
    return reward_text(validation[version]) if version in validation else ""


def reward_text(reward: float | None) -> str:
    """Return a mean reward as text; an em dash if no sample had a reward."""
    return "—" if reward is None else f"{reward:.3f}"
