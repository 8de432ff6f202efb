"""override_transformer_config: names and values that Megatron-core knows, before it is started."""

import difflib
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline.config.transformer_fields import FIELDS

_RECOMPUTED = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


def override_problems(key: str, override: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the fields under `key`: unknown names, wrong types, values not allowed."""
    for name, value in override.items():
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            yield f"{key}.{name}: no field of Megatron-core 0.16.1's TransformerConfig; {hint}"
        elif not _fits(FIELDS[name], value):
            yield f"{key}.{name}: found {value!r}, expected {_text(FIELDS[name])}"
    modules = override.get("recompute_modules")
    for module in modules if isinstance(modules, list) else ():
        if module not in _RECOMPUTED:
            yield (
                f"{key}.recompute_modules: found {module!r}, expected some of "
                f"{', '.join(_RECOMPUTED)}"
            )


def _fits(kind: Any, value: Any) -> bool:
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
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
