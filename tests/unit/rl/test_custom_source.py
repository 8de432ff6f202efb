"""A reward file is checked without running it, and refused if it is certainly invalid."""

import re

import pytest

from pipeline.rl.custom_source import check_source
from pipeline.rl.rewards import REWARD, RewardError

GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1\n"
CALL = "compute_score(data_source, solution_str, ground_truth, extra_info)"


def notes(source: str) -> list[str]:
    return check_source(source.encode(), "r.py", "compute_score", REWARD)


@pytest.mark.parametrize(
    "source",
    [
        GOOD,
        "def compute_score(**kwargs): return 1",
        "def compute_score(ground_truth, *, data_source, solution_str, extra_info): return 1",
        "def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1): 1",
        "compute_score = lambda data_source, solution_str, ground_truth, extra_info: 1",
        GOOD.replace("compute_score", "f") + "compute_score = f",
        "def compute_score(wrong): 1\n" + GOOD,
        "# -*- coding: latin-1 -*-\n" + GOOD,
        "raise ValueError('only the workers will see it')\n" + GOOD,
        "try:\n    import not_there\nexcept ImportError:\n    pass\n" + GOOD,
        "if False:\n    import not_there\n" + GOOD,
    ],
)
def test_valid_files_are_accepted(source):
    assert notes(source) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "found no function, expected one named compute_score; rename it, or set "
         "custom_reward_function.name"),
        ("def b(): 1\nif x:\n    def a(): 1", "found functions a, b, expected one named"),
        ("class A:\n    def compute_score(self): 1", "found no function, expected one named"),
        ("compute_score = 3", f"compute_score is 3; expected a plain function {CALL}"),
        ("def compute_score(text, answer): 1", "compute_score has the parameters (text, answer), "
         "but is called with data_source=, solution_str=, ground_truth=, extra_info=; use these "
         "names, with **kwargs for unused ones"),
        ("def compute_score(text, n=3): 1", "compute_score has the parameters (text, n=...), but"),
        ("compute_score = lambda: 1", "compute_score has the parameters (), but is called"),
        ("def f(a): 1\ncompute_score = f", "compute_score has the parameters (a), but is"),
        ("def compute_score(*args): 1", "has the parameters (*args), but is called with data_so"),
        ("def compute_score(data_source, /, **rest): 1", "(data_source, /, **rest), but is"),
        ("async def compute_score(**kwargs): 1", "compute_score is async; expected a plain"),
        ("import compute_score", "compute_score is a module; expected"),
        ("from .other import compute_score", "compute_score comes from a relative import"),
        (GOOD + "compute_score = None", f"compute_score is {None}"),
        ("1 +", "r.py: syntax error: invalid syntax (r.py, line 1); fix it"),
        ("\0", "syntax error: source code string cannot contain null bytes"),
    ],
)  # fmt: skip
def test_files_that_are_certainly_invalid_are_refused(source, message):
    with pytest.raises(RewardError, match=re.escape(message)) as caught:
        notes(source)
    assert str(caught.value).startswith("r.py: ")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import functools\n@functools.cache\ndef compute_score(a): 1", "it is decorated"),
        ("from json import compute_score", "it is imported from json"),
        ("from json import *", "it is created while the file runs"),
        ("globals()['compute_score'] = 1", "it is created while the file runs"),
        ("compute_score = make()", "it is not written as a function"),
        ("class compute_score: pass", "it is not written as a function"),
        ("a = b\nb = a\ncompute_score = a", "it is not written as a function"),
        ("if x:\n    def compute_score(a): 1", "its definition depends on a condition"),
        ("try:\n    1\nexcept E:\n    compute_score = 3", "its definition depends on a condition"),
    ],
)  # fmt: skip
def test_a_note_is_reported_if_only_running_the_file_would_show_an_error(source, why):
    assert notes(source) == [
        "r.py: whether compute_score takes data_source, solution_str, ground_truth, extra_info is "
        f"unknown until the rollout workers run the file: {why}"
    ]


def test_a_note_names_packages_that_this_machine_lacks():
    [note] = notes("import os, not_there.x\n" + GOOD)
    assert note.startswith("r.py: it imports 'not_there', which is not installed here, but")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("from .helper import value", "line 1: the relative import of helper fails"),
        ("from . import helper", "line 1: the relative import of helper fails"),
        ("table = open('table.json')", "write Path(__file__).parent / 'table.json'"),
    ],
)
def test_a_note_names_what_depends_on_the_place_of_the_file(line, part):
    [note] = notes(f"{line}\n{GOOD}")
    assert part in note
    assert notes(f"open('/etc/hosts')\nfrom pathlib import Path\n{GOOD}") == []


def test_the_file_is_not_executed(tmp_path):
    marker = tmp_path / "ran"
    notes(f"open({str(marker)!r}, 'w')\n{GOOD.replace('=None', f'=open({str(marker)!r}, 1)')}")
    assert not marker.exists()
