"""Rewards: a Python function with verl's compute_score signature, from one self-contained file.

compute_score(data_source, solution_str, ground_truth, extra_info) returns a number, or a dict with
"score" and further entries, which are stored with the sample.
"""

import hashlib
import inspect
import json
import linecache
import math
import numbers
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import decode_source
from typing import Any

from pipeline.errors import LastingError

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


def load_reward(content: bytes, name: str) -> RewardFunction:
    """Run a reward file and return its function `name`; for the processes that score samples.

    The file must be self-contained: its folder is not searched for other modules. Raises
    RewardError when it cannot be run, or has no such function with verl's four parameters.
    """
    label = "reward file"
    module = _run(label, content)
    function: RewardFunction | None = getattr(module, name, None)
    if not callable(function):
        found = sorted(
            other
            for other, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        raise RewardError(f"{label}: {missing_function(found, name)}")
    _check_signature(label, name, function)
    return function


def missing_function(functions: Sequence[str], name: str) -> str:
    """Say that a file lacks the function `name`, and which it has."""
    found = f"functions {', '.join(functions)}" if functions else "no function"
    return (
        f"found {found}, expected one named {name}; rename it, or set custom_reward_function.name"
    )


def wrong_call(name: str, what: str) -> str:
    """Say that a file's function cannot be called as verl's."""
    return f"{name} {what}; expected a plain function {name}({', '.join(PARAMETERS)})"


def wrong_parameters(name: str, signature: inspect.Signature) -> str:
    """Say that a file's function has other parameters than verl's."""
    call = ", ".join(f"{parameter}=" for parameter in PARAMETERS)
    return (
        f"{name} has the parameters {signature}, but is called with {call}; name them so, with "
        "**kwargs for those that it does not use"
    )


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
            f"{where}: the reward function raised {type(error).__name__}: {_shown(error, str)}; "
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


def _run(label: str, content: bytes) -> types.ModuleType:
    digest = hashlib.sha256(content).hexdigest()
    module = types.ModuleType(f"retrace_reward_{digest[:16]}")
    module.__file__ = f"<{label}>"
    # Dataclasses look up their module by name, and tracebacks look up source lines.
    sys.modules[module.__name__] = module
    try:
        text = decode_source(content)
        linecache.cache[module.__file__] = (len(text), None, text.splitlines(True), module.__file__)
        exec(compile(content, module.__file__, "exec"), module.__dict__)
    except ModuleNotFoundError as error:
        raise RewardError(
            f"{label}: it imports {error.name!r}, which is not installed; a reward file must be "
            "self-contained: put the code into it, or install the package for the workers"
        ) from error
    except BaseException as error:  # users' code may raise anything
        raise RewardError(
            f"{label}: running it raised {type(error).__name__}: {error}; it must run by itself"
        ) from error
    return module


def _check_signature(label: str, name: str, function: RewardFunction) -> None:
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"{label}: {wrong_call(name, 'is async')}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # of a compiled function: calling it will show
    try:
        signature.bind(**dict.fromkeys(PARAMETERS))
    except TypeError as error:
        raise RewardError(f"{label}: {wrong_parameters(name, signature)}") from error


def _finite(where: str, place: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"{where}: the reward function returned {_shown(value)} "
            f"({type(value).__name__}){place}, "
            'expected a number, or a dict with "score"'
        )
    try:
        found = float(value)
    except OverflowError:  # an integer or a fraction beyond the largest double
        found = math.inf
    if not math.isfinite(found):
        raise RewardError(
            f"{where}: the reward function returned {_shown(value)}{place}, expected a finite "
            "number"
        )
    return found


def _check_extra(where: str, key: Any, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(
            f"{where}: the reward function returned {_shown(value)} under {_shown(key)}, which is "
            f"not JSON: {error}; return plain numbers, texts, lists and dicts"
        ) from error
    if not isinstance(key, str):
        raise RewardError(
            f"{where}: the reward function returned an entry named {_shown(key)}, expected text"
        )


def _shown(value: Any, form: Callable[[Any], str] = repr) -> str:
    """What users' code made, as text; if it has none, its type."""
    try:
        return form(value)
    except Exception:  # noqa: BLE001 - of users' code, and integers of too many digits
        return f"a {type(value).__name__} that cannot be shown"
