"""What a trace may hold: the one module that knows its limits; docs/trace-format.md states them.

Writers check everything before the first byte reaches the store and readers check what they read,
so that whatever one writes the other takes. All functions raise TraceError that names the object or
sample, what was found and what was expected.
"""

import json
import math
import numbers
import re
from itertools import pairwise
from typing import get_args

import numpy as np

from pipeline.model.geometry import Geometry, geometry_json, parse_geometry
from pipeline.model.limits import MOST_TOKENS
from pipeline.run.strict_json import MOST_DEPTH, MOST_DIGITS
from pipeline.traces.format.types import Kind, Provenance, Routes, Sample, TraceError, VersionSpan

MOST = 2**31 - 1
"""Of counts, positions, rows and versions."""
MOST_TOKEN = 2**32 - 1
MOST_STEP, MOST_SHARD, MOST_STAGE = 999_999, 99_999, 999
MOST_SPANS = 1 << 16
"""Of a sample that is written, as MOST_TOKENS; what was written is bounded as pages.py says."""
MOST_SEED = 2**63 - 1
NO_SEED = -1
"""The seed of a sample that was not seeded, or whose seed is unknown."""
NAME_BYTES = 1_024
"""Of an id, a group or another text of one line, in UTF-8."""
TEXT_BYTES = 1 << 20
"""Of extras as JSON and of a reward's error, in UTF-8."""

_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls, line and paragraph separators, marks that turn the writing direction, surrogates."""
_SAMPLE_ID = re.compile(r"((?:val-)?[0-9]{6})/([^/]+)/(?:0|[1-9][0-9]{0,9})(\.[1-9][0-9]{0,9})?")
_WRITE_ID = re.compile(r"[0-9a-f]{8}")
_ARRAYS = {
    "prompt_tokens_P": np.uint32,
    "response_tokens_G": np.uint32,
    "loss_mask_G": np.bool_,
    "logprobs_G": np.float32,
}


def shown(value: object) -> str:
    """A value of any type for an error's text: a clean short text as it is, all else as ASCII."""
    if isinstance(value, str) and len(value) <= NAME_BYTES and not _UNPRINTABLE.search(value):
        return value
    try:
        text = " ".join(ascii(value).split())
    except (ValueError, RecursionError):  # an integer of thousands of digits; nested too deeply
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= 100 else f"{text[:100]}..."


def check_number(value: object, most: int, where: str, least: int = 0) -> int:
    """An integer from `least` to `most`, as a Python int; numpy's integers are taken too."""
    if type(value) is int and least <= value <= most:  # nearly always, and many for each sample
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TraceError(
            f"{where}: {shown(value)} of type {type(value).__name__}, expected an integer"
        )
    if not least <= value <= most:
        raise TraceError(f"{where}: {shown(value)}, expected {least}..{most}")
    return int(value)


def check_line(value: object, where: str) -> str:
    """A text of one line: UTF-8 of at most NAME_BYTES, no control characters."""
    if not isinstance(value, str):
        raise TraceError(f"{where}: {shown(value)} of type {type(value).__name__}, expected a text")
    if found := _UNPRINTABLE.search(value):
        raise TraceError(
            f"{where}: {shown(value)} has U+{ord(found[0]):04X}, expected a text without control "
            "characters, line separators, direction marks and surrogates"
        )
    if not value.isascii() or len(value) > NAME_BYTES:
        size = len(value.encode())
        if size > NAME_BYTES:
            raise TraceError(f"{where}: {size} bytes of UTF-8, expected at most {NAME_BYTES}")
    return value


def check_name(value: object, where: str) -> str:
    """A text of one line that is not empty: an id, a group, a prompt's id."""
    if check_line(value, where) == "":
        raise TraceError(f"{where}: empty, expected a name")
    return str(value)


def check_prompt_id(value: object, where: str) -> str:
    """A prompt's id: a name without '/', and neither '.' nor '..', which folders use otherwise."""
    found = check_line(value, where)
    if "/" in found or found in ("", ".", ".."):
        raise TraceError(f"{where}: {found!r}, expected a name without '/', not '.' or '..'")
    return found


def check_text(value: object, where: str) -> str:
    """A text of any lines: UTF-8 of at most TEXT_BYTES."""
    if not isinstance(value, str):
        raise TraceError(f"{where}: {shown(value)} of type {type(value).__name__}, expected a text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise TraceError(f"{where}: a surrogate, expected a text that UTF-8 can hold") from error
    if size > TEXT_BYTES:
        raise TraceError(f"{where}: {size} bytes of UTF-8, expected at most {TEXT_BYTES}")
    return value


def check_write_id(value: object, where: str) -> str:
    """A write id: eight lower-case hexadecimal digits."""
    if not isinstance(value, str) or not _WRITE_ID.fullmatch(value):
        raise TraceError(
            f"{where}: write id {shown(value)}, expected 8 lower-case hexadecimal digits; "
            "new_write_id() makes one"
        )
    return value


def check_geometry(geometry: object, where: str) -> Geometry:
    """A geometry within the format's limits, with at least one layer."""
    if not isinstance(geometry, Geometry) or not isinstance(geometry.layers, tuple):
        raise TraceError(
            f"{where}: geometry {shown(geometry)}, expected a Geometry with a tuple of layers"
        )
    try:
        parse_geometry(geometry_json(geometry))
    except ValueError as error:
        raise TraceError(f"{where}: {error}") from error
    return geometry


def check_provenance(provenance: object, where: str) -> Provenance:
    """The origin of routes: a known kind, a policy version, an engine."""
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
    """Routes whose parts are arrays; `codec.canonical` checks shapes, types and values."""
    if not isinstance(routes, Routes):
        raise TraceError(f"{where}: routes of type {type(routes).__name__}, expected Routes")
    for name, value in vars(routes).items():
        if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            raise TraceError(f"{where}: {name} of type {type(value).__name__}, expected an array")
    return routes


def check_sample(sample: Sample, name: str = "") -> None:
    """Refuse a sample, written or read, of which a part is not what the format allows.

    Routes are checked where they are encoded, as they need a geometry. `name` is of the file.
    """
    if not isinstance(sample, Sample):
        raise TraceError(f"{shown(sample)} of type {type(sample).__name__}, expected a Sample")
    where = f"{name}: sample {shown(sample.id)}" if name else f"sample {shown(sample.id)}"
    check_name(sample.id, f"{where}: id")
    check_name(sample.group, f"{where}: group")
    check_name(sample.prompt_id, f"{where}: prompt_id")
    if sample.branch_of is not None:
        check_name(sample.branch_of, f"{where}: branch_of")
    check_line(sample.finish_reason, f"{where}: finish_reason")
    check_number(sample.seed, MOST_SEED, f"{where}: seed", NO_SEED)
    if sample.reward is not None:
        check_reward(sample.reward, where)
    if sample.reward_error is not None:
        check_text(sample.reward_error, f"{where}: reward_error")
    _check_arrays(sample, where)
    _check_spans(sample.version_spans, len(sample.response_tokens_G), where)


def check_new(sample: Sample, step: int | None) -> None:
    """Refuse a sample that must not be written in this step: `check_sample`, and what names it.

    A reader takes ids as opaque; a writer forms them as the page says. None: a validation.
    """
    check_sample(sample)
    where = f"sample {shown(sample.id)}"
    S = len(sample.prompt_tokens_P) + len(sample.response_tokens_G)
    check_number(S, MOST_TOKENS, f"{where}: number of tokens", 1)
    if len(sample.version_spans) > MOST_SPANS:
        raise TraceError(
            f"{where}: {len(sample.version_spans)} version spans, expected at most {MOST_SPANS}"
        )
    json_text(sample.extras, f"{where}: extras")
    if sample.reward is not None and sample.reward_error is not None:
        raise TraceError(f"{where}: a reward and a reward_error, expected one of them or neither")
    check_prompt_id(sample.prompt_id, f"{where}: prompt_id")
    found = _SAMPLE_ID.fullmatch(sample.id)
    if found is None or found[2] != sample.prompt_id:
        raise TraceError(
            f"{where}: of prompt {sample.prompt_id}, expected an id of the form "
            "'STEP/PROMPT_ID/K', such as '000003/17/2'; new_sample makes it"
        )
    group = sample.id.rpartition("/")[0]
    if sample.group != group:
        raise TraceError(f"{where}: group {shown(sample.group)}, expected {group!r}")
    if step is not None and found[1] != f"{step:06d}":
        raise TraceError(f"{where}: its id is of step {found[1]}, expected one of step {step:06d}")
    first = sample.id.removesuffix(found[3]) if found[3] else None
    if sample.branch_of != first:
        raise TraceError(f"{where}: branch_of {shown(sample.branch_of)}, expected {shown(first)}")
    if np.count_nonzero(np.isinf(sample.logprobs_G)):  # any() takes 10 times as long for few
        raise TraceError(
            f"{where}: infinite log-probs, expected finite ones, or NaN for one that is not known"
        )


def check_reward(value: object, where: str) -> float:
    """A finite number, as a float."""
    if type(value) is float and math.isfinite(value):
        return value
    if not isinstance(value, numbers.Real | np.bool_):
        raise TraceError(
            f"{where}: reward {shown(value)} of type {type(value).__name__}, expected a finite "
            "number, or None if there is none"
        )
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise TraceError(
            f"{where}: reward {shown(value)}, expected a finite number, or None if there is none"
        )
    return found


def json_text(value: object, where: str, depth: int = MOST_DEPTH) -> str:
    """A JSON object as text of at most TEXT_BYTES that `strict_json` takes."""
    if not isinstance(value, dict):
        raise TraceError(
            f"{where}: {shown(value)} of type {type(value).__name__}, expected a JSON object"
        )
    if not value:
        return "{}"
    _check_json(value, where, depth)
    text = json.dumps(value, allow_nan=False)
    if len(text) > TEXT_BYTES:
        raise TraceError(f"{where}: {len(text)} bytes of JSON, expected at most {TEXT_BYTES}")
    return text


def _check_json(value: object, where: str, depth: int) -> None:
    """Refuse what JSON lacks, and objects and lists nested more than `depth` deep."""
    match value:
        case None | bool():
            return
        case str():
            if not value.isascii() and _has_surrogate(value):
                raise TraceError(f"{where}: a surrogate in {shown(value)}, expected UTF-8")
        case int():
            if abs(value) >= 10 ** (MOST_DIGITS - 1):
                raise TraceError(
                    f"{where}: {shown(value)}, expected numbers of less than {MOST_DIGITS} digits"
                )
        case float():
            if not math.isfinite(value):
                raise TraceError(f"{where}: {value}, expected finite numbers, as JSON has them")
        case dict() | list() | tuple():
            if depth == 0:
                raise TraceError(f"{where}: objects and lists are nested too deep for a trace")
            if isinstance(value, dict):
                for key in value:
                    if not isinstance(key, str):
                        raise TraceError(f"{where}: a key {shown(key)}, expected texts as keys")
                    _check_json(key, where, depth)
                value = value.values()
            for inner in value:
                _check_json(inner, where, depth - 1)
        case _:
            raise TraceError(
                f"{where}: {shown(value)} of type {type(value).__name__} is not JSON; expected "
                "plain numbers, texts, lists and dicts"
            )


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _check_arrays(sample: Sample, where: str) -> None:
    for name, dtype in _ARRAYS.items():
        value = getattr(sample, name)
        if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            raise TraceError(
                f"{where}: {name} of type {type(value).__name__}, expected an array; new_sample "
                "makes it of a list"
            )
        if value.ndim != 1 or value.dtype != dtype:
            raise TraceError(
                f"{where}: {name} of type {value.dtype} and shape {value.shape}, expected "
                f"{np.dtype(dtype)} in one dimension; new_sample converts it"
            )
    G = len(sample.response_tokens_G)
    if len(sample.prompt_tokens_P) == 0:
        raise TraceError(f"{where}: no prompt token, expected at least one")
    for name in ("loss_mask_G", "logprobs_G"):
        found = len(getattr(sample, name))
        if found != G:
            raise TraceError(f"{where}: {found} values of {name} for {G} response tokens")
    check_number(len(sample.prompt_tokens_P) + G, MOST, f"{where}: number of tokens", 1)


def _check_spans(spans: object, G: int, where: str) -> None:
    if not isinstance(spans, tuple) or not all(isinstance(span, VersionSpan) for span in spans):
        raise TraceError(f"{where}: version spans {shown(spans)}, expected a tuple of VersionSpan")
    for span in spans:
        for name, value in vars(span).items():
            check_number(value, MOST, f"{where}: {name} of a version span")
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), G]
    ascending = all(start <= end for start, end in pairwise(ends))
    if ends != starts or not spans or not ascending:
        raise TraceError(
            f"{where}: version spans {shown(spans)} do not cover its {G} response tokens, each "
            "once and in order"
        )
