"""Edge cases of corrections, and samples on several ranks.

test_papers_corrections.py checks the values of weights and rejections.
"""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.rl.corrections.apply import Corrected, Sampled, correct, normalized
from pipeline.rl.corrections.forms import (
    REJECTION_FORMS,
    Bounds,
    Correction,
    Rejection,
    rejections,
    weight_bounds,
)
from pipeline.rl.corrections.report import QUANTILES, correction_metrics
from pipeline.rl.moments import Tally, bins, quantiles

Part = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.bool_]]

FORMS_AND_BOUNDS = {
    "token_k1": "0.7_1.2",
    "token_k2": 0.02,
    "token_k3": 0.02,
    "seq_sum_k1": "0.6_1.5",
    "seq_sum_k2": 0.1,
    "seq_sum_k3": 0.1,
    "seq_mean_k1": "0.95_1.06",
    "seq_mean_k2": 0.02,
    "seq_mean_k3": 0.02,
    "seq_max_k2": 0.05,
    "seq_max_k3": 0.05,
}


def samples_of(seed: int, number: int = 12) -> list[Part]:
    """Return ragged samples in which some tokens are excluded from the loss.

    One sample has no token in the loss, and another has length 0.
    """
    rng = np.random.default_rng(seed)
    made: list[Part] = []
    for i in range(number):
        G = int(rng.integers(1, 9)) if i != 3 else 0
        engine_G = -rng.exponential(1, G).astype(np.float32)
        trainer_G = (engine_G + rng.normal(0, 0.2, G)).astype(np.float32)
        mask_G = rng.random(G) < (0 if i == 5 else 0.8)
        engine_G[~mask_G] = np.nan  # unknown outside the loss
        made.append((trainer_G, engine_G, mask_G))
    return made


def joined(samples: list[Part]) -> Sampled:
    return Sampled(
        *(np.concatenate([np.empty(0, kind), *parts]) for kind, parts in columns(samples)),
        lengths_X=np.array([len(sample[0]) for sample in samples], np.int64),
    )


def columns(samples: list[Part]) -> list[tuple[type, list[npt.NDArray[np.float32]]]]:
    kinds = (np.float32, np.float32, np.bool_)
    return [(kind, [sample[i] for sample in samples]) for i, kind in enumerate(kinds)]  # type: ignore[misc]


def by_sample(corrected: Corrected, samples: list[Part]) -> list[tuple[list[float], list[bool]]]:
    ends = np.cumsum([len(sample[0]) for sample in samples])[:-1]
    weights_T = corrected.weights_T
    assert weights_T is not None
    weights, masks = np.split(weights_T, ends), np.split(corrected.mask_T, ends)
    return [(w.tolist(), m.tolist()) for w, m in zip(weights, masks, strict=True)]


def logs_of(sample: Part) -> list[float]:
    return [float(t) - float(e) for t, e, counts in zip(*sample, strict=True) if counts]


def test_a_token_must_pass_all_criteria_and_a_veto_rejects_the_sequence() -> None:
    samples = samples_of(3, 40)

    def mask(correction: Correction) -> npt.NDArray[np.bool_]:
        return correct(correction, joined(samples)).mask_T

    forms = ("token_k3", "seq_mean_k2")
    both = rejections(",".join(forms), "0.02,0.03")
    assert [one.bounds for one in both] == [Bounds(None, 0.02), Bounds(None, 0.03)]
    one_by_one = [mask(Correction(rejections=(one,))) for one in both]
    assert (mask(Correction(rejections=both)) == one_by_one[0] & one_by_one[1]).all()
    assert (one_by_one[0] != one_by_one[1]).any()

    corrected = correct(Correction(veto=0.7), joined(samples))
    low = [any(log < math.log(0.7) for log in logs_of(sample)) for sample in samples]
    ends = np.cumsum([len(sample[0]) for sample in samples])[:-1]
    for sample, is_low, kept in zip(samples, low, np.split(corrected.mask_T, ends), strict=True):
        assert kept.tolist() == (sample[2] & (not is_low)).tolist()
    known = [bool(logs_of(sample)) for sample in samples]
    metrics = correction_metrics(Correction(veto=0.7), corrected.tally)
    assert 0 < sum(low) < sum(known)
    share = sum(low) / sum(known)
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(share)
    assert metrics["rollout_corr/rollout_rs_seq_rejected_fraction"] == pytest.approx(share)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_results_do_not_depend_on_the_distribution_over_ranks(level: str) -> None:
    """Masks and quantiles are bit-identical, and weights and metrics are equal up to rounding."""
    samples = samples_of(4, 30)
    correction = Correction(
        level,
        Bounds(None, 1.2),
        normalized=True,
        rejections=rejections("token_k1,seq_mean_k3,seq_max_k2", "0.7_1.4,0.05,0.3"),
        veto=0.5,
    )
    whole = correct(correction, joined(samples))
    expected = by_sample(normalized(whole, correction, whole.tally), samples)
    metrics = correction_metrics(correction, whole.tally)
    assert all(value is not None and math.isfinite(value) for value in metrics.values())
    rng = np.random.default_rng(5)
    for ranks in (2, 3, 40):
        rank_X = rng.integers(0, ranks, len(samples))
        rows = [np.flatnonzero(rank_X == rank) for rank in range(ranks)]
        filled = [of_rank for of_rank in rows if len(of_rank)]
        parts = [[samples[x] for x in of_rank] for of_rank in filled]
        corrected = [correct(correction, joined(part)) for part in parts]
        of_all = sum((one.tally for one in corrected), start=Tally())
        found = dict(metrics)
        for name, value in correction_metrics(correction, of_all).items():
            found.pop(name)
            assert value == pytest.approx(metrics[name], rel=1e-9, abs=1e-12), name
            if name.rpartition("_")[2] in QUANTILES:
                assert value == metrics[name], name
        assert not found
        for rank, one in enumerate(corrected):
            mine = by_sample(normalized(one, correction, of_all), parts[rank])
            for x, (weights, mask) in zip(filled[rank], mine, strict=True):
                assert mask == expected[x][1]
                assert weights == pytest.approx(expected[x][0], rel=1e-6)


@pytest.mark.parametrize("threshold", [1.0, "0.5_1", "1_2"])
def test_a_weight_equal_to_a_bound_is_kept(threshold: float | str) -> None:
    """The bounds are inclusive, so a token on which both policies agree always has the weight 1."""
    same = np.full(2, -1.5, np.float32)
    correction = Correction(level="token", bounds=weight_bounds(threshold))
    made = correct(correction, joined([(same, same, np.ones(2, np.bool_))]))
    assert made.weights_T is not None
    assert made.weights_T.tolist() == [1.0, 1.0]
    assert made.weights_T.dtype == normalized(made, correction, made.tally).weights_T.dtype
    assert made.tally["weights_high"].total == made.tally["weights_low"].total == 0


def test_the_share_of_low_weights_refers_to_the_lower_bound() -> None:
    """Without a lower bound, it refers to the reciprocal of the upper bound."""
    engine = np.full(4, -2.0, np.float32)
    trainer = engine + np.log([0.1, 0.3, 0.6, 1.0]).astype(np.float32)
    sampled = joined([(trainer, engine, np.ones(4, np.bool_))])
    for threshold, low in (("0.5_5", 2), ("0.2_2", 1), (5.0, 1), (2.0, 2)):
        made = correct(Correction(level="token", bounds=weight_bounds(threshold)), sampled)
        assert made.tally["weights_low"].total == low, threshold


def test_a_correction_without_a_level_has_no_weights() -> None:
    made = correct(Correction(rejections=rejections("token_k2", 0.02)), joined(samples_of(0)))
    assert made.weights_T is None
    assert not [name for name in made.tally.moments if name.startswith("weights")]


def test_normalized_weights_have_mean_1() -> None:
    samples = samples_of(6)
    for level, each in (("token", False), ("sequence", True), ("geometric", True)):
        correction = Correction(level, Bounds(None, 1.1), normalized=True)
        corrected = correct(correction, joined(samples))
        found = by_sample(normalized(corrected, correction, corrected.tally), samples)
        of_tokens = [
            [w for w, counts in zip(weights, sample[2], strict=True) if counts]
            for (weights, _), sample in zip(found, samples, strict=True)
        ]
        flat = [w for one in of_tokens for w in (one[:1] if each else one)]
        assert np.mean(flat) == pytest.approx(1.0, rel=1e-6)
        assert max(flat) > 1.1  # the bounds apply before the normalization


def test_metrics_of_a_step_without_tokens_that_count_are_null() -> None:
    """Counts of 0 do not cause a division by zero."""
    correction = Correction("token", rejections=rejections("token_k1,seq_max_k3", 2.0))
    corrected = correct(correction, joined([s for s in samples_of(7) if not logs_of(s)]))
    metrics = correction_metrics(correction, corrected.tally)
    assert set(metrics.values()) == {None}
    assert normalized(corrected, correction, corrected.tally) is corrected


def test_extreme_log_probs_stay_finite() -> None:
    mask_T = np.ones(3, np.bool_)
    sampled = Sampled(
        np.array([-1e4, 0, -1], np.float32),
        np.array([0, -1e4, -1], np.float32),
        mask_T,
        np.array([1, 1, 1], np.int64),
    )
    correction = Correction(
        "token", Bounds(None, 2.0), rejections=(Rejection("token_k3", Bounds(None, 1.0)),)
    )
    corrected = correct(correction, sampled)
    assert corrected.weights_T is not None
    assert corrected.weights_T.tolist() == pytest.approx([math.exp(-20), 2.0, 1.0])
    assert corrected.mask_T.tolist() == [False, False, True]
    metrics = correction_metrics(correction, corrected.tally)
    assert all(value is not None and math.isfinite(value) for value in metrics.values())


CORRECTIONS = {
    **{
        f"{level} {spec}": Correction(level, weight_bounds(spec), normalized=normalized)
        for level, spec, normalized in (
            ("token", 2.0, False),
            ("token", "0.5_5.0", True),
            ("sequence", 2.0, True),
            ("sequence", "0.5_5.0", False),
            ("geometric", 1.5, False),
        )
    },
    **{
        form: Correction(rejections=rejections(form, FORMS_AND_BOUNDS[form]))
        for form in REJECTION_FORMS
    },
    "veto": Correction(veto=0.7),
    "icepop, rejection and veto": Correction(
        "token", weight_bounds("0.5_5.0"), True, rejections("seq_sum_k1", "0.6_1.5"), 0.7
    ),
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["trainer", "engine"])
@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
def test_a_token_without_a_finite_logprob_is_dropped_and_counted(correction, which, value):
    """All other weights, masks and metrics are the same as if the loss did not include it."""
    samples = samples_of(9)
    sampled = joined(samples)
    places = np.flatnonzero(sampled.mask_T)[1::7]
    without_T = sampled.mask_T.copy()
    without_T[places] = False
    found_T = {"trainer": sampled.trainer_T, "engine": sampled.engine_T}[which].copy()
    found_T[places] = value
    spoiled = replace(sampled, **{f"{which}_T": found_T})
    found = correct(correction, spoiled)
    found = normalized(found, correction, found.tally)
    expected = correct(correction, replace(sampled, mask_T=without_T))
    expected = normalized(expected, correction, expected.tally)
    np.testing.assert_array_equal(found.mask_T, expected.mask_T)
    assert not found.mask_T[places].any()
    if correction.level is not None:
        np.testing.assert_array_equal(found.weights_T, expected.weights_T)
        assert found.weights_T is not None
        assert not found.weights_T[places].any()
    share = {"rollout_corr/dropped_fraction": len(places) / sampled.mask_T.sum()}
    metrics = correction_metrics(correction, found.tally)
    assert metrics == correction_metrics(correction, expected.tally) | share


def test_an_unknown_logprob_of_the_engine_matters_only_if_it_is_used():
    """Recorded sets of other engines may lack log-probs."""
    sampled = joined(samples_of(9))
    unknown = replace(sampled, engine_T=np.full_like(sampled.engine_T, np.nan))
    for needs_engine in (False, True):
        found = correct(Correction(), unknown, needs_engine)
        metrics = correction_metrics(Correction(), found.tally)
        np.testing.assert_array_equal(found.mask_T, sampled.mask_T & (not needs_engine))
        assert metrics["rollout_corr/dropped_fraction"] == needs_engine
        assert metrics["rollout_corr/kl"] is None
    broken = replace(sampled, trainer_T=np.full_like(sampled.trainer_T, np.nan))
    assert not correct(Correction(), broken).mask_T.any()


@pytest.mark.parametrize("scale", [1e-6, 0.01, 3.0])
def test_quantiles_are_within_a_bin(scale: float) -> None:
    values = np.random.default_rng(8).normal(0, scale, 1001).astype(np.float32)
    values[:20] = 0
    shares = tuple(QUANTILES.values())
    exact = np.quantile(values, shares, method="inverted_cdf")
    assert quantiles(bins(values), shares) == pytest.approx(exact, rel=1 / 256)
