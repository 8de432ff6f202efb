"""A user's file is run, and refused unless it has the function with the parameters of its kind."""

import re

import pytest

from pipeline.rl.custom import ESTIMATOR, CustomError, is_absent_here, load_custom
from pipeline.rl.rewards import REWARD, RewardError

GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1\n"
CALL = "compute_score(data_source, solution_str, ground_truth, extra_info)"


@pytest.mark.parametrize(
    "source",
    [
        GOOD,
        "def compute_score(**kwargs): return 1",
        "def compute_score(ground_truth, *, data_source, solution_str, extra_info): return 1",
        "def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1): 1",
        "compute_score = lambda data_source, solution_str, ground_truth, extra_info: 1",
        GOOD.replace("compute_score", "f") + "compute_score = f",
        "import functools\n@functools.cache\n" + GOOD,
        "globals()['compute_score'] = lambda **sample: 1",
        "if True:\n    " + GOOD,
        "class A:\n    def __call__(self, **sample): 1\ncompute_score = A()",
        "def compute_score(wrong): 1\n" + GOOD,
        "# -*- coding: latin-1 -*-\n" + GOOD,
        "try:\n    import not_there\nexcept ImportError:\n    pass\n" + GOOD,
        "if False:\n    import not_there\n" + GOOD,
    ],
)
def test_valid_files_are_accepted(source):
    assert callable(load_custom(source.encode(), "compute_score", REWARD))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "found no function, expected one named compute_score; rename it, or set "
         "custom_reward_function.name"),
        ("def b(): 1\nif True:\n    def a(): 1", "found functions a, b, expected one named"),
        ("class A:\n    def compute_score(self): 1", "found no function, expected one named"),
        ("compute_score = 3", "found no function, expected one named compute_score"),
        (GOOD + "compute_score = None", "found no function, expected one named compute_score"),
        ("import json as compute_score", "found no function, expected one named compute_score"),
        ("def compute_score(text, answer): 1", "compute_score has the parameters (text, answer), "
         "but is called with data_source=, solution_str=, ground_truth=, extra_info=; use these "
         "names, with **kwargs for unused ones"),
        ("def compute_score(text, n=3): 1", "compute_score has the parameters (text, n=3), but"),
        ("compute_score = lambda: 1", "compute_score has the parameters (), but is called"),
        ("def f(a): 1\ncompute_score = f", "compute_score has the parameters (a), but is"),
        ("def compute_score(*args): 1", "has the parameters (*args), but is called with data_so"),
        ("def compute_score(data_source, /, **rest): 1", "(data_source, /, **rest), but is"),
        ("async def compute_score(**kwargs): 1", f"is async; expected a plain function {CALL}"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("\0", "source code string cannot contain null bytes"),
        ("\n\nraise KeyError('a')", "running it raised KeyError: 'a' (<reward file>, line 3)"),
        ("import json; json.loads('')", "Expecting value: line 1 column 1 (char 0) (<reward file>, "
         "line 1)"),
        ("import sys; sys.exit(3)", "running it raised SystemExit: 3"),
        ("import not_there.x", "it imports 'not_there', which is not installed; put the module"),
    ],
)  # fmt: skip
def test_other_files_are_refused(source, message):
    with pytest.raises(RewardError, match=re.escape(message)) as caught:
        load_custom(source.encode(), "compute_score", REWARD)
    assert str(caught.value).startswith("reward file: ")


@pytest.mark.parametrize(
    ("source", "absent"),
    [
        ("import not_there", True),
        ("from json import not_there", True),
        ("import ctypes; ctypes.CDLL('libnot_there.so.1')", True),
        ("open('/not/there')", True),
        ("raise RuntimeError('Found no NVIDIA driver on your system')", True),
        ("import os; os.environ['RANK_OF_WORKERS']", True),
        ("import os; os.environ['WITHHELD']", False),
        ("from . import helper", False),
        ("from .helper import value", False),
        ("{}['RANK']", False),
        ("1 / 0", False),
        ("1 +", False),
        ("", False),
    ],
)
def test_what_workers_may_have_differs_from_mistakes(source, absent):
    with pytest.raises(CustomError) as caught:
        load_custom(source.encode(), "mine", ESTIMATOR)
    assert is_absent_here(caught.value, {"RANK_OF_WORKERS"}) == absent
