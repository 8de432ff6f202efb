"""The settings of corrections are parsed; errors state the expected format."""

import math

import pytest

from pipeline.rl.corrections.forms import (
    PRESETS,
    REJECTION_FORMS,
    Bounds,
    Rejection,
    rejections,
    unknown_forms,
    weight_bounds,
)


def test_valid_weight_bounds_are_parsed() -> None:
    assert weight_bounds(2) == weight_bounds("2.0") == Bounds(None, 2.0)
    assert weight_bounds("0.5_5.0") == Bounds(0.5, 5.0)
    assert weight_bounds("1e-2_1e1") == Bounds(0.01, 10.0)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "nan", "inf", "a", "2_1", "0_1", "_", "_2_", "1_x", "-1_2", "1_2_3"]
)
def test_invalid_weight_bounds_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="expected a number > 0, or two numbers in the form lower_upper"
    ):
        weight_bounds(text)


def test_valid_rejections_are_parsed() -> None:
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
        ("token_k1,token_k2,token_k3", "0.1,0.2", "one threshold, or 3 separated by commas"),
        ("token_k1", "", "one threshold, or 1 separated by commas"),
        ("token_k2", "0.5_2.0", "expected one number > 0 for token_k2"),
        ("token_k2", "0", "expected one number > 0 for token_k2"),
        *(
            (
                "token_k1",
                threshold,
                "two numbers > 0 for token_k1, such as 0.5_2.0, or one number >= 1",
            )
            for threshold in ("0.5", "0", "-2", "2_1", "0_1", "x", "x_2", "1_x")
        ),
    ],
)
def test_invalid_rejections_are_refused(forms: str, threshold: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        rejections(forms, threshold)


def test_unknown_forms_of_rejection_are_returned() -> None:
    assert unknown_forms("token_k1, geometric,seq_max_k1") == ["geometric", "seq_max_k1"]
    assert unknown_forms(",".join(REJECTION_FORMS)) == []
    assert unknown_forms("") == [""]


def test_presets_have_valid_settings() -> None:
    for name, values in PRESETS.items():
        assert values.keys() == PRESETS["disabled"].keys(), name
        assert weight_bounds(values["rollout_is_threshold"]).upper > 1
        if values["rollout_rs"]:
            assert rejections(values["rollout_rs"], values["rollout_rs_threshold"])
        assert values["bypass_mode"] == name.startswith("bypass")
