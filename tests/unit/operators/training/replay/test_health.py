"""The verdict on a step's recorded routes, from simulated counts and without a model.

Dimensions: L layers, T rows of a sample; see operators/training/replay/health.py for the others.
"""

from dataclasses import replace

import numpy as np
import pytest

from operators.training.replay.counts import BLOCK, OfSample
from operators.training.replay.health import Evidence, judge, kl_too_high
from operators.training.replay.hooks import DIFFERENT, FOREIGN
from pipeline.rl.mismatch import Mismatch

LAYERS = (1, 2, 4, 5, 7, 8)
PROMPT, RESPONSE = 13, 31
GROUPS, OF_GROUP = 12, 4
FLOOR = 0.1
"""The default of min_agreement."""
WRONG = (1.0, 0.7)
"""Shares of different and of foreign sets at rows with wrong routes; measured: foreign 57-99%."""
POLICIES = {"fresh": (0.07, 0.0), "two policies newer": (0.73, 0.004)}
"""The same shares at rows with correct routes, measured with 128 experts."""


def drawn(rng, shape, rates):
    """Draw sets that are different or foreign at the given rates."""
    different, foreign = rates
    value = rng.random(shape)
    return np.where(value < foreign, FOREIGN, np.where(value < different, DIFFERENT, 0))


class Step:
    """A simulated step: for each sample, how each recorded set compares with the router's choice.

    Attributes:
        misfits: uint8 [L, T] for each sample id.
    """

    def __init__(self, policy="fresh", seed=0, groups=GROUPS, response=RESPONSE):
        self.rng = np.random.default_rng(seed)
        shape = (len(LAYERS), PROMPT + response)
        ids = [f"0/{group}/{k}" for group in range(groups) for k in range(OF_GROUP)]
        self.misfits = {id: drawn(self.rng, shape, POLICIES[policy]) for id in ids}

    def spoil(self, ids, layers=slice(None), rows=slice(None), wrong=WRONG):
        """Give some rows wrong routes."""
        for id in ids:
            part = self.misfits[id][layers, rows]
            part[:] = drawn(self.rng, part.shape, wrong)

    def evidence(self, layers=slice(None), rows=slice(None), **kls):
        samples = {id: counted(of_LT, rows)(layers) for id, of_LT in self.misfits.items()}
        return Evidence(LAYERS[layers], samples, **kls)

    @property
    def health(self):
        return judge([self.evidence()], FLOOR)


def counted(misfits_LT, rows):
    """Return a function that counts the sets of a sample in some rows and the given layers."""

    def of(layers):
        here_T = np.zeros(misfits_LT.shape[1], bool)
        here_T[rows] = True
        at_CLT = np.stack([(misfits_LT[layers] >= least) & here_T for least in range(3)])
        starts = np.arange(0, misfits_LT.shape[1], BLOCK)
        parts = [at_CLT[:, :, :PROMPT].sum(axis=2), at_CLT[:, :, PROMPT:].sum(axis=2)]
        block_CB = np.add.reduceat(at_CLT.sum(axis=1), starts, axis=1)
        return OfSample(np.transpose(parts, (2, 0, 1)).astype(np.int32), block_CB.T)

    return of


@pytest.mark.parametrize("policy", POLICIES)
def test_correct_routes_are_healthy(policy):
    """The evidence stays below half of that for a refusal in each of 20 steps."""
    for seed in range(20):
        health = Step(policy, seed).health
        assert health.reasons == ()
        assert health.evidence < 0.5
    assert health.metrics["replay/unhealthy"] == 0
    agreement = 1 - POLICIES[policy][0]
    assert health.metrics["replay/agreement_layer_min"] == pytest.approx(agreement, abs=0.05)
    assert 0.5 < health.metrics["replay/agreement_sample_min"] / agreement < 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("response", [RESPONSE, 4])
def test_all_responses_shifted(policy, response):
    step = Step(policy, response=response)
    step.spoil(step.misfits, rows=slice(PROMPT, None))
    found = {finding.layer: finding for finding in step.health.layers}
    assert found.keys() == {*LAYERS}
    assert {finding.rows for finding in found.values()} == {"response"}
    assert {finding.sets for finding in found.values()} == {GROUPS * OF_GROUP * response}
    assert {finding.agreeing for finding in found.values()} == {0}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_copied_from_another(policy):
    step = Step(policy)
    step.spoil(step.misfits, layers=slice(2, 3))
    first, *_ = step.health.layers
    assert (first.layer, first.sample, first.rows) == (LAYERS[2], None, "all rows")


ONE = "0/3/1"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("layers", "rows", "layer", "named"),
    [
        (slice(2, 3), slice(None), LAYERS[2], "all rows"),
        (slice(2, 3), slice(PROMPT, None), LAYERS[2], "response"),
        (slice(None), slice(PROMPT + RESPONSE // 2, None), None, "response"),
        (slice(None), slice(-16, None), None, "response"),
        (slice(None), slice(17, 33), None, "rows 24..31"),
        (slice(None), slice(None), None, "all rows"),
    ],
)
def test_one_wrong_sample_is_named(policy, layers, rows, layer, named):
    """Cases: one layer, one layer of the response, half of the response, its last 16 rows, some
    rows in its middle, and the entire sample."""
    step = Step(policy)
    step.spoil([ONE], layers, rows)
    [finding] = step.health.samples
    assert (finding.sample, finding.layer) == (ONE, layer)
    assert finding.rows in (named, "response", "rows 16..23")
    assert finding.foreign / finding.sets > finding.limits[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_responses_exchanged_in_a_group(policy):
    step = Step(policy)
    ids = [id for id in step.misfits if id.startswith("0/5/")]
    step.spoil(ids, rows=slice(PROMPT, None))
    assert {finding.sample for finding in step.health.samples} == set(ids)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_few_wrong_rows_in_every_sample(policy):
    """No sample is conspicuous, but together they are: two rows of every response."""
    step = Step(policy)
    step.spoil(step.misfits, rows=slice(PROMPT, PROMPT + 2))
    [finding] = [finding for finding in step.health.layers if finding.layer is None]
    assert (finding.sample, finding.rows) == (None, "response")


def test_most_samples_wrong_in_one_layer():
    """The step's usual agreement is taken from the samples that are right."""
    step = Step("two policies newer")
    ids = list(step.misfits)[: len(step.misfits) * 7 // 10]
    step.spoil(ids, layers=slice(2, 3))
    assert LAYERS[2] in {finding.layer for finding in step.health.layers}
    assert {finding.sample for finding in step.health.samples} == set(ids)


def test_the_same_verdict_in_every_layout():
    """Pipeline stages count their own layers, and context-parallel ranks their own rows."""
    step = Step()
    step.spoil([ONE], layers=slice(2, 3))
    halves = [
        step.evidence(layers, rows)
        for layers in (slice(0, 4), slice(4, None))
        for rows in (slice(0, 20), slice(20, None))
    ]
    assert judge(halves, FLOOR) == step.health != Step().health


def test_an_agreement_below_the_minimum_is_a_finding():
    """Routes without foreign sets: the policy has changed too much."""
    step = Step(groups=100)
    step.spoil(step.misfits, layers=slice(0, 1), wrong=(0.75, 0.0))
    finding = judge([step.evidence()], 0.3).layers[0]
    assert (finding.layer, finding.limits) == (LAYERS[0], (pytest.approx(0.7 - 0.4), 0.05))
    assert step.health.layers == ()


def test_samples_without_replayed_rows_are_ignored():
    step = Step("two policies newer")
    rows = slice(0, 0)
    aborted = {
        f"0/{20 + i}/0": counted(of, rows)(slice(None))
        for i, of in enumerate(step.misfits.values())
    }
    whole = step.evidence()
    health = judge([replace(whole, samples={**whole.samples, **aborted})], FLOOR)
    assert health.reasons == ()


def kl(tokens, per_token):
    return Mismatch(tokens, per_token * tokens, 0)


def test_kl_with_replay_far_above_the_native_kl_is_a_finding():
    step = Step()
    assert judge([step.evidence(replayed=kl(512, 1.2))], FLOOR).kl is None  # not measured
    whole = step.evidence(replayed=kl(512, 1.2), native=kl(512, 1.1e-4))
    health = judge([whole], FLOOR)
    assert health.kl == (pytest.approx(1.2), pytest.approx(1.1e-4))
    assert health.metrics["replay/unhealthy"] == 1
    assert judge([replace(whole, native=kl(512, 0.15))], FLOOR).kl is None


def test_the_limit_for_the_kl():
    """10 times the native KL, plus 0.001 per token, plus 0.5."""
    assert not kl_too_high(kl(10, 0.05), 0.0)
    assert kl_too_high(kl(10, 0.06), 0.0)
    assert not kl_too_high(kl(100_000, 0.19), 0.019)
    assert kl_too_high(kl(100_000, 0.2), 0.019)
    assert kl_too_high(kl(10, float("nan")), 1e-4)
