"""Metrics of a sealed step, from its manifest and the commits of its shards."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from operators.training.sample_metrics import manifest_metrics
from pipeline.metrics.table import find_metric
from pipeline.run import keys
from pipeline.run.commit import commit
from tests.memory_store import MemoryStore


def columns(rewards: list[float | None], **more: Any) -> pa.Table:
    """Build samples in groups of two; each file of the manifest has its own dictionary."""
    N = len(rewards)
    names = [f"g{i // 2}" for i in range(N)]
    groups = [pa.array(names[i : i + 2]).dictionary_encode() for i in range(0, N, 2)]
    plain = {
        "policy_version": [0] * N,
        "prompt_length": [3] * N,
        "response_length": [2] * N,
        "reward": pa.array(rewards, pa.float64()),
    }
    return pa.table({"group": pa.chunked_array(groups), **plain, **more})


def test_metrics_of_extras_and_data_sources_are_means_over_all_shards():
    """The shards of an older worker contain neither extras nor data sources."""
    store = MemoryStore()
    sources = ({"gsm8k": {"reward": [1.0, 4]}}, {"gsm8k": {"reward": [3.0, 4]}, "math": {}})
    extras = ({"right": [3.0, 4]}, {"right": [1.0, 4], "long": [9.0, 2]})
    for shard in range(2):
        maker = {"worker": shard, "generation_s": 1.0 + shard}
        maker |= {"extras": extras[shard], "sources": sources[shard]}
        commit(store, keys.rollout(0, shard), {"maker": maker}, "a")
    commit(store, keys.rollout(0, 2), {"maker": {"worker": 2}}, "a")
    metrics = manifest_metrics(store, 0, columns([0.0, 1.0]), 8)
    assert (metrics["extra/right"], metrics["extra/long"]) == (0.5, 4.5)
    assert metrics["critic/rewards/gsm8k/mean"] == 0.5
    assert "critic/rewards/math/mean" not in metrics
    assert metrics["timing_s/gen"] == 2.0
    assert metrics["perf/rollout_tokens_per_s"] == 4 / 2.0
    assert [name for name in metrics if find_metric(name) is None] == []


def test_rollout_speed_counts_all_tokens_of_the_workers():
    """The speed includes the tokens of rejected groups and greedy baselines, although they are not
    trained on."""
    store = MemoryStore()
    for shard, tokens in enumerate((30, 50)):
        maker = {"worker": shard, "generation_s": 4.0, "tokens": tokens}
        commit(store, keys.rollout(0, shard), {"maker": maker}, "a")
    assert manifest_metrics(store, 0, columns([0.0, 1.0]), 8)["perf/rollout_tokens_per_s"] == 20


def test_times_of_policies_are_those_of_the_slowest_worker():
    """Each of a worker's shards contains the time since the previous shard."""
    store = MemoryStore()
    for shard, (worker, fetch_s, stall_s) in enumerate([(0, 4.0, 0.5), (0, 3.0, 0.5), (1, 6.0, 2)]):
        maker = {"worker": worker, "policy_fetch_s": fetch_s, "policy_stall_s": stall_s}
        commit(store, keys.rollout(0, shard), {"maker": maker}, "a")
    metrics = manifest_metrics(store, 0, columns([0.0, 1.0]), 8)
    assert metrics["time/policy_fetch_s"] == 4.0 + 3.0
    assert metrics["time/policy_stall_s"] == 2


def test_reward_metrics_leave_out_samples_without_a_reward():
    rewards = [1.0, 1.0, None, 0.0, 0.5, 1.0, None, None]
    metrics = manifest_metrics(MemoryStore(), 0, columns(rewards), 8)
    assert metrics["critic/rewards/mean"] == metrics["critic/score/mean"] == 0.7
    assert (metrics["critic/rewards/min"], metrics["critic/rewards/max"]) == (0.0, 1.0)
    assert metrics["critic/rewards/std"] == pytest.approx(np.std([1, 1, 0, 0.5, 1], ddof=1))
    assert metrics["reward/masked"] == 3
    assert metrics["reward/groups"] == 3
    assert metrics["reward/groups_without_variance"] == 2, "equal rewards, and a single one"


def test_metrics_summarise_lengths_and_ages():
    lengths = [1, 2, 3, 10]
    more = {
        "response_length": lengths,
        "prompt_length": [8, 1, 1, 2],
        "policy_version": [3, 4, 4, 4],
    }
    metrics = manifest_metrics(MemoryStore(), 4, columns([0.0] * 4, **more), 8)
    assert [metrics[f"response_length/{name}"] for name in ("min", "mean", "max")] == [1, 4, 10]
    assert metrics["response_length/p50"] == 2.5
    assert metrics["response_length/p90"] == pytest.approx(3 + 0.7 * 7)
    assert (metrics["prompt_length/mean"], metrics["prompt_length/clip_ratio"]) == (3.0, 0.25)
    ages = "training/off_policy/trajectory_staleness_worst"
    assert [metrics[f"{ages}/{name}"] for name in ("min", "mean", "max")] == [0, 0.25, 1]
    assert metrics["perf/total_num_tokens"] == 28


def test_metrics_leave_out_greedy_baselines():
    marks = pa.array([None, "greedy baseline", "no reward", None], pa.string())
    with_one = columns([1.0, 9.0, None, 0.0], not_trained=marks)
    metrics = manifest_metrics(MemoryStore(), 0, with_one, 8)
    assert (metrics["critic/rewards/mean"], metrics["critic/rewards/max"]) == (0.5, 1.0)
    assert (metrics["response/count"], metrics["reward/masked"]) == (3, 1)
