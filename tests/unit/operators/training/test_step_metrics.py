"""Metrics of a step, added up over ranks and passes."""

import pyarrow as pa
import pytest

from operators.training.replay.counts import LayerCounts
from operators.training.step_metrics import (
    RankReport,
    agreement_by_layer,
    manifest_metrics,
    replay_metrics,
    total_counts,
    training_metrics,
)
from pipeline.rl.mismatch import Mismatch
from pipeline.run import keys
from pipeline.run.commit import commit
from tests.memory_store import MemoryStore


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
    assert metrics["loss/policy"] == 0.5
    assert metrics["grad_norm"] == 2.0
    assert metrics["mismatch/kl"] == pytest.approx(0.1)
    assert metrics["mismatch/extreme_share"] == 1 / 8
    assert metrics["mismatch/kl_native"] is None
    assert metrics["loss/kl"] is None


def test_reasons_why_samples_ended_add_up_over_ranks():
    update = [{"tokens": 2.0, "divisor": 2.0, "policy": 4.0}]
    reports = [
        RankReport(updates=update, finish_reasons={"stop": 5, "length": 2}),
        RankReport(updates=update, finish_reasons={"length": 1, "abort": 1}, without_loss=1),
        RankReport(),
    ]
    metrics = training_metrics(reports, {}, [1.0])
    assert metrics["response/truncated"] == 3
    assert metrics["response/aborted"] == 1
    assert metrics["response/masked"] == 1


def test_a_step_whose_mini_batches_were_all_skipped():
    metrics = training_metrics([RankReport()], {}, [])
    assert (metrics["grad_norm"], metrics["loss/policy"], metrics["loss/tokens"]) == (None, None, 0)


def test_extras_of_the_reward_are_metrics():
    """Means over all shards; of an older worker's shards there are none."""
    store = MemoryStore()
    for shard, extras in enumerate(({"right": [3.0, 4]}, {"right": [1.0, 4], "long": [9.0, 2]})):
        maker = {"worker": shard, "generation_s": 1.0 + shard, "extras": extras}
        commit(store, keys.rollout(0, shard), {"maker": maker}, "a")
    commit(store, keys.rollout(0, 2), {"maker": {"worker": 2}}, "a")
    lengths = pa.array([1, 3])
    columns = pa.table({"reward": pa.array([0.0, 1.0]), "response_length": lengths})
    metrics = manifest_metrics(store, 0, columns)
    assert (metrics["extra/right"], metrics["extra/long"]) == (0.5, 4.5)
    assert metrics["time/rollout_s"] == 2.0
