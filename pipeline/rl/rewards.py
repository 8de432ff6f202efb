"""Rewards: a Python function with verl's compute_score signature, from one self-contained file.

compute_score(data_source, solution_str, ground_truth, extra_info) returns a number, or a dict with
"score" and further entries, which are stored with the sample.
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


MEND = "mend it, or set reward.on_error=mask to leave such samples out"
"""What to do about a reward function that fails."""


class RewardError(LastingError):
    """A reward file or a reward cannot be used; the text names the file or the sample."""


@dataclass(frozen=True)
class Score:
    """A reward function's result for a sample. Example: Score(1.0, {'format_ok': True})."""

    reward: float
    """Finite."""
    extras: dict[str, Any]
    """JSON values that the function returned beside the score."""


REWARD = CustomKind(
    file="reward file",
    parameters=PARAMETERS,
    by_keyword=True,
    rename="rename it, or set custom_reward_function.name",
    runners="rollout workers",
    error=RewardError,
)


def load_reward(content: bytes, name: str) -> RewardFunction:
    """Run a reward file and return its function `name`; for the processes that score samples.

    Raises RewardError when it cannot be run, or has no such function with verl's four parameters.
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
    """Call a reward function on one sample.

    Raises RewardError, naming the sample, when the function raises or returns anything but a finite
    number or a dict with a finite "score" and JSON values. A missing reward never becomes 0.
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
            'expected "score" among them'
        )
    extras = {key: value for key, value in result.items() if key != "score"}
    for key, value in extras.items():
        _check_extra(where, key, value)
    return Score(_finite(where, ' under "score"', result["score"]), extras)


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """What to add to the reward of a response of `length` tokens: verl's soft penalty of DAPO.

    0 up to max_length - buffer tokens, then linear down to -factor at max_length.
    """
    excess = max(length - (max_length - buffer), 0)
    return -excess / buffer * factor


def at_sample(sample_id: str, data_source: str) -> str:
    """The beginning of messages about a sample's reward."""
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
            f"not JSON: {error}; return plain numbers, texts, lists and dicts"
        ) from error
    if not isinstance(key, str):
        raise RewardError(
            f"{where}: the reward function returned an entry named {shown(key)}, expected text"
        )
