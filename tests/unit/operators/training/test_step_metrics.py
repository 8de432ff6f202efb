"""Metrics of a step, added up over ranks and passes."""

import numpy as np
import pytest

from operators.training.replay.counts import LayerCounts
from operators.training.step_metrics import (
    RankReport,
    agreement_by_layer,
    replay_metrics,
    spread_of,
    total_counts,
    training_metrics,
)
from pipeline.rl.mismatch import Mismatch


def test_counts_of_ranks_add_up_by_layer():
    """Each pass for itself: the log-prob pass does not hide what an update did."""
    of_ranks = [{1: LayerCounts(3, 1, 2, 3)}, {1: LayerCounts(5, 0, 1, 4)}]
    of_ranks += [{2: LayerCounts(8, 1, 3, 4)}]
    reports = [RankReport(counts={"log-prob pass": c, "update epoch 0": {}}) for c in of_ranks]
    of_passes = total_counts([*reports, RankReport()])
    assert of_passes["update epoch 0"] == {}
    total = of_passes["log-prob pass"]
    assert total == {1: LayerCounts(8, 1, 3, 7), 2: LayerCounts(8, 1, 3, 4)}
    assert agreement_by_layer(total) == {"1": 7 / 8, "2": 0.5}
    metrics = replay_metrics(total)
    assert metrics["replay/rows"] == 8
    assert metrics["replay/coverage"] == 8 / 9
    assert metrics["replay/agreement"] == 11 / 16
    assert set(replay_metrics({}).values()) == {None}


def test_losses_are_means_over_the_tokens_of_all_ranks():
    """Mean over mini-batches of the mean over tokens; some ranks report none."""
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


def test_reasons_why_samples_ended_add_up_over_ranks():
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


def test_advantages_are_those_of_all_ranks_tokens():
    parts = [[1.0, -2.0], [], [0.5]]
    of_ranks = [spread_of([np.array(part, np.float32)]) for part in parts]
    assert of_ranks[1] is None
    metrics = training_metrics([RankReport(advantages=one) for one in of_ranks], {}, [])
    found = [metrics[f"critic/advantages/{name}"] for name in ("mean", "max", "min")]
    assert found == [pytest.approx(-0.5 / 3), 1.0, -2.0]
    nothing = training_metrics([RankReport()], {}, [])
    assert nothing["critic/advantages/mean"] is None


def test_a_step_whose_mini_batches_were_all_skipped():
    metrics = training_metrics([RankReport()], {}, [])
    assert (metrics["actor/grad_norm"], metrics["actor/pg_loss"], metrics["actor/tokens"]) == (
        None,
        None,
        0,
    )


def test_what_a_users_loss_reports_now_and_then_is_0_elsewhere():
    own = {"tokens": 2.0, "divisor": 2.0, "policy": 1.0}
    reports = [RankReport(updates=[own]), RankReport(updates=[{**own, "high": 1.0}])]
    for ranks in (reports, reports[::-1]):
        assert training_metrics(ranks, {}, [])["policy_loss/high"] == 1 / 4
