"""verl's built-in scorers for runs without a reward file, selected by a prompt's data_source.

The names, the reward scale and the part of a response that counts as its answer are the same as in
verl's default_compute_score (verl/utils/reward_score). GSM8K's rule is exactly verl's. For the
maths datasets, Math-Verify compares the answers, so 0.5 equals 1/2; verl compares normalised
strings.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pipeline.rl.rewards import RewardError

_TAIL = 300
"""Number of characters at the end of a response that verl searches for an unboxed answer."""


@dataclass(frozen=True)
class SourceScorer:
    """A scorer for one or more data sources. Example: SourceScorer(('openai/gsm8k',), ...)."""

    sources: tuple[str, ...]
    """Values of data_source; `*` matches any characters."""
    right: Callable[[str, str], bool]
    """A function of a response and the ground truth that returns whether the answer is correct."""
    wrong_reward: float = 0.0
    """The reward of an incorrect or missing answer; a correct answer has reward 1."""


def find_scorer(data_source: str) -> SourceScorer | None:
    """Return the built-in scorer for a data source, or None."""
    return next(
        (one for one in SCORERS if any(fnmatchcase(data_source, name) for name in one.sources)),
        None,
    )


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
) -> dict[str, Any]:
    """Score a response with the scorer for its data source.

    Args:
        data_source: The prompt's data source.
        solution_str: The response.
        ground_truth: The correct answer, which is converted to text.
        extra_info: Ignored.

    Raises:
        RewardError: The data source has no scorer, or Math-Verify is required but not installed.
    """
    scorer = find_scorer(data_source)
    if scorer is None:
        raise RewardError(
            f"this data source has no built-in scorer; write {COMPUTE_SCORE} in a file and set "
            "custom_reward_function.path"
        )
    right = scorer.right(solution_str, str(ground_truth))
    return {"score": 1.0 if right else scorer.wrong_reward, "acc": right}


COMPUTE_SCORE = "compute_score(data_source, solution_str, ground_truth, extra_info)"
"""The signature of the function that a reward file must define."""


def _gsm8k(response: str, truth: str) -> bool:
    found = re.findall(r"#### (\-?[0-9\.\,]+)", response[-_TAIL:])
    return bool(found) and found[-1].replace(",", "") == truth


def _boxed(response: str, truth: str) -> bool:
    answer = last_boxed(response)
    return answer is not None and same_answer(answer, truth)


def _answer_line(response: str, truth: str) -> bool:
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", response[-_TAIL:])
    if not found:
        return False
    boxed = last_boxed(found[-1])
    return same_answer(found[-1] if boxed is None else boxed, truth)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...}; None if there is no closed box."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    first = text.index("{", start) + 1
    depth = 1
    for place in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[first:place]
    return None


def same_answer(answer: str, truth: str) -> bool:
    """Return whether two answers, in LaTeX or plain text, are equal.

    They are equal if their texts are equal or if Math-Verify reports them as equal. Parsing and
    comparing are each limited to 5 seconds. If either takes longer, Math-Verify stops, and the
    answers are treated as different. Math-Verify sets an alarm for this limit, so this function
    works only in a process's main thread. Raises RewardError if Math-Verify is required but not
    installed.
    """
    if answer.strip() == truth.strip():
        return True
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise RewardError(
            "Math-Verify is not installed, but the built-in scorers of the maths datasets need "
            "it; run pip install 'retrace-moe[reward]'"
        ) from error
    gold, found = (parse(f"\\boxed{{{text}}}") for text in (truth, answer))
    return bool(verify(gold, found))


SCORERS = (
    SourceScorer(("openai/gsm8k",), _gsm8k),
    SourceScorer(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), _boxed
    ),
    SourceScorer(
        ("math_dapo", "math", "math_dapo_reasoning", "aime*"), _answer_line, wrong_reward=-1.0
    ),
    SourceScorer(
        (
            "numina_aops_forum",
            "numina_synthetic_math",
            "numina_amc_aime",
            "numina_synthetic_amc",
            "numina_cn_k12",
            "numina_olympiads",
        ),
        _boxed,
    ),
)
"""All built-in scorers; docs/rewards.md lists them in a table."""
