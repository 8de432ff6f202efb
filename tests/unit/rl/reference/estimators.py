"""Advantages from the papers, computed sample by sample and token by token.

Each function takes a batch and settings and returns, for each sample, the advantages of its tokens.
Advantages of tokens excluded from the loss have no meaning. No statistic includes samples that are
not trained on. A sample that cannot be compared with others has advantage 0.
"""

import math
from types import SimpleNamespace
from typing import Any

from tests.unit.rl.reference.batch import Batch, Sample

Advantages = list[list[float]]


def _known(batch: Batch) -> Batch:
    return [one for one in batch if not math.isnan(one.reward)]


def _group(batch: Batch, sample: Sample) -> list[float]:
    """Return the scores of a sample's group."""
    return [one.score for one in _known(batch) if one.group == sample.group]


def _mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def _deviation(numbers: list[float]) -> float:
    """Return the unbiased standard deviation; 0 for a single number."""
    mean = _mean(numbers)
    return math.sqrt(math.fsum((n - mean) ** 2 for n in numbers) / max(len(numbers) - 1, 1))


def _of_samples(batch: Batch, advantage: Any) -> Advantages:
    """Return advantages that are equal for all tokens of a sample."""
    return [
        [0.0 if math.isnan(one.reward) else advantage(one, _group(batch, one))] * len(one.mask_L)
        for one in batch
    ]


def grpo(batch: Batch, settings: SimpleNamespace) -> Advantages:
    """GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2: (r - mean) / std.

    Without the division, this is Dr. GRPO's advantage (arXiv 2503.20783).
    """

    def advantage(sample: Sample, scores: list[float]) -> float:
        centred = sample.score - _mean(scores)
        return (
            centred / (_deviation(scores) + 1e-6) if settings.norm_adv_by_std_in_grpo else centred
        )

    return _of_samples(batch, advantage)


def grpo_passk(batch: Batch, settings: SimpleNamespace) -> Advantages:
    """Pass@k (arXiv 2503.19595): the advantage of a group's best sample.

    It is the sample's lead over the second best sample. All other samples have advantage 0.
    """

    def advantage(sample: Sample, scores: list[float]) -> float:
        first, *others = sorted(scores, reverse=True)
        if not others or sample.score != first:
            return 0.0
        scale = _deviation(scores) + 1e-6 if settings.norm_adv_by_std_in_grpo else 1.0
        return (first - others[0]) / scale

    return _of_samples(batch, advantage)


def rloo(batch: Batch, settings: SimpleNamespace) -> Advantages:
    """RLOO (arXiv 2402.14740), equation 4: the score minus the mean of the other samples."""

    def advantage(sample: Sample, scores: list[float]) -> float:
        others = list(scores)
        others.remove(sample.score)
        return sample.score - _mean(others) if others else 0.0

    return _of_samples(batch, advantage)


def opo(batch: Batch, settings: SimpleNamespace) -> Advantages:
    """OPO (arXiv 2505.23585), equation 7: the score minus a baseline.

    The baseline is the group's mean score, weighted by response length.
    """
    advantages = []
    for sample in batch:
        group = [one for one in _known(batch) if one.group == sample.group]
        tokens = sum(len(one.counted) for one in group)
        if math.isnan(sample.reward) or len(group) == 1:
            advantages.append([0.0] * len(sample.mask_L))
            continue
        baseline = math.fsum(len(one.counted) * one.score for one in group) / tokens
        advantages.append([sample.score - baseline] * len(sample.mask_L))
    return advantages


def gpg(batch: Batch, settings: SimpleNamespace) -> Advantages:
    """GPG (arXiv 2504.02546), equation 5 with F_norm = 1.

    alpha is the inverse of the share of samples whose score is not 0.
    """
    known = _known(batch)
    alpha = len(known) / max(sum(one.score != 0 for one in known), 1)
    return _of_samples(
        batch,
        lambda sample, scores: alpha * (sample.score - _mean(scores)) if len(scores) > 1 else 0.0,
    )


def _steps(sample: Sample) -> list[float]:
    """Return the score of each time step; every token in the loss is one step.

    The score of any other token is added to the score of the previous step.
    """
    scores: list[float] = []
    for counts, score in zip(sample.mask_L, sample.scores_L, strict=True):
        if counts:
            scores.append(float(score))
        elif scores:
            scores[-1] += float(score)
    return scores


def _at_tokens(sample: Sample, numbers: list[float]) -> list[float]:
    """Assign each step's value to its token; tokens excluded from the loss get 0."""
    left = iter(numbers)
    return [next(left) if counts else 0.0 for counts in sample.mask_L]


def _whitened(steps: list[list[float]]) -> list[list[float]]:
    """Return (x - mean) / sqrt(unbiased variance + 1e-8) over the steps of all samples."""
    every = [number for of_sample in steps for number in of_sample]
    mean, scale = _mean(every), math.sqrt(_deviation(every) ** 2 + 1e-8)
    return [[(number - mean) / scale for number in of_sample] for of_sample in steps]


def reinforce_plus_plus(batch: Batch, settings: SimpleNamespace) -> Advantages:
    """REINFORCE++ (arXiv 2501.03262), section 3.2.

    R_t = sum over k >= t of gamma^(k-t) s_k, whitened.
    """
    returns = []
    for sample in batch:
        scores = _steps(sample)
        returns.append(
            [
                math.fsum(settings.gamma ** (k - t) * scores[k] for k in range(t, len(scores)))
                for t in range(len(scores))
            ]
        )
    return [_at_tokens(*pair) for pair in zip(batch, _whitened(returns), strict=True)]


def reinforce_plus_plus_baseline(batch: Batch, settings: SimpleNamespace) -> Advantages:
    """REINFORCE++ with baseline (arXiv 2501.03262): the score minus the group's mean, whitened."""
    centred = _of_samples(batch, lambda sample, scores: sample.score - _mean(scores))
    steps = [
        [numbers[token] for token in sample.counted]
        for sample, numbers in zip(batch, centred, strict=True)
    ]
    return [_at_tokens(*pair) for pair in zip(batch, _whitened(steps), strict=True)]


def remax(batch: Batch, settings: SimpleNamespace) -> Advantages:
    """ReMax (arXiv 2310.10505), algorithm 1: the return minus the greedy sample's reward."""
    return [
        _at_tokens(
            sample,
            [math.fsum(scores[t:]) - sample.baseline for t in range(len(scores))],
        )
        for sample in batch
        for scores in [_steps(sample)]
    ]


def gae(batch: Batch, settings: SimpleNamespace) -> Advantages:
    """GAE (arXiv 1506.02438), equation 16, whitened.

    A_t = sum over k >= t of (gamma lam)^(k-t) delta_k, with delta_k = s_k + gamma V_(k+1) - V_k.
    """
    return [_at_tokens(*pair) for pair in zip(batch, _whitened(_gae(batch, settings)), strict=True)]


def gae_returns(batch: Batch, settings: SimpleNamespace) -> Advantages:
    """Return the critic's targets: A + V, with A before whitening."""
    return [
        _at_tokens(
            sample, [a + sample.values_L[t] for a, t in zip(of, sample.counted, strict=True)]
        )
        for sample, of in zip(batch, _gae(batch, settings), strict=True)
    ]


def _gae(batch: Batch, settings: SimpleNamespace) -> list[list[float]]:
    advantages = []
    for sample in batch:
        scores = _steps(sample)
        values = [*(float(sample.values_L[t]) for t in sample.counted), 0.0]
        deltas = [
            score + settings.gamma * values[k + 1] - values[k] for k, score in enumerate(scores)
        ]
        discount = settings.gamma * settings.lam
        advantages.append(
            [
                math.fsum(discount ** (k - t) * deltas[k] for k in range(t, len(deltas)))
                for t in range(len(deltas))
            ]
        )
    return advantages


ESTIMATORS = {
    function.__name__: function
    for function in (
        grpo, grpo_passk, rloo, opo, gpg, reinforce_plus_plus, reinforce_plus_plus_baseline, remax,
        gae,
    )
}  # fmt: skip
