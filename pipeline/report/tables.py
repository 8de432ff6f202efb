"""Metrics as tables for people: one row while running, one table at the end."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    Column("mismatch/kl", "KL replayed", ".2e"),
    Column("mismatch/kl_native", "KL native", ".2e"),
    Column("mismatch/extreme_share", "extreme", ".2%"),
    Column("mismatch/extreme_share_native", "extreme native", ".2%"),
    Column("replay/coverage", "coverage", ".1%"),
    Column("replay/agreement", "agreement", ".1%"),
    Column("response/length_mean", "length", ".1f"),
    Column("grad_norm", "grad norm", ".3f"),
    Column("time/rollout_s", "rollout s", ".1f"),
    Column("time/train_s", "train s", ".1f"),
)


def closing_table(steps: Sequence[StepMetrics], validation: dict[int, float]) -> Table:
    """All steps of a run; `validation` maps policy versions to mean rewards."""
    table = Table(title="Training", title_justify="left")
    table.add_column("step", justify="right")
    for column in COLUMNS:
        table.add_column(column.heading, justify="right")
    if validation:
        table.add_column("validation", justify="right")
    for step in steps:
        row = [str(step.step), *(column.text(step.values) for column in COLUMNS)]
        if validation:
            row.append(_validation_text(validation, step.step))
        table.add_row(*row)
    if validation and (last := len(steps)) in validation:
        blanks = ["" for _ in COLUMNS]
        table.add_row("end", *blanks, _validation_text(validation, last))
    return table


def step_line(step: StepMetrics, total: int) -> str:
    """One line for a finished step."""
    parts = [f"{column.heading} {column.text(step.values)}" for column in COLUMNS]
    return f"step {step.step + 1}/{total}  " + "  ".join(p for p in parts if not p.endswith("—"))


def _validation_text(validation: dict[int, float], version: int) -> str:
    value = validation.get(version)
    return "" if value is None else f"{value:.3f}"
