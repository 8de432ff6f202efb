"""Each correction metric equals its definition (in `reference`) and is in the metrics table."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.metrics.correction_rows import CORRECTIONS
from pipeline.rl.corrections.apply import correct
from pipeline.rl.corrections.forms import (
    REJECTION_FORMS,
    WEIGHT_LEVELS,
    Correction,
    rejections,
    weight_bounds,
)
from pipeline.rl.corrections.report import correction_metrics
from tests.unit.rl.reference.batch import Batch, batches
from tests.unit.rl.reference.correction_metrics import SHARES, Settings, metrics
from tests.unit.rl.test_papers_corrections import EXAMPLES, sampled_of


def check(batch: Batch, correction: Correction, chosen: Settings) -> None:
    """Compare all metrics of a correction with their definitions.

    Standard deviations are computed from sums of squares, which loses precision.
    """
    found = correction_metrics(correction, correct(correction, sampled_of(batch)).tally)
    expected = metrics(batch, chosen)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None
        elif name.rpartition("_")[2] in SHARES:
            assert math.log(found[name]) == pytest.approx(math.log(value), rel=1.0001 / 256), name
        elif name.endswith("std"):
            assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-5), name
        else:
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("threshold", ["1.5", "0.5_2.0"])
@pytest.mark.parametrize("level", WEIGHT_LEVELS)
@given(batch=batches(spread=0.5), normalise=st.booleans())
@EXAMPLES
def test_metrics_of_weights_equal_their_definitions(level, threshold, batch, normalise):
    bounds = weight_bounds(threshold)
    correction = Correction(level=level, bounds=bounds, normalized=normalise)
    check(batch, correction, Settings(level, bounds.lower, bounds.upper, normalise))


@pytest.mark.parametrize("form", REJECTION_FORMS)
@given(
    batch=batches(spread=0.5),
    bounds=st.sampled_from([(None, 1.05), (None, 1.4), (0.7, 3.0)]),
    also=st.sampled_from([(), ("token_k2",), ("seq_mean_k3",)]),
    veto=st.sampled_from([None, 0.5]),
)
@EXAMPLES
def test_metrics_of_rejections_equal_their_definitions(form, batch, bounds, also, veto):
    lower, upper = bounds if form.endswith("k1") else (None, bounds[1] / 3)
    forms: dict[str, tuple[float | None, float]] = {**dict.fromkeys(also, (None, 0.5))}
    forms[form] = (lower, upper)
    texts = [str(high) if low is None else f"{low}_{high}" for low, high in forms.values()]
    correction = Correction(rejections=rejections(",".join(forms), ",".join(texts)), veto=veto)
    check(batch, correction, Settings(forms=forms, veto=veto))


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"level": "token", "bounds": weight_bounds("2.0")},
        {"level": "sequence", "bounds": weight_bounds("0.5_2.0"), "normalized": True},
        {"rejections": rejections("token_k1,seq_max_k3", "2.0")},
        {"veto": 0.1},
    ],
)
@given(batch=batches())
@settings(max_examples=1, deadline=None)
def test_the_table_lists_exactly_the_metrics_that_a_correction_has(
    chosen: dict[str, Any], batch: Batch
):
    correction = Correction(**chosen)
    holds = {
        "": True,
        "`rollout_is` is set": correction.level is not None,
        "`rollout_is_threshold` has two bounds": correction.bounds.lower is not None,
        "`rollout_is_batch_normalize` is true": correction.normalized,
        "`rollout_rs` or `rollout_token_veto_threshold` is set": (
            bool(correction.rejections) or correction.veto is not None
        ),
        "`rollout_token_veto_threshold` is set": correction.veto is not None,
        "`rollout_rs` contains `<form>`": True,
    }
    forms = [one.form for one in correction.rejections]
    listed = set()
    for row in CORRECTIONS.metrics:
        names = row.names if holds[row.when] else ()
        listed |= {
            name.replace("<form>", form)
            for name in names
            for form in (forms if row.is_open else [""])
        }
    found = correction_metrics(correction, correct(correction, sampled_of(batch)).tally)
    assert found.keys() == listed
