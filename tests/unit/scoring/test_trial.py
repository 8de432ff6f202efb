"""The trial of a reward function on empty responses and ground truths, in a reward process."""

import pytest

from pipeline.rl.rewards import RewardError
from pipeline.scoring.code import RewardCode
from pipeline.scoring.trial import Question, tried_rows, try_reward
from tests.patience import PATIENCE_S

QUESTIONS = [Question(row, "add", str(row), {}) for row in (0, 5)]
HEAD = "import os\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    "


def tried(body, timeout_s=PATIENCE_S):
    return try_reward(RewardCode((HEAD + body).encode()), QUESTIONS, timeout_s, PATIENCE_S)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('rubric')", "KeyError: 'rubric' (reward.py, line 3)"),
        ("return os.environ['OPENAI_API_KEY']", "REWARD_OPENAI_API_KEY"),
        ("return None", "returned None"),
        ("return float('nan')", "returned nan"),
        ("os._exit(3)", "exit code 3"),
        ("import no_such_package", "No module named 'no_such_package'"),
    ],
)
def test_a_function_that_fails_on_all_inputs_is_refused(body, says):
    with pytest.raises(RewardError) as caught:
        tried(body)
    assert "failed on 4 of 4 trial inputs" in str(caught.value)
    assert says in str(caught.value)


def test_a_function_that_hangs_is_refused_after_two_calls():
    with pytest.raises(RewardError, match=r"failed on 2 of 2 trial inputs .* did not return"):
        tried("import time; time.sleep(10**6)", timeout_s=0.2)


@pytest.mark.parametrize(
    ("body", "failures"),
    [
        ("return solution_str == ground_truth", None),
        ("return 1 / len(solution_str)", "2 of 4"),
        ("return int(ground_truth) / int(ground_truth)", "2 of 4"),
        ("return 1 if solution_str else os._exit(3)", "2 of 4"),
    ],
)
def test_a_function_that_fails_on_some_inputs_is_noted(body, failures):
    note = tried(body)
    assert (note is None) == (failures is None)
    assert failures is None or f"failed on {failures} trial inputs" in note


def test_the_tried_prompts_are_spread_over_all():
    """Files of several data sources are often written one after another."""
    assert [tried_rows(count) for count in (0, 1, 3, 4, 100)] == [
        [], [0], [0, 1, 2], [0, 1, 2, 3], [0, 25, 50, 75],
    ]  # fmt: skip
