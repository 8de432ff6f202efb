"""Errors in a reward function name the sample; the sample never receives a score of 0 instead."""

import math
import re

import pytest

from pipeline.rl.rewards import RewardError, Score, load_reward, score

GOOD = b"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
SAMPLE = {
    "sample_id": "000003/17/2",
    "data_source": "add",
    "solution_str": "95",
    "ground_truth": "95",
    "extra_info": {"split": "train"},
}


def scored(body: str) -> Score:
    """Score SAMPLE with a function that has this body."""
    return score(load_reward(GOOD + b"    " + body.encode(), "compute_score"), **SAMPLE)


@pytest.mark.parametrize(
    ("body", "reward", "extras"),
    [
        ("return 1", 1.0, {}),
        ("return 0.25", 0.25, {}),
        ("return solution_str == ground_truth", 1.0, {}),
        ("return {'score': True, 'kind': extra_info['split']}", 1.0, {"kind": "train"}),
        ("return {'score': -1, 'parts': [1, 2.5, None]}", -1.0, {"parts": [1, 2.5, None]}),
        ("import numpy as np; return np.float32(0.5)", 0.5, {}),
    ],
)
def test_numbers_and_dicts_are_accepted(body, reward, extras):
    found = scored(body)
    assert found == Score(reward, extras)
    assert type(found.reward) is float


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "returned None (NoneType), expected a number, or a dict with"),
        ("return '1'", "returned '1' (str), expected a number"),
        ("return float('nan')", "returned nan, expected a finite number"),
        ("return {'score': float('inf')}", 'returned inf under "score", expected a finite'),
        ("return 10**400", "0, expected a finite number"),
        ("return 10**5000", "returned a int that cannot be shown, expected a finite number"),
        ("from fractions import Fraction; return Fraction(10**400)", "expected a finite number"),
        ("return {'score': 1, 'x': 10**5000}", "under 'x', which is not JSON"),
        ("x = []\n    for _ in range(100_000): x = [x]\n    return {'score': 1, 'x': x}",
         "under 'x', which is not JSON"),
        ("class E(Exception):\n        def __str__(self): 1 / 0\n    raise E",
         "raised E: a E that cannot be shown"),
        ("return {'score': None}", 'returned None (NoneType) under "score"'),
        ("return {'reward': 1}", "returned a dict with ['reward'], expected a key \"score\""),
        ("return {'score': 1, 'x': {1}}", "returned {1} under 'x', which is not JSON"),
        ("return {'score': 1, 'x': float('nan')}", "returned nan under 'x', which is not JSON"),
        ("return {'score': 1, 2: 3}", "an entry named 2, expected a string"),
        ("return 1 / 0", "raised ZeroDivisionError: division by zero; fix it, or set "
         "reward.on_error=mask"),
        ("import sys; sys.exit('bye')", "raised SystemExit: bye"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_other_results_raise_errors_that_name_the_sample(body, message):
    with pytest.raises(RewardError, match=re.escape(message)) as caught:
        scored(body)
    assert str(caught.value).startswith("sample 000003/17/2 (data source 'add'): ")


def test_the_error_keeps_its_cause():
    """The traceback then shows the line of the reward file that raised the exception."""
    with pytest.raises(RewardError) as caught:
        scored("return {}[ground_truth]")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "parameters",
    ["data_source, solution_str, ground_truth, extra_info, scale=1", "**kwargs",
     "ground_truth, *, data_source, solution_str, extra_info"],
)  # fmt: skip
def test_valid_signatures_are_accepted(parameters):
    function = load_reward(f"def f({parameters}): return 1".encode(), "f")
    assert score(function, **SAMPLE).reward == 1.0


def test_a_file_may_use_dataclasses_with_postponed_annotations():
    """Dataclasses look up their module in sys.modules."""
    source = b"""from __future__ import annotations
import dataclasses
@dataclasses.dataclass
class Part:
    value: float
def compute_score(**kwargs):
    return Part(0.5).value
"""
    assert math.isclose(score(load_reward(source, "compute_score"), **SAMPLE).reward, 0.5)


def test_a_file_may_declare_its_encoding():
    source = b"# -*- coding: latin-1 -*-\n" + GOOD + b"    return {'score': 1, 'x': '\xe9'}"
    assert score(load_reward(source, "compute_score"), **SAMPLE).extras == {"x": "é"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "found no function, expected one named compute_score; rename it, or set "
         "custom_reward_function.name"),
        ("def a(): 1\ndef b(): 1", "found functions a, b, expected one named compute_score"),
        ("compute_score = 3", "found no function, expected one named"),
        ("def compute_score(text, answer): return 1", "compute_score has the parameters (text, "
         "answer), but is called with data_source=, solution_str=, ground_truth=, extra_info=; "
         "use these names, with **kwargs"),
        ("async def compute_score(**kwargs): return 1", "compute_score is async; expected a plain"),
        ("import helpers_beside_it", "it imports 'helpers_beside_it', which is not installed; a "
         "reward file must be self-contained"),
        ("1 +", "running it raised SyntaxError"),
        ("raise ValueError('x')", "running it raised ValueError: x"),
        ("raise KeyboardInterrupt", "running it raised KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_refused(source, message):
    with pytest.raises(RewardError, match=re.escape(message)) as caught:
        load_reward(source.encode(), "compute_score")
    assert str(caught.value).startswith("reward file: ")
