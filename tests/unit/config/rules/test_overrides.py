"""override_transformer_config is checked before Megatron-core starts."""

import dataclasses
import json
import types
import typing

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from pipeline.config.rules.overrides import override_problems
from pipeline.config.rules.transformer_fields import FIELDS
from tests.unit.config.settings import OVERRIDE, REPLAY, problems


def simple(kind):
    """Return the copy's type for an original type, or Any if YAML cannot express the type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (bool, int, float, str, type(None)) or origin is typing.Literal:
        return kind
    if origin in (typing.Union, types.UnionType):
        parts = [simple(part) for part in arguments]
        return typing.Any if typing.Any in parts else typing.Union[tuple(parts)]  # noqa: UP007
    if kind is list or origin in (list, tuple):
        return list[simple(arguments[0])] if arguments else list[typing.Any]
    return typing.Any


def test_the_copy_matches_the_original():
    hints = typing.get_type_hints(TransformerConfig)
    names = [field.name for field in dataclasses.fields(TransformerConfig)]
    assert {name: simple(hints[name]) for name in names} == FIELDS


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("moe_router_fusoin", True, "did you mean moe_router_fusion?"),
        ("foo", 1, "not a field of Megatron-core"),
        ("bias_dropout_fusion", "banana", "found 'banana', expected bool; correct it or leave it"),
        ("recompute_granularity", "ful", "expected full or selective or null; did you mean full?"),
        ("recompute_modules", ["mo"], "moe_act, shared_experts; did you mean moe?"),
        ("recompute_modules", ["moee"], "found 'moee', expected one or more of core_attn"),
        ("recompute_num_layers", "1", "expected int or null"),
    ],
)
def test_invalid_fields_are_named(name, value, text):
    [problem] = override_problems({name: value})
    assert problem.startswith(f"{OVERRIDE}.{name}: ")
    assert text in problem


def test_null_is_shown_as_in_a_settings_file():
    (_, problem) = override_problems({"recompute_modules": [None]})
    assert problem.startswith(f"{OVERRIDE}.recompute_modules: found null, expected one or more of")


@pytest.mark.parametrize("value", [True, 1.5, "x", [["x"]], {"a": 1}])
def test_a_wrong_type_is_a_problem_not_a_crash(tmp_path, value):
    """Other rules read the same fields and must not crash either, so the test sets all fields."""
    fields = dict.fromkeys(FIELDS, value)
    found = problems(tmp_path, f"{REPLAY}.mode=R2", f"{OVERRIDE}={json.dumps(fields)}")
    wrong = list(override_problems(fields))
    assert wrong
    assert set(wrong) <= set(found)


def test_valid_fields_pass():
    right = {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.01,
        "recompute_num_layers": None,
    }
    assert list(override_problems(right)) == []
