"""Rules for override_transformer_config: the fields that users may set, and their values."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline.config.rules.transformer_fields import FIELDS
from pipeline.config.rules.transformer_rules import (
    FIXED,
    MEGATRON,
    OF_THE_MODEL,
    OVERRIDE,
    OWNED,
)
from pipeline.errors import nearest, shown

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_RECOMPUTED = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


def override_problems(override: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems with fields that users may not set, unknown names and mistyped values."""
    for name, value in override.items():
        found = f"{OVERRIDE}.{name}: found {shown(value)}"
        if name in OWNED:
            setting = f"{MEGATRON}.{OWNED[name]}"
            yield f"{found}, which has its own setting; use {setting} instead"
        elif name in OF_THE_MODEL:
            yield f"{found}, which the model's config.json determines; leave it out"
        elif name in FIXED:
            yield f"{found}, which {FIXED[name]}; leave it out"
        if name not in FIELDS:
            yield (
                f"{OVERRIDE}.{name}: not a field of Megatron-core 0.16.1's TransformerConfig; "
                f"{nearest(name, FIELDS)}"
            )
        elif not _fits(FIELDS[name], value):
            expected = _text(FIELDS[name])
            fix = nearest(value, expected.split(" or "), "correct it or leave it out")
            yield f"{found}, expected {expected}; {fix}"
    modules = override.get("recompute_modules")
    for module in modules if isinstance(modules, list) else ():
        if module not in _RECOMPUTED:
            yield (
                f"{OVERRIDE}.recompute_modules: found {shown(module)}, expected one or more of "
                f"{', '.join(_RECOMPUTED)}; {nearest(module, _RECOMPUTED)}"
            )


def _fits(kind: Any, value: Any) -> bool:
    try:
        TypeAdapter(kind, config=_STRICT).validate_python(value)
    except ValidationError:
        return False
    return True


def _text(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if get_origin(kind) is list:
        return f"a list of {_text(get_args(kind)[0])}"
    if isinstance(kind, type):
        return kind.__name__
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(options)
    return " or ".join(_text(option) for option in options)
