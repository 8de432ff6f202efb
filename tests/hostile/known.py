"""The undetectable cases with their reasons, and the cases that are still open."""

import re
from collections.abc import Sequence

from tests.hostile.case import NOT_NOTICED, Case

_ROUTES = ("value",)
_ONLY_THERE = "only the samples file contains the value, so only the file's digest protects it"

_BESIDE_TRACES = (
    r"(run|attempts/\d+|policies/\d+/policy|checkpoints/\d+/checkpoint|validations/[\d/]+(plan)?"
    r"|steps/\d+/(plan|metrics))\.json"
)

UNNOTICED: dict[str, tuple[Sequence[str], str]] = {
    rf"^json/[^:]*:{_BESIDE_TRACES}:attempt/(missing|text|empty|control|outside|foreign|another)": (
        (),
        "only the object's writer checks the write id; values that are not strings are reported",
    ),
    r"^json/.*:maker[./]": (
        (),
        "the field contains only a worker's statements about its own work, which nothing else "
        "confirms",
    ),
    r"^json/.*:run\.json:name/text/": ((), "a run's folder may have been renamed"),
    r"^json/.*:run\.json:config\.[a-z_.]*record_file/": (
        (),
        "only this field contains the location of the recorded samples; values that are not "
        "strings are reported",
    ),
    r"^json/.*:run\.json:inputs\.model(\.tokenizer\.json)?/(missing|empty)/": (
        (),
        "only this object lists the files of policy 0 other than its weights",
    ),
    r"^json/.*/metrics\.json:policy_sha256/missing/": ((), "older trainers did not write it"),
    r"^json/.*/metrics\.json:metrics[./]": (
        ("metrics",),
        "no other object contains a step's metrics; values that are not numbers are reported",
    ),
    r"^json/.*/plan\.json:sampling\.(temperature|top_p|top_k|max_tokens)/": (
        (),
        "only the plan contains the step's sampling settings; values that no engine accepts are "
        "reported",
    ),
    r"^json/.*/plan\.json:(seed|routes|shards|prompts/reversed|prompts\.\d+/another)": (
        (),
        "only the plan contains the shards and sampling; verify compares its prompts as a set",
    ),
    r"^moved/replayed-1\.0:steps/000000/plan\.json/lost/L0": (
        (),
        "a step that is sealed from a recorded set needs no plan",
    ),
    r"^json/.*:checkpoints/.*:layout/(object|empty)/": ((), "no other object contains the layout"),
    r"^json/.*:(checkpoints|policies|validations)/.*:files/reversed/": (
        (),
        "the order of files has no meaning",
    ),
    r"^json/.*/training/.*:digests/reversed/": ((), "the order of the samples has no meaning"),
    r"^json/policies:.*:tensors/reversed/": (
        (),
        "the order of shares and of their tensors has no meaning",
    ),
    r"^columns/.*samples\.parquet:logprobs/": (("logprobs_G",), _ONLY_THERE),
    r"^columns/.*samples\.parquet:loss_mask/": (("loss_mask_G",), _ONLY_THERE),
    r"^columns/.*samples\.parquet:finish_reason/": (("finish_reason",), _ONLY_THERE),
    r"^columns/.*samples\.parquet:extras/": (("extras",), _ONLY_THERE),
    r"^columns/.*samples\.parquet:seed/": (("seed",), _ONLY_THERE),
    r"^columns/[^:]*:steps/\d+/manifest[^:]*:not_trained/": (
        (),
        "only the manifest contains the reason; tests/unit/traces/format/statements.py covers the "
        "values that contradict the rewards or the plan",
    ),
    r"^metadata/.*:validations/.*:retrace\.producer/missing/": (
        (),
        "the key is for human readers, and docs/trace-format.md requires it only in steps",
    ),
    r"^columns/.*validations/": ((), "a validation's samples have no manifest"),
    r"^columns/filtered(set)?:.*/rollout/[^:]*samples\.parquet:reward(_error)?/": (
        (),
        "no manifest refers to rejected samples, and readers do not return them",
    ),
    r"^rows/filteredset:.*/rollout/0000[13]\..*samples\.parquet/names of two swapped/": (
        (),
        "no manifest refers to rejected samples",
    ),
    r"^moved/filteredset:.*/00001\.[^:]*samples\.parquet/swapped with .*/00003\.": (
        (),
        "the rejected groups are the same, and only a run's settings assign groups to shards",
    ),
    r"^json/r2[^:]*:.*manifest\.json:(geometry|provenance)/missing/": (
        (),
        "a missing key means null, which is the stored value anyway",
    ),
    r"^rows/.*validations/.*names of two swapped/": ((), "a validation's samples have no manifest"),
    r"^\w+/(r2|audited)-1\.0:.*training": (
        _ROUTES,
        "format 1.0 links a trainer's files to their step only through ids and lengths",
    ),
}
"""Maps patterns of case names to the fields that may differ unnoticed and to the reason."""

NAMED_ALONE: dict[str, tuple[Sequence[str], str]] = {
    r"^json/.*steps/.*/(rollout|training|manifest)[^:]*:attempt/": (
        (),
        "readers ignore the write id; verify compares it with the names of the files",
    ),
    r"^json/(?!.*/training\.json:).*provenance\.engine/": (
        (),
        "readers ignore the engine's name; verify compares it with the name in the routes file",
    ),
    r"^columns/.*samples\.parquet:version_spans/": (
        ("version_spans",),
        "readers take the spans from the samples file; verify compares their versions with the "
        "policy versions of the step",
    ),
    r"^columns/wide:.*manifest[^:]*:id/": (
        (),
        "all rows of a sample are in its group's segments, so they do not name the sample; verify "
        "compares its id with that in the samples file",
    ),
    r"^set/r2:manifest\.json/training false, set lost/": (
        _ROUTES,
        "the step has no training set and its manifest expects none, so readers see a step without "
        "routes; verify compares it with the run",
    ),
}
"""Like UNNOTICED, but for cases that `verify` reports."""

OPEN: dict[str, str] = {}
"""Known failures that are not fixed yet, with their reasons, keyed by pattern of case names.

A pattern must be removed as soon as all tested cases that match it pass.
"""


def not_noticed(case: Case) -> Sequence[str] | None:
    """Return the fields that may differ unnoticed, or None if readers must detect the case."""
    if case.expect == NOT_NOTICED:
        return ()
    if case.level == "L0" and "-1.0:" not in case.name:
        return None  # an object's own digest reveals the change
    for pattern, (fields, _) in {**UNNOTICED, **NAMED_ALONE}.items():
        if re.search(pattern, case.name):
            return fields
    return None


def may_be_silent(case: Case) -> bool:
    """Return whether `verify` may report no problem for the case."""
    named = any(re.search(pattern, case.name) for pattern in NAMED_ALONE)
    return not_noticed(case) is not None and not named


def open_pattern(name: str) -> str | None:
    """Return the pattern of OPEN that matches a case's name; None if no pattern matches."""
    return next((pattern for pattern in OPEN if re.search(pattern, name)), None)
