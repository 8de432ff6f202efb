"""The built-in scorers have the names and scale of verl's, and find answers where verl does."""

import pytest

from pipeline.rl.data_sources import SCORERS, compute_score, find_scorer
from pipeline.rl.rewards import RewardError, score
from tests.paths import ROOT

MATH, DAPO = "DigitalLearningGmbH/MATH-lighteval", "math_dapo"


def reward(source: str, response: str, truth: object) -> float:
    return float(compute_score(source, response, truth, None)["score"])


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("2 + 3 = 5\n#### 5", "5", True),
        ("#### 1,234", "1234", True),
        ("#### 4\n#### 5", "5", True),
        ("#### -2.50", "-2.50", True),
        ("#### 5", 5, True),
        ("#### 5.", "5", False),  # verl compares strings
        ("#### $5", "5", False),
        ("the answer is 5", "5", False),
        ("####5", "5", False),
        ("#### 5" + " " * 299, "5", False),
        ("#### 5" + " " * 294, "5", True),
        ("", "5", False),
    ],
)
def test_answers_to_gsm8k_are_found_by_verls_rule(response, truth, right):
    assert reward("openai/gsm8k", response, truth) == float(right)


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        (r"so \boxed{\frac{1}{2}}", r"\frac12", True),
        (r"so \boxed{0.5}", r"\frac{1}{2}", True),
        (r"\boxed{3} no, \boxed{4}", "4", True),
        (r"\boxed{4} no, \boxed{3}", "4", False),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", True),
        (r"\boxed{\text{blue}}", r"\text{blue}", True),
        (r"\boxed{(1, 2)}", "(1,2)", True),
        (r"\boxed{(2, 1)}", "(1,2)", False),
        ("4", "4", False),  # not in a box
        (r"\boxed{4", "4", False),
        (r"\boxed{}", "4", False),
        (r"\fbox{4}", "4", True),
    ],
)
def test_answers_to_maths_datasets_are_in_a_box(response, truth, right):
    for source in (MATH, "lighteval/MATH", "HuggingFaceH4/MATH-500", "numina_olympiads"):
        assert reward(source, response, truth) == float(right)


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("Answer: 34", "34", True),
        ("answer : $34$", "34", True),
        (r"Answer: $\boxed{34}$", "34", True),
        ("Answer: 33\nAnswer: 34", "34", True),
        ("Answer: 034", "34", True),
        ("34", "34", False),
        ("Answer: 34" + "\n" * 295, "34", False),
        ("Answer: 35", "34", False),
    ],
)
def test_answers_to_dapos_datasets_are_in_an_answer_line_and_score_1_or_minus_1(
    response, truth, right
):
    for source in (DAPO, "math", "math_dapo_reasoning", "aime24", "aime_2025_x"):
        assert reward(source, response, truth) == (1.0 if right else -1.0)


def test_every_result_is_a_valid_score():
    sample = {"solution_str": "", "ground_truth": "1", "extra_info": None, "sample_id": "0/0/0"}
    for source in ("openai/gsm8k", MATH, DAPO, "numina_cn_k12"):
        found = score(compute_score, data_source=source, **sample)
        assert found.extras == {"acc": False}
        scorer = find_scorer(source)
        assert scorer is not None
        assert found.reward == scorer.wrong_reward


def test_other_data_sources_are_refused():
    for source in ("codecontests", "hiyouga/geometry3k", "gsm8k", "openai/gsm8k2", ""):
        assert find_scorer(source) is None
    with pytest.raises(RewardError, match=r"has no built-in scorer; write compute_score\("):
        compute_score("codecontests", "", "", None)


def test_the_docs_list_all_built_in_scorers():
    page = (ROOT / "docs/rewards.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [(names.removeprefix("| "), wrong.removesuffix(" |")) for names, _, wrong in rows] == [
        (", ".join(f"`{name}`" for name in one.sources), f"{one.wrong_reward:g}") for one in SCORERS
    ]
