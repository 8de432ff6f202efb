"""Errors in a reward function name the sample; the sample never receives a score of 0 instead."""

import json
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
        ("import numpy as np; return np.bool_(True)", 1.0, {}),
        ("import numpy as np; return np.int64(3)", 3.0, {}),
        ("import numpy as np; return np.array(2.5)", 2.5, {}),
        ("import numpy as np; return {'score': np.array([-1.0])}", -1.0, {}),
        ("import torch; return torch.tensor(0.5, dtype=torch.bfloat16)", 0.5, {}),
        ("import torch; return {'score': torch.tensor([1]), 'x': torch.ones(2)}",
         1.0, {"x": [1.0, 1.0]}),
        ("import numpy as np; return {'score': 1, 'b': np.bool_(False), 'i': np.int64(2), "
         "'s': np.str_('a'), 'a': np.arange(4).reshape(2, 2), 'none': None, "
         "'in': {'x': [np.float32(0.5)], np.int64(7): (np.array(1), None)}}",
         1.0, {"b": False, "i": 2, "s": "a", "a": [[0, 1], [2, 3]], "none": None,
               "in": {"x": [0.5], 7: [1, None]}}),
        ("import numpy as np; return {'score': 1, 'o': np.array([{'x': np.int64(1)}, None])}",
         1.0, {"o": [{"x": 1}, None]}),
    ],
)  # fmt: skip
def test_numbers_and_dicts_are_accepted(body, reward, extras):
    """Scalars and arrays of numpy and torch count as numbers and lists."""
    found = scored(body)
    assert found == Score(reward, extras, {})
    assert type(found.reward) is float
    json.dumps(found.extras)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("{1}", "set"), ("float('nan')", "float"), ("[1.0, float('inf')]", "list"),
        ("10**5000", "int"), ("b'x'", "bytes"), ("object()", "object"),
        ("__import__('numpy').array([1.0, float('nan')])", "ndarray"),
        ("__import__('numpy').datetime64('2024-01-01')", "datetime64"),
        ("__import__('numpy').float32('nan')", "float32"),
        ("__import__('functools').reduce(lambda x, _: [x], range(100_000), [])", "list"),
        ("type('Odd', (), {'tolist': lambda self: self})()", "Odd"),
    ],
)  # fmt: skip
def test_values_that_are_not_json_are_left_out(value, kind):
    found = scored(f"return {{'score': 1, 'kept': 2, 'x': {value}}}")
    assert (found.reward, found.extras) == (1.0, {"kept": 2})
    assert found.left_out.keys() == {"x"}
    assert found.left_out["x"].startswith(f"{kind}: ")


def test_values_without_a_name_are_left_out():
    assert scored("return {'score': 1, 2: 3}").left_out.keys() == {"2"}


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
        ("class E(Exception):\n        def __str__(self): 1 / 0\n    raise E",
         "raised E: a E that cannot be shown"),
        ("return {'score': None}", 'returned None (NoneType) under "score"'),
        ("return {'reward': 1}", "returned a dict with ['reward'], expected a key \"score\""),
        ("return 1 / 0", "raised ZeroDivisionError: division by zero (<reward file>, line 2)"),
        ("import numpy as np; return np.array([1, 2])", "returned array([1, 2]) (ndarray)"),
        ("import numpy as np; return np.float32('nan')", "returned np.float32(nan), expected a"),
        ("import torch; return torch.ones(2)", "returned tensor([1., 1.]) (Tensor)"),
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
        ("import helpers_beside_it", "it imports 'helpers_beside_it', which is not installed; "
         "put the module next to the reward file, or install the package"),
        ("1 +", "running it raised SyntaxError"),
        ("raise ValueError('x')", "running it raised ValueError: x"),
        ("raise KeyboardInterrupt", "running it raised KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_refused(source, message):
    with pytest.raises(RewardError, match=re.escape(message)) as caught:
        load_reward(source.encode(), "compute_score")
    assert str(caught.value).startswith("reward file: ")
