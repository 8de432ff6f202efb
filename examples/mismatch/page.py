"""The page: tables and plots of what the arms left, the paper's figures beside them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.page import Table, block, with_blocks
from examples.mismatch import paper, results
from examples.mismatch.plots import mean_agreement, plot_agreement, plot_by_step
from examples.mismatch.results import Result

IMAGES = "images/mismatch"
"""Folder of the plots, beside the page."""
NEW_PAGE = """\
# What replay does about the mismatch

Made by `python -m examples.mismatch`; docs/mismatch.md explains the tables.

<!-- generated: results -->
<!-- end: results -->
"""
NONE = "-"


def write_page(
    page: Path, found: Sequence[Result], costs: Mapping[str, tuple[float, float]]
) -> None:
    """Write the plots and the generated block of a page; its prose, if it has any, stays."""
    draw(page.parent / IMAGES, found)
    text = page.read_text() if page.is_file() else NEW_PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(with_blocks(text, {"results": results_block(found, costs)}))


def draw(folder: Path, found: Sequence[Result]) -> None:
    """All plots."""
    for name, metric, title, log in (
        ("kl", results.KL, "KL(engine, trainer) per response token, as trained", True),
        ("extreme", results.EXTREME, "share of extreme tokens, as trained", True),
        ("reward", results.REWARD, "mean reward", False),
        ("entropy", results.ENTROPY, "entropy, nats per token", False),
        ("grad_norm", results.GRAD_NORM, "gradient norm, mean of the step's updates", True),
    ):
        plot_by_step(folder / f"{name}.svg", found, metric, title, log)
    plot_agreement(folder / "agreement.svg", found)


def results_block(found: Sequence[Result], costs: Mapping[str, tuple[float, float]]) -> str:
    """The generated part of the page."""
    return block(
        "### The policy before training",
        first_step_table(found),
        "### Mismatch while training",
        mismatch_table(found),
        f"![KL]({IMAGES}/kl.svg)",
        f"The paper: {paper.KL_NATIVE:.3e} without R3, {paper.KL_R3:.1e} with it, "
        f"{paper.KL_DENSE:.1e} of a dense model.",
        f"![extreme tokens]({IMAGES}/extreme.svg)",
        f"The paper: R3 makes extreme tokens {paper.FEWER_EXTREME} times rarer; with it their "
        f"share mostly stays below {paper.EXTREME_R3:.0e}, and without it passes "
        f"{paper.EXTREME_COLLAPSE:g} where GRPO collapses.",
        "### Agreement by layer",
        *agreement_parts(found),
        "### Learning",
        learning_table(found),
        f"![reward]({IMAGES}/reward.svg)",
        f"![entropy]({IMAGES}/entropy.svg)",
        f"The paper: {paper.DYNAMICS['entropy']}.",
        f"![gradient norm]({IMAGES}/grad_norm.svg)",
        f"The paper: {paper.DYNAMICS['grad_norm']}.",
        "### What it took",
        cost_table(costs),
    )


def first_step_table(found: Sequence[Result]) -> Table:
    """Step 0: every arm of a seed samples the same tokens from the same policy."""

    def first(name: str, metric: str) -> float | None:
        values = [r.values(metric)[0] for r in found if r.run.arm.name == name]
        measured = [value for value in values if value is not None]
        return float(np.mean(measured)) if measured else None

    # Arms without replay have measured the same, natively.
    native = first("r3", results.KL_NATIVE), first("r3", results.EXTREME_NATIVE)
    if native[0] is None:
        native = first("native", results.KL), first("native", results.EXTREME)
    rows = []
    for what, kl, extreme, theirs in (
        ("native", *native, paper.KL_NATIVE),
        ("with R3", first("r3", results.KL), first("r3", results.EXTREME), paper.KL_R3),
        ("dense twin", first("dense", results.KL), first("dense", results.EXTREME), paper.KL_DENSE),
    ):
        rows.append((what, _power(kl), _power(extreme), _power(theirs)))
    return Table(("step 0", "KL", "extreme tokens", "KL in the paper"), tuple(rows))


def mismatch_table(found: Sequence[Result]) -> Table:
    """Over the whole run; native: the second pass that arms with R3 make for comparison."""
    rows = [
        (
            of_arm[0].run.arm.label,
            _over(of_arm, results.KL, np.mean, _power),
            _over(of_arm, results.KL, np.max, _power),
            _over(of_arm, results.KL_NATIVE, np.mean, _power),
            _over(of_arm, results.EXTREME, np.mean, _power),
            _over(of_arm, results.EXTREME, np.max, _power),
            _over(of_arm, results.EXTREME_NATIVE, np.mean, _power),
        )
        for of_arm in by_arm(found)
    ]
    headers = ("arm", "KL, mean", "KL, highest", "KL native, mean")
    headers += ("extreme, mean", "extreme, highest", "extreme native, mean")
    return Table(headers, tuple(rows))


def agreement_parts(found: Sequence[Result]) -> list[Table | str]:
    """Table and plot of agreement; a sentence where no arm replayed."""
    replayed = [(r, shares) for r in found if (shares := mean_agreement(r))]
    if not replayed:
        return ["No arm replayed, so nothing was compared."]
    layers = list(replayed[0][1])
    rows = tuple(
        (r.run.arm.label, str(r.run.seed), *(f"{shares[layer]:.1%}" for layer in layers))
        for r, shares in replayed
    )
    tokens = f"{paper.ROUTERS_DIFFER:.0%} of a token's layers choose other experts in the trainer"
    return [
        Table(("arm", "seed", *(f"layer {layer}" for layer in layers)), rows),
        f"![agreement]({IMAGES}/agreement.svg)",
        f"The paper: {tokens}, which is an agreement of {1 - paper.ROUTERS_DIFFER:.0%}.",
    ]


def learning_table(found: Sequence[Result]) -> Table:
    """Reward, entropy, gradient norm, collapse."""
    rows = [
        (
            of_arm[0].run.arm.label,
            _over(of_arm, results.REWARD, lambda rewards: rewards[0], _share),
            _over(of_arm, results.REWARD, _best, _share),
            _over(of_arm, results.REWARD, _last, _share),
            _over(of_arm, results.ENTROPY, lambda values: values[-1], _share),
            _over(of_arm, results.GRAD_NORM, np.mean, _share),
            _over(of_arm, results.CLIPPED, np.mean, _percent),
            ", ".join(_collapse(r) for r in of_arm),
            paper.ARMS.get(of_arm[0].run.arm.name, NONE),
        )
        for of_arm in by_arm(found)
    ]
    headers = ("arm", "reward, first", "best 3 steps", "last 3 steps", "entropy, last")
    headers += ("gradient norm", "clipped", "collapse", "the paper: score, collapse")
    return Table(headers, tuple(rows))


def cost_table(costs: Mapping[str, tuple[float, float]]) -> Table:
    """Minutes by part."""
    total = (sum(wall for wall, _ in costs.values()), sum(cpu for _, cpu in costs.values()))
    rows = tuple(
        (name, f"{wall / 60:.1f}", f"{processor / 60:.1f}")
        for name, (wall, processor) in {**costs, "all": total}.items()
    )
    return Table(("part", "minutes", "processor minutes"), rows)


def by_arm(found: Sequence[Result]) -> list[list[Result]]:
    """The seeds of each arm together, arms in their order."""
    arms = dict.fromkeys(result.run.arm.name for result in found)
    return [[result for result in found if result.run.arm.name == name] for name in arms]


def _best(rewards: Sequence[float]) -> float:
    return max(results.moving_means(rewards), default=float(np.mean(rewards)))


def _last(rewards: Sequence[float]) -> float:
    return float(np.mean(rewards[-results.WINDOW :]))


def _collapse(result: Result) -> str:
    return f"none in {result.steps}" if result.collapse is None else f"step {result.collapse}"


def _over(
    of_arm: Sequence[Result],
    metric: str,
    number: Callable[[list[float]], float],
    shown: Callable[[float | None], str],
) -> str:
    """A number of each seed's steps: the mean over seeds, with the range if there are several."""
    numbers = [float(number(values)) for r in of_arm if (values := r.measured(metric))]
    if not numbers:
        return NONE
    mean = shown(float(np.mean(numbers)))
    return mean if len(numbers) == 1 else f"{mean} ({shown(min(numbers))} to {shown(max(numbers))})"


def _power(value: float | None) -> str:
    return NONE if value is None else f"{value:.1e}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"
