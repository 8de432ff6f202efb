"""Comparison of mismatch corrections and their metrics with verl's.

Log-probs are rounded to float32, as in the trainer.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from pipeline.rl.corrections.apply import Corrected, Sampled, correct, normalized
from pipeline.rl.corrections.forms import (
    REJECTION_FORMS,
    Correction,
    rejections,
    weight_bounds,
)
from pipeline.rl.corrections.report import correction_metrics
from scripts.compare_with_verl.batch import Array, Batch, Row, apart


def corrections(helper: Any) -> Iterator[Row]:
    """Yield comparisons of importance weights, of rejections, and of the metrics of both."""
    for level in ("token", "sequence"):
        for threshold in ("1.5", "0.5_2.0"):
            for batch_normalize in (False, True):
                yield _weights(helper, level, threshold, batch_normalize)
    for form in REJECTION_FORMS:
        yield _rejection(helper, form)


def _weights(helper: Any, level: str, threshold: str, batch_normalize: bool) -> Row:
    correction = Correction(
        level=level, bounds=weight_bounds(threshold), normalized=batch_normalize
    )

    def difference(batch: Batch) -> float:
        theirs, _, their_metrics = helper.compute_rollout_correction_and_rejection_mask(
            **_arguments(batch), rollout_is=level, rollout_is_threshold=threshold,
            rollout_is_batch_normalize=batch_normalize,
        )  # fmt: skip
        found = _correct(batch, correction)
        assert found.weights_T is not None
        weights = batch.padded(found.weights_T)[batch.mask_BL]
        their_weights = theirs.batch["rollout_is_weights"].numpy()[batch.mask_BL]
        return max(apart(weights, their_weights), _metrics(found, correction, their_metrics))

    shape = "two bounds" if "_" in threshold else "truncated"
    shape += ", normalised" if batch_normalize else ""
    return Row(f"rollout_is `{level}`", "compute_rollout_correction_weights", shape, difference)


def _rejection(helper: Any, form: str) -> Row:
    correction = Correction(rejections=rejections(form, 1.3))

    def difference(batch: Batch) -> float:
        _, theirs, their_metrics = helper.compute_rollout_correction_and_rejection_mask(
            **_arguments(batch), rollout_rs=form, rollout_rs_threshold=1.3
        )
        found = _correct(batch, correction)
        kept = batch.padded(found.mask_T)
        return max(apart(kept, theirs.numpy()), _metrics(found, correction, their_metrics))

    return Row(f"rollout_rs `{form}`", "compute_rollout_rejection_mask", "", difference)


def _arguments(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the arguments for verl's function: log-probs rounded to float32, as float64."""
    old, engine = _floats(batch.old_BL), _floats(batch.engine_BL)
    return {
        "old_log_prob": torch.from_numpy(old.astype(np.float64)),
        "rollout_log_prob": torch.from_numpy(engine.astype(np.float64)),
        "response_mask": torch.from_numpy(batch.mask_BL.astype(np.float64)),
    }


def _floats(values_BL: Array) -> Array:
    return values_BL.astype(np.float32)


def _correct(batch: Batch, correction: Correction) -> Corrected:
    sampled = Sampled(
        trainer_T=batch.flat(_floats(batch.old_BL)),
        engine_T=batch.flat(_floats(batch.engine_BL)),
        mask_T=batch.flat(batch.mask_BL),
        lengths_X=batch.real_BL.sum(axis=1),
    )
    found = correct(correction, sampled)
    return normalized(found, correction, found.tally)


def _metrics(found: Corrected, correction: Correction, theirs: dict[str, float]) -> float:
    """Return the largest difference between metrics that Retrace and verl both compute."""
    ours = correction_metrics(correction, found.tally)
    names = ours.keys() & theirs.keys()
    return max(apart(ours[name], theirs[name]) for name in names)
