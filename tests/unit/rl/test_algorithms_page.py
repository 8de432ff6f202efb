"""docs/algorithms.md contains the table generated from the code; the page's example is valid."""

import re

import numpy as np

from pipeline.rl.custom import ESTIMATOR, load_custom
from tests.algorithms_page import PAGE, render
from tests.unit.rl.estimators.steps import Settings, random_step


def test_the_table_is_generated_from_the_code():
    page = PAGE.read_text()
    assert render(page) == page, "run `python -m tests.algorithms_page`"


def test_the_example_of_an_estimator_runs():
    (source,) = re.findall(r"### An estimator\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    function = load_custom(source.encode(), "centred", ESTIMATOR)
    step = random_step(np.random.default_rng(1), 9)
    advantages_T = function(step, Settings()).advantages_T
    known_T = ~np.isnan(step.of_tokens(step.rewards_N))
    rewards = step.rewards_N[~np.isnan(step.rewards_N)]
    expected_T = step.of_tokens(step.rewards_N) - rewards.mean()
    assert np.allclose(advantages_T[known_T], expected_T[known_T])
