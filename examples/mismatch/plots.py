"""The plots of the page, as small SVG files: a metric per step or layer, with one line per run."""

from collections.abc import Iterable
from pathlib import Path

from examples.mismatch.results import Result

COLORS = {
    "native": "#d62728",
    "tis": "#ff7f0e",
    "gspo": "#9467bd",
    "mis": "#8c564b",
    "r3": "#1f77b4",
    "gspo-r3": "#17becf",
    "r2": "#2ca02c",
    "r3-tis": "#e377c2",
    "dense": "#7f7f7f",
}
"""The colour of each arm in all plots."""


def plot_by_step(
    path: Path, results: Iterable[Result], metric: str, title: str, log: bool = False
) -> None:
    """Plot a metric of all runs against the step, with one colour per arm.

    Args:
        path: The SVG file.
        results: The results of the runs.
        metric: The name of the metric. Steps that did not measure it appear as gaps.
        title: The title of the plot.
        log: Whether the value axis is logarithmic. Values of 0 or less then also appear as gaps.
    """
    figure, axes = _axes(title)
    named: set[str] = set()
    for result in results:
        name = result.run.arm.name
        values = [
            float("nan") if value is None or (log and value <= 0) else value
            for value in result.values(metric)
        ]
        label = None if name in named else result.run.arm.label
        axes.plot(values, color=COLORS[name], label=label, linewidth=1.4)
        named.add(name)
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    _save(figure, axes, path)


def plot_agreement(path: Path, results: Iterable[Result]) -> None:
    """Plot each layer's mean agreement over steps, with one line per run that replayed routes."""
    figure, axes = _axes("agreement by layer: rows where the router chooses the recorded experts")
    named: set[str] = set()
    for result in results:
        shares = mean_agreement(result)
        if shares:
            name = result.run.arm.name
            label = None if name in named else result.run.arm.label
            axes.plot(
                list(shares), list(shares.values()), color=COLORS[name], label=label, marker="o"
            )
            named.add(name)
    axes.set_xlabel("MoE layer")
    _save(figure, axes, path)


def mean_agreement(result: Result) -> dict[int, float]:
    """Return each layer's mean agreement over the steps with replay; empty if there are none."""
    steps = [shares for shares in result.agreement_by_layer if shares]
    return {
        layer: sum(s[layer] for s in steps) / len(steps) for layer in (steps[0] if steps else ())
    }


def _axes(title: str):
    import matplotlib

    matplotlib.use("svg")
    # Store text as text and use reproducible ids, so that files are small and can be compared.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "retrace"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure, axes, path: Path) -> None:
    from matplotlib import pyplot

    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
