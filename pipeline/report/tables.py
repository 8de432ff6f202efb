"""Metrics as tables for people: one row while running, one table at the end."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.report.metrics import Metrics, StepMetrics


@dataclass(frozen=True)
class Column:
    """One column: a metric, its heading and its format."""

    key: str
    heading: str
    form: str

    def text(self, values: Metrics) -> str:
        """The metric as text; an em dash where it was not measured."""
        value = values.get(self.key)
        return "—" if value is None else format(value, self.form)


COLUMNS = (
    Column("reward/mean", "reward", ".3f"),
    Column("mismatch/kl", "KL", ".1e"),
    Column("mismatch/kl_native", "KL native", ".1e"),
    Column("replay/coverage", "coverage", ".1%"),
    Column("replay/agreement", "agree", ".1%"),
    Column("time/rollout_s", "rollout s", ".1f"),
    Column("time/train_s", "train s", ".1f"),
)


def closing_table(steps: Sequence[StepMetrics], validation: dict[int, float]) -> Table:
    """All steps of a run, narrow enough for 80 characters.

    `validation` maps policy versions to mean rewards; a step's row shows that of the policy it
    started from, the last row that of the policy it ended with.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("step", justify="right")
    for column in COLUMNS:
        table.add_column(column.heading, justify="right")
    table.add_column("val", justify="right")
    for step in steps:
        cells = [column.text(step.values) for column in COLUMNS]
        table.add_row(str(step.step + 1), *cells, _validation_text(validation, step.step))
    if (last := len(steps)) in validation:
        table.add_row("end", *["" for _ in COLUMNS], _validation_text(validation, last))
    return table


def step_line(step: StepMetrics, total: int) -> str:
    """One line for a finished step."""
    parts = [f"{column.heading} {column.text(step.values)}" for column in COLUMNS]
    return f"step {step.step + 1}/{total}  " + "  ".join(p for p in parts if not p.endswith("—"))


def _validation_text(validation: dict[int, float], version: int) -> str:
    value = validation.get(version)
    return "" if value is None else f"{value:.3f}"
