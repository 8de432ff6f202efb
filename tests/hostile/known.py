"""What nobody can notice, and why; and cases that are still open."""

import re
from collections.abc import Sequence

from tests.hostile.case import NOT_NOTICED, Case

_ROUTES = ("value",)
_ONLY_THERE = "one samples file says it, and no other object: its digest alone protects it"

_BESIDE_TRACES = (
    r"(run|attempts/\d+|policies/\d+/policy|checkpoints/\d+/checkpoint|validations/[\d/]+(plan)?"
    r"|steps/\d+/(plan|metrics))\.json"
)

UNNOTICED: dict[str, tuple[Sequence[str], str]] = {
    r"^json/.*steps/.*/(rollout|training|manifest)[^:]*:attempt/": (
        (),
        "the write id, which its maker alone compares",
    ),
    rf"^json/[^:]*:{_BESIDE_TRACES}:attempt/(missing|text|empty|control|outside|foreign|another)": (
        (),
        "the same; another type than a text is named",
    ),
    r"^json/.*:maker[./]": ((), "what a worker says of its own work"),
    r"^json/.*provenance\.engine/": ((), "the engine's name is for people"),
    r"^json/.*:run\.json:name/text/": ((), "a run's folder may have been moved to another name"),
    r"^json/.*:run\.json:config\.[a-z_.]*record_file/": (
        (),
        "where else a run put its samples stands there alone; another type than a text is named",
    ),
    r"^json/.*:run\.json:inputs\.model(\.tokenizer\.json)?/(missing|empty)/": (
        (),
        "which files policy 0 has beside its weights stands there alone",
    ),
    r"^json/.*/metrics\.json:policy_sha256/missing/": ((), "older trainers did not write it"),
    r"^json/.*/plan\.json:sampling\.(temperature|top_p|top_k|max_tokens)/": (
        (),
        "how a step was sampled stands there alone; values that no engine takes are named",
    ),
    r"^json/.*/plan\.json:(seed|routes|shards|prompts/reversed|prompts\.\d+/another)": (
        (),
        "how a step was divided and sampled stands there alone; its prompts are compared as a set",
    ),
    r"^json/.*:checkpoints/.*:layout/(object|empty)/": ((), "a layout stands there alone"),
    r"^json/.*:(checkpoints|policies|validations)/.*:files/reversed/": (
        (),
        "the order of files means nothing",
    ),
    r"^columns/.*samples\.parquet:logprobs/": (("logprobs_G",), _ONLY_THERE),
    r"^columns/.*samples\.parquet:loss_mask/": (("loss_mask_G",), _ONLY_THERE),
    r"^columns/.*samples\.parquet:finish_reason/": (("finish_reason",), _ONLY_THERE),
    r"^columns/.*samples\.parquet:extras/": (("extras",), _ONLY_THERE),
    r"^columns/.*samples\.parquet:seed/": (("seed",), _ONLY_THERE),
    r"^columns/.*samples\.parquet:version_spans/": (("version_spans",), _ONLY_THERE),
    r"^columns/.*validations/": ((), "a validation's samples have no manifest"),
    r"^json/r2[^:]*:.*manifest\.json:(geometry|provenance)/missing/": (
        (),
        "a key that is missing says null, as the key does",
    ),
    r"^rows/.*validations/.*names of two swapped/": ((), "a validation's samples have no manifest"),
    r"^(moved|set)/.*another run's routes/L1": (
        _ROUTES,
        "a whole set of the same tokens: nothing beside its files says which experts were used",
    ),
    r"^\w+/(r2|audited)-1\.0:.*training": (
        _ROUTES,
        "format 1.0 ties a trainer's files to their step by ids and lengths alone",
    ),
}
"""By pattern of names: the fields that may be other ones at that level, and the reason."""

NAMED_ALONE: dict[str, tuple[Sequence[str], str]] = {
    r"^set/r2:manifest\.json/training false, set lost/": (
        _ROUTES,
        "without its set, and saying that it has none, it is a step without routes to its readers; "
        "verify compares it with its run",
    ),
}
"""As UNNOTICED, but `verify` names them."""

OPEN: dict[str, str] = {
    r"^moved/replayed-1\.0:steps/000000/plan\.json/lost/L0": (
        "verify asks for the plan of a step that was rolled out, not of one sealed from a set"
    ),
    r"^moved/r2set:steps/000000/manifest\.json/lost/L0": (
        "a set's step without its seal looks like one that is being written"
    ),
}
"""By pattern of names what is known and not mended yet. Strict: a pattern of which every case that
is tried comes out right must go."""


def not_noticed(case: Case) -> Sequence[str] | None:
    """The fields that may differ unnoticed; None: the case must be noticed."""
    if case.expect == NOT_NOTICED:
        return ()
    if case.level == "L0" and "-1.0:" not in case.name:
        return None  # an object's own digest tells
    for pattern, (fields, _) in {**UNNOTICED, **NAMED_ALONE}.items():
        if re.search(pattern, case.name):
            return fields
    return None


def may_be_silent(case: Case) -> bool:
    """Whether `verify` need not name the case."""
    named = any(re.search(pattern, case.name) for pattern in NAMED_ALONE)
    return not_noticed(case) is not None and not named


def open_pattern(name: str) -> str | None:
    """The pattern of OPEN that a case falls under."""
    return next((pattern for pattern in OPEN if re.search(pattern, name)), None)
