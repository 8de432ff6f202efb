"""Rewards: a Python function with verl's compute_score signature, in one self-contained file.

compute_score(data_source, solution_str, ground_truth, extra_info) returns a number, or a dict with
"score" and further entries that are stored with the sample.
"""

import json
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.errors import LastingError
from pipeline.rl.custom import CustomKind, load_custom, shown

RewardFunction = Callable[..., Any]

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Names of the arguments, which are passed by keyword, as in verl."""


MEND = "fix it, or set reward.on_error=mask to leave such samples out"
"""The fix, for messages, if a reward function fails."""


class RewardError(LastingError):
    """A reward file or a reward cannot be used; the message names the file or the sample."""


@dataclass(frozen=True)
class Score:
    """A reward function's result for a sample. Example: Score(1.0, {'format_ok': True})."""

    reward: float
    """The score, a finite number."""
    extras: dict[str, Any]
    """JSON values that the function returned in addition to the score."""


REWARD = CustomKind(
    file="reward file",
    parameters=PARAMETERS,
    by_keyword=True,
    rename="rename it, or set custom_reward_function.name",
    runners="rollout workers",
    error=RewardError,
)


def load_reward(content: bytes, name: str) -> RewardFunction:
    """Run a reward file and return its function `name`.

    Only processes that score samples may call this function, because it runs users' code.

    Raises RewardError if the file cannot be run, or lacks a function with this name and verl's four
    parameters.
    """
    return load_custom(content, name, REWARD)


def score(
    function: RewardFunction,
    *,
    sample_id: str,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
) -> Score:
    """Call a reward function on one sample, and return the score.

    A missing score raises an error; it never counts as 0.

    Args:
        function: The reward function.
        sample_id: The sample's id, for error messages.
        data_source: The prompt's data source.
        solution_str: The response.
        ground_truth: The prompt's ground truth.
        extra_info: Further values of the prompt.

    Raises:
        RewardError: The function raised an exception, or it returned something other than a finite
            number or a dict with a finite "score" and JSON values. The message names the sample.
    """
    where = at_sample(sample_id, data_source)
    try:
        result = function(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
        )
    except BaseException as error:  # users' code may raise anything
        raise RewardError(
            f"{where}: the reward function raised {type(error).__name__}: {shown(error, str)}; "
            f"{MEND}"
        ) from error
    if not isinstance(result, dict):
        return Score(_finite(where, "", result), {})
    if "score" not in result:
        raise RewardError(
            f"{where}: the reward function returned a dict with {sorted(map(str, result))}, "
            'expected a key "score"'
        )
    extras = {key: value for key, value in result.items() if key != "score"}
    for key, value in extras.items():
        _check_extra(where, key, value)
    return Score(_finite(where, ' under "score"', result["score"]), extras)


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Return DAPO's soft penalty (0 or negative), which is added to the reward, as in verl.

    The number is 0 up to max_length - buffer tokens, then falls linearly to -factor at max_length.

    Args:
        length: Number of tokens in the response.
        max_length: Maximum number of tokens in a response.
        buffer: Number of tokens before max_length over which the penalty grows.
        factor: Size of the penalty at max_length.
    """
    excess = max(length - (max_length - buffer), 0)
    return -excess / buffer * factor


def at_sample(sample_id: str, data_source: str) -> str:
    """Return the beginning of messages about a sample's reward."""
    return f"sample {sample_id} (data source {data_source!r})"


def _finite(where: str, place: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"{where}: the reward function returned {shown(value)} "
            f"({type(value).__name__}){place}, "
            'expected a number, or a dict with "score"'
        )
    try:
        found = float(value)
    except OverflowError:  # an integer or a fraction beyond the largest double
        found = math.inf
    if not math.isfinite(found):
        raise RewardError(
            f"{where}: the reward function returned {shown(value)}{place}, expected a finite number"
        )
    return found


def _check_extra(where: str, key: Any, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(
            f"{where}: the reward function returned {shown(value)} under {shown(key)}, which is "
            f"not JSON: {error}; return plain numbers, strings, lists and dicts"
        ) from error
    if not isinstance(key, str):
        raise RewardError(
            f"{where}: the reward function returned an entry named {shown(key)}, expected a string"
        )
