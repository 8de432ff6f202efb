"""Settings become bounds, and what is none is refused with what is expected."""

import math

import pytest

from pipeline.rl.corrections.forms import (
    REJECTION_FORMS,
    Bounds,
    Rejection,
    rejections,
    unknown_forms,
    weight_bounds,
)
from pipeline.rl.corrections.presets import PRESETS


def test_weight_bounds() -> None:
    assert weight_bounds(2) == weight_bounds("2.0") == Bounds(None, 2.0)
    assert weight_bounds("0.5_5.0") == Bounds(0.5, 5.0)
    assert weight_bounds("1e-2_1e1") == Bounds(0.01, 10.0)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "nan", "inf", "a", "2_1", "0_1", "_", "_2_", "1_x", "-1_2", "1_2_3"]
)
def test_bounds_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number > 0, or two as lower_upper"):
        weight_bounds(text)


def test_rejections() -> None:
    (one,) = rejections("seq_mean_k1", 2.0)
    assert one.form == "seq_mean_k1"
    assert one.bounds.lower == -math.log(2)
    assert one.bounds.upper == math.log(2)
    assert rejections(" token_k3 , seq_max_k2,token_k3", "0.1") == (
        Rejection("token_k3", Bounds(None, 0.1)),
        Rejection("seq_max_k2", Bounds(None, 0.1)),
    )


@pytest.mark.parametrize(
    ("forms", "threshold", "expected"),
    [
        ("token_k1,token_k2,token_k3", "0.1,0.2", "one threshold, or 3 between commas"),
        ("token_k1", "", "one threshold, or 1 between commas"),
        ("token_k2", "0.5_2.0", "one number > 0 for token_k2, found 0.5_2.0"),
        ("token_k2", "0", "one number > 0 for token_k2, found 0"),
        ("token_k1", "0.5", "two numbers > 0 as lower_upper for token_k1, or one number >= 1"),
        ("token_k1", "2_1", "two numbers > 0 as lower_upper for token_k1, or one number >= 1"),
        ("token_k1", "x", "two numbers > 0 as lower_upper for token_k1, or one number >= 1"),
    ],
)
def test_rejections_that_are_none(forms: str, threshold: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        rejections(forms, threshold)


def test_unknown_forms() -> None:
    assert unknown_forms("token_k1, geometric,seq_max_k1") == ["geometric", "seq_max_k1"]
    assert unknown_forms(",".join(REJECTION_FORMS)) == []
    assert unknown_forms("") == [""]


def test_presets_can_be_read() -> None:
    for name, values in PRESETS.items():
        assert values.keys() == PRESETS["disabled"].keys(), name
        assert weight_bounds(values["rollout_is_threshold"]).upper > 1
        if values["rollout_rs"]:
            assert rejections(values["rollout_rs"], values["rollout_rs_threshold"])
        assert values["bypass_mode"] == name.startswith("bypass")
