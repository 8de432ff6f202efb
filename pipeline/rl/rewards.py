"""Rewards: a Python function with verl's compute_score signature, in a file.

compute_score(data_source, solution_str, ground_truth, extra_info) returns a number, or a dict with
"score" and further entries that are stored with the sample.
"""

import json
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import LastingError
from pipeline.rl.custom import CustomKind, load_custom, raised_at, shown

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
    left_out: Mapping[str, str]
    """For each other value that is not JSON: the reason, keyed by the value's name."""


REWARD = CustomKind(
    file="reward file",
    parameters=PARAMETERS,
    by_keyword=True,
    rename="rename it, or set custom_reward_function.name",
    runners="rollout workers",
    supply="put the module next to the reward file, or install the package for the workers",
    error=RewardError,
)


def reward_kind(kwargs: Iterable[str]) -> CustomKind:
    """Return the kind of a reward file whose function also takes the arguments `kwargs`."""
    return replace(REWARD, parameters=tuple(dict.fromkeys((*PARAMETERS, *kwargs))))


_PASSED = {
    "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "HF_HOME", "HOME", "LANG", "LANGUAGE",
    "LD_LIBRARY_PATH", "LOGNAME", "NVIDIA_VISIBLE_DEVICES", "PATH", "SSL_CERT_DIR", "SSL_CERT_FILE",
    "TMPDIR", "TOKENIZERS_PARALLELISM", "TZ", "USER", "VIRTUAL_ENV",
}  # fmt: skip
_PASSED_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_", "PYTHON", "REWARD_")
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9_]*_(?:KEY|TOKEN|SECRET|URL|BASE|ENDPOINT)\b")
"""Names of variables in the errors of libraries, such as OPENAI_API_KEY."""


def is_passed(variable: str) -> bool:
    """Return whether reward processes inherit an environment variable.

    They inherit the variables in _PASSED and those with the prefixes in _PASSED_PREFIXES. All
    others, such as the credentials of the store and of Prefect, are withheld. For their own
    variables, users choose names with the prefix REWARD_.
    """
    return variable in _PASSED or variable.startswith(_PASSED_PREFIXES)


def load_reward(
    content: bytes, name: str, kwargs: Mapping[str, Any] | None = None, path: Path | None = None
) -> RewardFunction:
    """Run a reward file and return its function `name`.

    Only processes that score samples may call this function, because it runs users' code.

    Args:
        content: The file's content.
        name: The function's name.
        kwargs: Further keyword arguments for each call; as in verl, they take precedence.
        path: The file, for tracebacks and for code that opens files next to it.

    Raises:
        RewardError: The file cannot be run, or lacks a function with this name that accepts verl's
            four arguments and `kwargs`.
    """
    function = load_custom(content, name, reward_kind(kwargs or ()), path)
    return partial(_call, function, kwargs) if kwargs else function


def _call(function: RewardFunction, more: Mapping[str, Any], **arguments: Any) -> Any:
    return function(**{**arguments, **more})


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

    A missing score raises an error; it never counts as 0. Values of numpy and torch are converted.
    Other values that are not JSON are left out, except for the score.

    Args:
        function: The reward function.
        sample_id: The sample's id, for error messages.
        data_source: The prompt's data source.
        solution_str: The response.
        ground_truth: The prompt's ground truth.
        extra_info: Further values of the prompt.

    Raises:
        RewardError: The function raised an exception, or it returned something other than a finite
            number or a dict with a finite "score". The message names the sample.
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
            f"{where}: the reward function raised {type(error).__name__}: {shown(error, str)}"
            f"{raised_at(error)}"
        ) from error
    if not isinstance(result, dict):
        return Score(_finite(where, "", result), {}, {})
    if "score" not in result:
        raise RewardError(
            f"{where}: the reward function returned a dict with {sorted(map(str, result))}, "
            'expected a key "score"'
        )
    extras, left_out = _json_values(result)
    return Score(_finite(where, ' under "score"', result["score"]), extras, left_out)


def environment_hint(error: RewardError, read: Iterable[str]) -> str:
    """Return a text for the end of an error's message if the environment may be its cause.

    Args:
        error: The error, whose cause is the exception from users' code.
        read: The variables that the code reads without a default.

    Returns:
        The rule for passing variables, if the code reads an unset variable or the exception's text
        names a variable that reward processes do not get; otherwise an empty text.
    """
    named = _VARIABLE.findall(shown(error.__cause__, str)) if error.__cause__ else []
    absent = sorted(
        name for name in {*read, *named} if name not in os.environ and not is_passed(name)
    )
    if not absent:
        return ""
    return (
        f" (reward processes get only environment variables whose names begin with REWARD_, so "
        f"they lack {', '.join(absent)}; set and read REWARD_{absent[0]})"
    )


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
    found = value
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        try:
            found = value.item()  # of numpy's or torch's scalars and arrays with one element
        except Exception:  # noqa: BLE001 - from users' objects, and from larger arrays
            found = value
    if not isinstance(found, numbers.Real):
        raise RewardError(
            f"{where}: the reward function returned {shown(value)} "
            f"({type(value).__name__}){place}, "
            'expected a number, or a dict with "score"'
        )
    try:
        number = float(found)
    except OverflowError:  # an integer or a fraction beyond the largest double
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"{where}: the reward function returned {shown(value)}{place}, expected a finite number"
        )
    return number


def _json_values(result: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the JSON values of a result except its score, and why the others are not JSON."""
    extras: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for key, value in result.items():
        if key == "score":
            continue
        try:
            if not isinstance(key, str):
                raise TypeError("expected a name of type str")
            plain = _plain(value)
            json.dumps(plain, allow_nan=False)
        except Exception as error:  # noqa: BLE001 - from users' objects
            left_out[shown(key, str)] = f"{type(value).__name__}: {shown(error, str)}"
            continue
        extras[key] = plain
    return extras, left_out


def _plain(value: Any) -> Any:
    """Return a value with numpy's and torch's scalars and arrays converted to Python's types."""
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if callable(getattr(value, "tolist", None)):
        return _plain(value.tolist())
    return value
