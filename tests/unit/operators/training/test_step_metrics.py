"""Metrics of a step over its ranks and passes."""

from types import SimpleNamespace

import numpy as np
import pytest

from operators.training.replay.counts import LayerCounts
from operators.training.step_metrics import (
    RankReport,
    mismatch_of,
    replay_metrics,
    spread_of,
    total_counts,
    training_metrics,
)
from pipeline.metrics.metric import layers_of
from pipeline.rl.mismatch import Mismatch


def test_counts_of_ranks_add_up_for_each_layer():
    """Passes are counted separately, so that the log-prob pass cannot hide errors in an update."""
    of_ranks = [{1: LayerCounts(3, 1, 2, 3)}, {1: LayerCounts(5, 0, 1, 4)}]
    of_ranks += [{2: LayerCounts(8, 1, 3, 4)}]
    reports = [RankReport(counts={"log-prob pass": c, "update epoch 0": {}}) for c in of_ranks]
    of_passes = total_counts([*reports, RankReport()])
    assert of_passes["update epoch 0"] == {}
    total = of_passes["log-prob pass"]
    assert total == {1: LayerCounts(8, 1, 3, 7), 2: LayerCounts(8, 1, 3, 4)}
    metrics = replay_metrics(total)
    assert layers_of(metrics, "replay/agreement") == {1: 7 / 8, 2: 0.5}
    assert metrics["replay/rows"] == 8
    assert metrics["replay/coverage"] == 8 / 9
    assert metrics["replay/agreement"] == 11 / 16
    assert set(replay_metrics({}).values()) == {None}


def test_losses_are_means_over_the_tokens_of_all_ranks():
    """A loss is the mean over tokens, averaged over mini-batches; one rank reports nothing."""
    reports = [
        RankReport(Mismatch(2, 0.5, 1), None, [{"tokens": 2.0, "divisor": 2.0, "policy": 4.0}] * 2),
        RankReport(),
        RankReport(Mismatch(6, 0.3, 0), None, [{"tokens": 6.0, "divisor": 6.0, "policy": 0.0}] * 2),
    ]
    metrics = training_metrics(reports, {}, [1.0, 3.0])
    assert metrics["actor/pg_loss"] == 0.5
    assert metrics["actor/grad_norm"] == 2.0
    assert metrics["mismatch/kl"] == pytest.approx(0.1)
    assert metrics["mismatch/extreme_share"] == 1 / 8
    assert metrics["mismatch/kl_native"] is None
    assert metrics["actor/kl_loss"] is None


def test_each_number_of_the_updates_has_its_own_divisor():
    """Losses are divided by the divisor of the policy loss, all others by the number of tokens."""
    sums = {"tokens": 8.0, "divisor": 2.0, "policy": 3.0, "kl": 5.0, "entropy": 6.0}
    sums |= {"clipped": 1.0, "dual_clipped": 4.0, "log_ratio": 2.0, "high": 7.0}
    empty = dict.fromkeys(sums, 0.0)
    metrics = training_metrics([RankReport(updates=[sums]), RankReport(updates=[empty])], {}, [])
    expected = {
        "actor/pg_loss": 3 / 2,
        "actor/kl_loss": 5 / 2,
        "actor/entropy": 6 / 8,
        "actor/pg_clipfrac": 1 / 8,
        "actor/pg_clipfrac_lower": 4 / 8,
        "actor/ppo_kl": -2 / 8,
        "policy_loss/high": 7 / 8,
        "actor/tokens": 8,
    }
    assert {name: metrics[name] for name in expected} == expected


def test_the_mismatch_covers_only_tokens_that_count():
    """One token of each sample is excluded from the loss; the log-probs of these tokens differ by 5
    and by 8."""
    samples = {
        "a": SimpleNamespace(
            loss_mask_G=np.array([True, False, True]),
            logprobs_G=np.array([-1.0, -6.0, -2.0], np.float32),
        ),
        "b": SimpleNamespace(
            loss_mask_G=np.array([False, True]), logprobs_G=np.array([-9.0, -1.5], np.float32)
        ),
    }
    logprobs = {
        "a": np.array([-1.0, -1.0, -2.0], np.float32),
        "b": np.array([-1.0, -0.5], np.float32),
    }
    data = SimpleNamespace(samples=samples)
    found = mismatch_of(data, logprobs)
    assert (found.tokens, found.extreme) == (3, 1)
    assert found.kl_sum == pytest.approx(np.e - 2)
    assert mismatch_of(data, logprobs, logprobs) == Mismatch(3, 0.0, 0)


def test_each_distance_has_its_own_kl_and_share():
    """The distances of two ranks add up, and a rank without samples reports none."""
    distances = [Mismatch(4, 0.25 * n, n) for n in range(1, 5)]
    report = RankReport(
        mismatch=distances[0],
        mismatch_native=distances[1],
        mismatch_older=distances[2],
        staleness=distances[3],
    )
    metrics = training_metrics([report, RankReport(), report], {}, [])
    for n, name in enumerate(("", "_native", "_engine", "_staleness"), 1):
        assert metrics[f"mismatch/kl{name}"] == 0.0625 * n
        assert metrics[f"mismatch/extreme_share{name}"] == 0.25 * n


def test_finish_reasons_add_up_over_ranks():
    update = [{"tokens": 2.0, "divisor": 2.0, "policy": 4.0}]
    reports = [
        RankReport(updates=update, finish_reasons={"stop": 5, "length": 2}),
        RankReport(updates=update, finish_reasons={"length": 1, "abort": 1}, without_loss=1),
        RankReport(),
    ]
    metrics = training_metrics(reports, {}, [1.0])
    assert metrics["response_length/clip_ratio"] == 3 / 9
    assert metrics["response/aborted_ratio"] == 1 / 9
    assert metrics["response/masked"] == 1


def test_advantage_metrics_cover_the_tokens_of_all_ranks():
    parts = [[1.0, -2.0], [], [0.5]]
    of_ranks = [spread_of([np.array(part, np.float32)]) for part in parts]
    assert of_ranks[1] is None
    metrics = training_metrics([RankReport(advantages=one) for one in of_ranks], {}, [])
    found = [metrics[f"critic/advantages/{name}"] for name in ("mean", "max", "min")]
    assert found == [pytest.approx(-0.5 / 3), 1.0, -2.0]
    nothing = training_metrics([RankReport()], {}, [])
    assert nothing["critic/advantages/mean"] is None


def test_a_step_whose_mini_batches_were_all_skipped_has_no_losses():
    metrics = training_metrics([RankReport()], {}, [])
    assert (metrics["actor/grad_norm"], metrics["actor/pg_loss"], metrics["actor/tokens"]) == (
        None,
        None,
        0,
    )
