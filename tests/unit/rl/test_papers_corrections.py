"""Each mismatch correction equals its definition (tests/unit/rl/reference) to 1e-6."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pipeline.rl.corrections.apply import Sampled, correct, normalized
from pipeline.rl.corrections.forms import (
    REJECTION_FORMS,
    WEIGHT_LEVELS,
    Correction,
    rejections,
    weight_bounds,
)
from tests.exhaustive import sample_or_all
from tests.unit.rl.reference import corrections as papers
from tests.unit.rl.reference.batch import Batch, batches

EXAMPLES = settings(
    deadline=None,
    max_examples=sample_or_all(15, 1000),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def sampled_of(batch: Batch) -> Sampled:
    return Sampled(
        trainer_T=np.concatenate([one.old_L for one in batch]).astype(np.float32),
        engine_T=np.concatenate([one.engine_L for one in batch]).astype(np.float32),
        mask_T=np.concatenate([one.mask_L for one in batch]),
        lengths_X=np.array([len(one.mask_L) for one in batch]),
    )


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("threshold", ["1.5", "0.5_2.0"])
@pytest.mark.parametrize("level", WEIGHT_LEVELS)
@given(batch=batches(spread=0.5))
@EXAMPLES
def test_weights_equal_their_definition(level, threshold, normalise, batch):
    bounds = weight_bounds(threshold)
    correction = Correction(level=level, bounds=bounds, normalized=normalise)
    sampled = sampled_of(batch)
    made = correct(correction, sampled)
    found = normalized(made, correction, made.tally).weights_T
    assert found is not None
    expected = papers.weights(batch, level, bounds.lower, bounds.upper, normalise)
    flat = [weight for of_sample in expected for weight in of_sample]
    assert found[sampled.mask_T] == pytest.approx(flat, rel=1e-6, abs=1e-6)
    assert (found[~sampled.mask_T] == 0).all()


@pytest.mark.parametrize("form", REJECTION_FORMS)
@given(batch=batches(spread=0.5), upper=st.sampled_from([1.05, 1.4, 3.0]))
@EXAMPLES
def test_rejection_equals_its_definition(form, batch, upper):
    (rejection,) = rejections(form, str(upper))
    sampled = sampled_of(batch)
    found = correct(Correction(rejections=(rejection,)), sampled).mask_T
    expected = [passed for one in papers.kept(batch, form, None, upper) for passed in one]
    assert found[sampled.mask_T].tolist() == expected
    assert not found[~sampled.mask_T].any()


@given(batch=batches(spread=1.0))
@EXAMPLES
def test_the_veto_equals_its_definition(batch):
    sampled = sampled_of(batch)
    found = correct(Correction(veto=0.2), sampled).mask_T
    expected = [
        not vetoed
        for one, vetoed in zip(batch, papers.vetoed(batch, 0.2), strict=True)
        for _ in one.counted
    ]
    assert found[sampled.mask_T].tolist() == expected
