"""All limits on traces, as specified in docs/trace-format.md, and the functions that check them.

Writers check everything before the first byte reaches the store; readers rely on that. If a check
fails, the function raises a TraceError that names the object or sample, and gives the value found
and the value expected.
"""

import json
import math
import numbers
import re
from itertools import pairwise
from typing import Any, get_args

import numpy as np

from pipeline.errors import cut
from pipeline.model.geometry import MOST_LAYER, Geometry, geometry_json, parse_geometry
from pipeline.model.limits import MOST_TOKENS
from pipeline.traces.format.types import Kind, Provenance, Routes, Sample, TraceError, VersionSpan

MOST = 2**31 - 1
"""The maximum value of every count, position, row number and version."""
MOST_STEP, MOST_SHARD, MOST_STAGE = 999_999, 99_999, 999
MOST_SPANS = 1 << 16
"""Maximum number of version spans of a sample."""
MOST_SEED, NO_SEED = 2**63 - 1, -1
"""The maximum seed, and the seed of a sample that was generated without one or whose seed is
unknown."""
NAME_BYTES = 1_024
"""Maximum number of UTF-8 bytes in an id, a group or any other one-line text."""
TEXT_BYTES = 1 << 20
"""Maximum number of UTF-8 bytes in extras (as JSON) and in a reward's error."""

_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line and paragraph separators, surrogates, and characters that embed, isolate
or override a writing direction. The marks U+200E, U+200F and U+061C are allowed."""
_SAMPLE_ID = re.compile(r"((?:val-)?[0-9]{6})/([^/]+)/(?:0|[1-9][0-9]{0,9})(\.[1-9][0-9]{0,9})?")
_WRITE_ID = re.compile(r"[0-9a-f]{8}")
_ARRAYS = {
    "prompt_tokens_P": np.uint32,
    "response_tokens_G": np.uint32,
    "loss_mask_G": np.bool_,
    "logprobs_G": np.float32,
}


def shown(value: object) -> str:
    """Return a value for an error message: clean text unchanged, anything else as ASCII.

    Only the first 100 characters are returned.
    """
    if isinstance(value, str) and not _UNPRINTABLE.search(value):
        text = value
    else:
        try:
            text = " ".join(ascii(value).split())
        except (ValueError, RecursionError):  # thousands of digits, or too many levels
            text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= 100 else f"{text[:100]}..."


def check_number(value: object, most: int, where: str, least: int = 0) -> int:
    """Check an integer from `least` to `most`, and return it as a Python int.

    numpy integers are accepted.

    Args:
        value: The value to check.
        most: The maximum value.
        where: The object and field, for the error message.
        least: The minimum value.
    """
    if type(value) is int and least <= value <= most:  # the usual case, many times per sample
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TraceError(
            f"{where}: {shown(value)} of type {type(value).__name__}, expected an integer"
        )
    if not least <= value <= most:
        raise TraceError(f"{where}: {shown(value)}, expected {least}..{most}")
    return int(value)


def check_line(value: object, where: str) -> str:
    """Check and return a one-line text: at most NAME_BYTES of UTF-8, without control characters."""
    if not isinstance(value, str):
        raise TraceError(f"{where}: {shown(value)} of type {type(value).__name__}, expected text")
    if found := _UNPRINTABLE.search(value):
        raise TraceError(
            f"{where}: {shown(value)} contains U+{ord(found[0]):04X}, expected text without "
            "control characters, line separators, surrogates, and characters that embed, isolate "
            "or override a writing direction"
        )
    if not value.isascii() or len(value) > NAME_BYTES:
        size = len(value.encode())
        if size > NAME_BYTES:
            raise TraceError(f"{where}: {size} bytes of UTF-8, expected at most {NAME_BYTES}")
    return value


def check_name(value: object, where: str) -> str:
    """Check and return a one-line text that is not empty: an id, a group or a prompt's id."""
    if check_line(value, where) == "":
        raise TraceError(f"{where}: empty, expected a name")
    return str(value)


def check_list(value: Any, where: str, of: str) -> list[Any]:
    """Return the items of a list or of any other iterable, which is read once.

    Args:
        value: The iterable; a text does not count as one.
        where: The object and argument, for the error message.
        of: The kind of item, for the error message.

    Raises:
        TraceError: The value is not iterable.
    """
    try:
        items = None if isinstance(value, str | bytes) else iter(value)
    except TypeError:
        items = None
    if items is None:
        raise TraceError(f"{where}: {shown(value)}, expected a list of {of}")
    return list(items)


def check_names(value: Any, where: str) -> list[str]:
    """Return names as a list. Raises TraceError for a single text, and for names of other types."""
    names = check_list(value, where, "texts")
    for name in names:
        if not isinstance(name, str):
            raise TraceError(
                f"{where}: {shown(name)} of type {type(name).__name__}, expected text; pass each "
                "as a str"
            )
    return names


def check_layers(value: Any, where: str) -> tuple[int, ...]:
    """Return indices of model layers as Python ints. Raises TraceError for other values."""
    layers = check_list(value, where, "numbers")
    return tuple(check_number(layer, MOST_LAYER, where) for layer in layers)


def check_prompt_id(value: object, where: str) -> str:
    """Check and return a prompt's id: a name that does not contain '/' and is not '.' or '..'."""
    found = check_line(value, where)
    if "/" in found or found in ("", ".", ".."):
        raise TraceError(f"{where}: {cut(found)}, expected a name without '/', not '.' or '..'")
    return found


def check_text(value: object, where: str) -> str:
    """Check and return a text of any number of lines: at most TEXT_BYTES of UTF-8."""
    if not isinstance(value, str):
        raise TraceError(f"{where}: {shown(value)} of type {type(value).__name__}, expected text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise TraceError(f"{where}: a surrogate, expected text that UTF-8 can encode") from error
    if size > TEXT_BYTES:
        raise TraceError(f"{where}: {size} bytes of UTF-8, expected at most {TEXT_BYTES}")
    return value


def check_write_id(value: object, where: str) -> str:
    """Check and return a write id: eight lower-case hexadecimal digits."""
    if not isinstance(value, str) or not _WRITE_ID.fullmatch(value):
        raise TraceError(
            f"{where}: write id {shown(value)}, expected 8 lower-case hexadecimal digits; "
            "use new_write_id()"
        )
    return value


def check_geometry(geometry: object, where: str) -> Geometry:
    """Check and return a geometry: it must be within the limits and have at least one layer."""
    if not isinstance(geometry, Geometry) or not isinstance(geometry.layers, tuple):
        raise TraceError(
            f"{where}: geometry {shown(geometry)}, expected a Geometry with a tuple of layers"
        )
    try:
        parse_geometry(geometry_json(geometry))
    except ValueError as error:
        raise TraceError(f"{where}: geometry: {error}") from error
    return geometry


def check_provenance(provenance: object, where: str) -> Provenance:
    """Check and return a provenance: it must have a known kind, a policy version and an engine."""
    if not isinstance(provenance, Provenance):
        raise TraceError(f"{where}: provenance {shown(provenance)}, expected a Provenance")
    if provenance.kind not in get_args(Kind):
        raise TraceError(
            f"{where}: kind of trace {shown(provenance.kind)}, expected one of {get_args(Kind)}"
        )
    check_number(provenance.policy_version, MOST, f"{where}: policy version of the provenance")
    check_line(provenance.engine, f"{where}: engine of the provenance")
    return provenance


def check_routes(routes: object, where: str) -> Routes:
    """Check that all fields of a Routes object are arrays, and return the object.

    `codec.canonical` checks the arrays' shapes, types and values.
    """
    if not isinstance(routes, Routes):
        raise TraceError(f"{where}: routes of type {type(routes).__name__}, expected Routes")
    for name, value in vars(routes).items():
        if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            raise TraceError(f"{where}: {name} of type {type(value).__name__}, expected an array")
    return routes


def check_new(sample: Sample, step: int | None) -> None:
    """Raise TraceError for a sample that must not be written in this step.

    Routes are checked with their geometry (`format.routes.canonical`). For a validation, `step` is
    None.
    """
    if not isinstance(sample, Sample):
        raise TraceError(f"{shown(sample)} of type {type(sample).__name__}, expected a Sample")
    where = f"sample {shown(sample.id)}"
    check_line(sample.finish_reason, f"{where}: finish_reason")
    check_number(sample.seed, MOST_SEED, f"{where}: seed", NO_SEED)
    if sample.reward is not None:
        check_reward(sample.reward, where)
    if sample.reward_error is not None:
        check_text(sample.reward_error, f"{where}: reward_error")
        if sample.reward is not None:
            raise TraceError(f"{where}: a reward and a reward_error, expected at most one")
    _check_arrays(sample, where)
    if np.count_nonzero(np.isinf(sample.logprobs_G)):  # any() takes 10 times as long for few tokens
        raise TraceError(f"{where}: infinite log-probs, expected finite ones, or NaN if unknown")
    _check_spans(sample.version_spans, len(sample.response_tokens_G), where)
    json_text(sample.extras, f"{where}: extras")
    _check_id(sample, step, where)


def _check_id(sample: Sample, step: int | None, where: str) -> None:
    """Raise TraceError unless id, group, prompt_id and branch_of belong together."""
    check_name(sample.id, f"{where}: id")
    check_prompt_id(sample.prompt_id, f"{where}: prompt_id")
    found = _SAMPLE_ID.fullmatch(sample.id)
    if found is None:
        raise TraceError(
            f"{where}: id {shown(sample.id)}, expected the form 'STEP/PROMPT_ID/K', such as "
            "'000003/17/2'; use new_sample"
        )
    if found[2] != sample.prompt_id:
        raise TraceError(
            f"{where}: its id contains prompt {shown(found[2])}, but its prompt_id is "
            f"{shown(sample.prompt_id)}; use new_sample"
        )
    group = sample.id.rpartition("/")[0]
    if not isinstance(sample.group, str) or sample.group != group:
        raise TraceError(f"{where}: group {shown(sample.group)}, expected {cut(group)}")
    if step is not None and found[1] != f"{step:06d}":
        raise TraceError(f"{where}: its id contains step {found[1]}, expected step {step:06d}")
    first = sample.id.removesuffix(found[3]) if found[3] else None
    if not isinstance(sample.branch_of, str | None) or sample.branch_of != first:
        ours, expected = ("null" if id is None else shown(id) for id in (sample.branch_of, first))
        raise TraceError(f"{where}: branch_of {ours}, expected {expected}, as its id requires")


def check_reward(value: object, where: str) -> float:
    """Check that a value is a finite number, and return it as a float."""
    if type(value) is float and math.isfinite(value):
        return value
    if not isinstance(value, numbers.Real | np.bool_):
        raise TraceError(
            f"{where}: reward {shown(value)} of type {type(value).__name__}, expected a finite "
            "number, or None for no reward"
        )
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise TraceError(
            f"{where}: reward {shown(value)}, expected a finite number, or None for no reward"
        )
    return found


def json_text(value: object, where: str) -> str:
    """Check a JSON object, and return it as text of at most TEXT_BYTES in UTF-8.

    Characters outside ASCII are not escaped, because an escape takes up to three times as many
    bytes. `where` names the sample and field, for the error message.
    """
    if not isinstance(value, dict):
        raise TraceError(
            f"{where}: {shown(value)} of type {type(value).__name__}, expected a JSON object"
        )
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(
            f"{where}: {error}; expected JSON: finite numbers, text, lists and dicts"
        ) from error
    return check_text(text, where)


def _check_arrays(sample: Sample, where: str) -> None:
    for name, dtype in _ARRAYS.items():
        value = getattr(sample, name)
        if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            raise TraceError(
                f"{where}: {name} of type {type(value).__name__}, expected an array; new_sample "
                "converts a list"
            )
        if value.ndim != 1 or value.dtype != dtype:
            raise TraceError(
                f"{where}: {name} of type {value.dtype} and shape {value.shape}, expected "
                f"{np.dtype(dtype)} in one dimension; new_sample converts it"
            )
    G = len(sample.response_tokens_G)
    if len(sample.prompt_tokens_P) == 0:
        raise TraceError(f"{where}: no prompt tokens, expected at least one")
    for name in ("loss_mask_G", "logprobs_G"):
        found = len(getattr(sample, name))
        if found != G:
            raise TraceError(
                f"{where}: {found} values of {name}, expected {G}, one per response token"
            )
    check_number(len(sample.prompt_tokens_P) + G, MOST_TOKENS, f"{where}: number of tokens", 1)


def _check_spans(spans: object, G: int, where: str) -> None:
    if not isinstance(spans, tuple) or not all(isinstance(span, VersionSpan) for span in spans):
        raise TraceError(f"{where}: version spans {shown(spans)}, expected a tuple of VersionSpan")
    if len(spans) > MOST_SPANS:
        raise TraceError(f"{where}: {len(spans)} version spans, expected at most {MOST_SPANS}")
    for span in spans:
        for name, value in vars(span).items():
            check_number(value, MOST, f"{where}: {name} of a version span")
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), G]
    ascending = all(start <= end for start, end in pairwise(ends))
    if ends != starts or not spans or not ascending:
        raise TraceError(
            f"{where}: version spans {shown(spans)} do not cover its {G} response tokens "
            "exactly once and in order"
        )
