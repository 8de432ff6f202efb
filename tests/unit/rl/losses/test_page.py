"""docs/algorithms.md lists every loss, and the settings that each loss reads."""

import re
from typing import get_args

import torch

from pipeline.rl.custom import LOSS, load_custom
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.aggregate import AggregationMode
from tests.paths import ROOT
from tests.unit.rl.losses.batches import ACTOR, make_tokens

PAGE = (ROOT / "docs/algorithms.md").read_text()


def rows(head: str) -> list[list[str]]:
    """Return the cells of the table whose first column has this heading."""
    lines = PAGE.split(f"| {head} |")[1].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_each_loss_has_a_row_with_its_settings():
    found = {
        re.findall(r"`(.+?)`", name)[0]: re.findall(r"`(.+?)`", reads)
        for name, _, reads, _ in rows("loss_mode")
    }
    assert found == {name: list(loss.reads) for name, loss in LOSSES.items()}


def test_each_aggregation_mode_has_a_row():
    assert [name.strip("`") for name, _ in rows("loss_agg_mode")] == list(get_args(AggregationMode))


def test_losses_with_a_fixed_mode_are_listed():
    own = [name for name, loss in LOSSES.items() if loss.aggregation]
    (said,) = re.findall(r"- (`\w+`(?:, `\w+`)* and `\w+`) are always aggregated with", PAGE)
    assert re.findall(r"`(\w+)`", said) == own


def test_the_example_loss_runs():
    """The example's loss has only an upper bound on the ratio."""
    (source,) = re.findall(r"### A loss\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    (name,) = re.findall(r"^def (\w+)\(", source, re.MULTILINE)
    tokens = make_tokens(0, weighted=True)
    made = load_custom(source.encode(), name, LOSS)(tokens, ACTOR)
    ratio_T = (tokens.logprobs_T - tokens.old_T).exp()
    expected_T = -tokens.advantages_T * ratio_T.clamp(max=1.3) * tokens.weights_T
    assert torch.allclose(made.loss_T, expected_T)
    assert torch.equal(made.reports["high"], ratio_T > 1.3)
    assert made.reports["high"].any()
