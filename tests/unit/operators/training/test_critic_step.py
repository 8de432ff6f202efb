"""The critic: its metrics from the ranks' reports, compared with numpy over all tokens, and its
routes."""

import numpy as np
import pytest

from operators.training.critic_step import PASS, CriticReport, CriticStep, critic_metrics
from operators.training.passes.update import Updates
from operators.training.replay.counts import LayerCounts
from pipeline.rl.moments import moments


def report(values_T: np.ndarray, returns_T: np.ndarray, updates=()) -> CriticReport:
    return CriticReport(
        updates, moments(values_T), moments(returns_T), moments(returns_T - values_T)
    )


def step(**updates) -> CriticStep:
    return CriticStep(CriticReport(), Updates(**updates), {})


def test_metrics_cover_the_tokens_of_all_ranks():
    """Of four ranks, two have different numbers of tokens, one has no report, and one has no
    tokens."""
    rng = np.random.default_rng(0)
    values, returns = rng.normal(3, 2, (2, 100))
    sums = [
        {"vf_loss": 4.0, "vf_clipped": 1.0, "vpred": 8.0, "tokens": 10.0, "divisor": 2.0},
        {"vf_loss": 9.0, "vf_clipped": 0.0, "vpred": 6.0, "tokens": 10.0, "divisor": 3.0},
    ]
    reports = [
        report(values[:30], returns[:30], sums),
        None,
        report(values[30:], returns[30:], sums),
        report(values[:0], returns[:0]),
    ]
    found = critic_metrics(reports, step(grad_norms=[1.0, 3.0], lr=1e-5, skipped=1), {})
    assert found["critic/vf_loss"] == pytest.approx((8 / 4 + 18 / 6) / 2)
    assert found["critic/vf_clipfrac"] == pytest.approx((2 / 20 + 0) / 2)
    assert found["critic/vpred_mean"] == pytest.approx((16 / 20 + 12 / 20) / 2)
    explained = 1 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5)
    assert found["critic/vf_explained_var"] == pytest.approx(explained)
    for name, array in (("values", values), ("returns", returns)):
        for how in ("mean", "max", "min"):
            assert found[f"critic/{name}/{how}"] == pytest.approx(getattr(array, how)())
    assert found["critic/grad_norm"] == 2
    assert (found["critic/lr"], found["critic/skipped"]) == (1e-5, 1)
    assert found["critic/replay/coverage"] == 0
    assert found["critic/replay/agreement"] is None


def test_a_step_without_tokens_has_no_means():
    nothing = report(np.empty(0), np.empty(0))
    found = critic_metrics([nothing], step(empty=2), {})
    assert found["critic/skipped_empty"] == 2
    for name in ("values/mean", "returns/max", "vf_explained_var", "vf_loss", "grad_norm"):
        assert found[f"critic/{name}"] is None


def test_replay_metrics_cover_the_critics_first_pass():
    """The metrics cover all layers of this pass, but none of the policy's passes."""
    passes = {
        "log-prob pass": {0: LayerCounts(5, 5, 0, 5)},
        f"{PASS}values": {0: LayerCounts(8, 2, 3, 6), 1: LayerCounts(8, 2, 3, 4)},
        f"{PASS}epoch 0": {0: LayerCounts(1, 0, 0, 0)},
    }
    found = critic_metrics([None], step(), passes)
    assert found["critic/replay/coverage"] == 0.8
    assert found["critic/replay/agreement"] == 10 / 16
