"""verl's built-in scorers, chosen by a prompt's data_source: for runs without a reward file.

Names and scale are those of verl's default_compute_score (verl/utils/reward_score), and so is the
part of a response that counts as its answer. GSM8K's rule is verl's to the letter. The maths sets
compare answers with Math-Verify, where verl compares normalised texts: 0.5 equals 1/2 here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pipeline.rl.rewards import RewardError

_TAIL = 300
"""Characters at a response's end in which verl looks for an answer that is not in a box."""


@dataclass(frozen=True)
class SourceScorer:
    """The scorer of some data sources. Example: SourceScorer(('openai/gsm8k',), ...)."""

    sources: tuple[str, ...]
    """Values of data_source; `*` stands for any characters."""
    right: Callable[[str, str], bool]
    """Whether a response, the first argument, has the right answer, the second."""
    wrong_reward: float = 0.0
    """The reward of another answer, or of none; the right one's is 1."""


def find_scorer(data_source: str) -> SourceScorer | None:
    """The built-in scorer of a data source; None: there is none."""
    return next(
        (one for one in SCORERS if any(fnmatchcase(data_source, name) for name in one.sources)),
        None,
    )


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
) -> dict[str, Any]:
    """Score a response by its data source; ground truths that are no text count as their text.

    Raises RewardError for a data source without a scorer, and when Math-Verify is not installed.
    """
    scorer = find_scorer(data_source)
    if scorer is None:
        raise RewardError(
            f"there is no built-in scorer; write one as {COMPUTE_SCORE} into a file and set "
            "custom_reward_function.path"
        )
    right = scorer.right(solution_str, str(ground_truth))
    return {"score": 1.0 if right else scorer.wrong_reward, "acc": right}


COMPUTE_SCORE = "compute_score(data_source, solution_str, ground_truth, extra_info)"
"""The function that a reward file has."""


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
    r"""The content of the last \boxed{...} or \fbox{...}; None without one that is closed."""
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
    """Whether two answers, in LaTeX or plain, are equal as texts or for Math-Verify.

    Math-Verify gives up after 5 seconds each for reading and comparing: not equal. It sets an alarm
    for that, so this works in a process's main thread only. Raises RewardError without Math-Verify.
    """
    if answer.strip() == truth.strip():
        return True
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise RewardError(
            "the built-in scorers of the maths sets need Math-Verify, which is not installed: "
            "pip install 'retrace-moe[reward]'"
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
"""docs/rewards.md has them as a table."""
