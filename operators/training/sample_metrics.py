"""Metrics of a sealed step: rewards, lengths and ages of its samples, and times of its rollout.

pipeline/metrics/table.py describes the metrics. N is the number of samples in the step.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from operators.training.measured import mean, reduced, spread
from pipeline.metrics.metric import Metrics
from pipeline.rl.extra_means import REWARD, extra_means, source_means
from pipeline.run import keys
from pipeline.run.commit import read_commit
from pipeline.store import Store
from pipeline.traces.format.manifest import BASELINE

_QUANTILES = (10, 50, 90, 99)


def manifest_metrics(store: Store, step: int, columns: pa.Table, max_prompt_length: int) -> Metrics:
    """Return the metrics that depend only on the sealed step, not on training.

    Greedy baseline samples are left out, because they are not trained on.

    Args:
        store: The run's store.
        step: The sealed step.
        columns: The manifest's columns, one row per sample: `StepData.columns`.
        max_prompt_length: The limit for prompts, in tokens.
    """
    if "not_trained" in columns.column_names:
        greedy = pc.equal(columns["not_trained"], BASELINE).fill_null(False)
        columns = columns.filter(pc.invert(greedy))
    lengths_N = columns["response_length"].to_numpy()
    prompts_N = columns["prompt_length"].to_numpy()
    ages_N = step - columns["policy_version"].to_numpy()
    measured = {
        **spread("response_length", lengths_N),
        **spread("prompt_length", prompts_N),
        "prompt_length/clip_ratio": mean(
            int((prompts_N >= max_prompt_length).sum()), len(prompts_N)
        ),
        **spread("training/off_policy/trajectory_staleness_worst", ages_N),
    }
    return {
        **_reward_metrics(columns),
        **reduced([measured]),
        "response/count": len(lengths_N),
        **{f"response_length/p{q}": _quantile(lengths_N, q) for q in _QUANTILES},
        "perf/total_num_tokens": int(lengths_N.sum() + prompts_N.sum()),
        **_rollout_metrics(store, step, int(lengths_N.sum())),
    }


def _reward_metrics(columns: pa.Table) -> Metrics:
    rewards = columns["reward"]
    rewards_N = rewards.drop_null().to_numpy()
    scored = columns.select(["group", "reward"]).filter(pc.is_valid(rewards))
    # Cast to text, because each file of the manifest has its own dictionary.
    scored = scored.set_column(0, "group", scored["group"].cast(pa.string()))
    groups = scored.group_by("group").aggregate([("reward", "min"), ("reward", "max")])
    equal = pc.equal(groups["reward_min"], groups["reward_max"])
    return {
        **reduced([{**spread("critic/rewards", rewards_N), **spread("critic/score", rewards_N)}]),
        "critic/rewards/std": float(rewards_N.std(ddof=1)) if len(rewards_N) > 1 else None,
        "reward/masked": rewards.null_count,
        "reward/groups": len(groups),
        "reward/groups_without_variance": pc.sum(equal).as_py() or 0,
    }


def _quantile(values_N: npt.NDArray[Any], percent: int) -> float | None:
    return float(np.percentile(values_N, percent)) if len(values_N) else None


_ROLLOUT_TIMES = {
    "timing_s/gen": ("generation_s",),
    "timing_s/trace_write": ("capture_s", "encode_s", "upload_s"),
    "timing_s/trace_tail": ("after_generation_s",),
    "time/policy_fetch_s": ("policy_fetch_s",),
    "time/policy_stall_s": ("policy_stall_s",),
}
"""For each metric, the names of the values to add up from the commits of a step's shards."""


def _rollout_metrics(store: Store, step: int, tokens: int) -> Metrics:
    """Return the rollout's times and speed, and means of the reward function's results.

    Each time is the busiest rollout worker's total, in seconds; None if no shard's commit contains
    it. Rewards have a mean per data source, and values returned in addition to the score have a
    mean per name. `tokens` is the number of response tokens in the step; it is used unless every
    shard's commit contains the shard's own number.
    """
    makers = [
        read_commit(store, info.key)["maker"]
        for info in store.list(keys.step_prefix(step) + "rollout/")
        if info.key.endswith(".json")
    ]
    times = {name: _busiest(makers, parts) for name, parts in _ROLLOUT_TIMES.items()}
    # Older workers stored neither `sources` nor `extras` nor `left_out`.
    sources = source_means(maker.get("sources", {}) for maker in makers)
    extras = extra_means(maker.get("extras", {}) for maker in makers)
    generation_s = times["timing_s/gen"]
    # Workers also spent time on the samples of rejected groups and on greedy samples, so the tokens
    # of all these samples are included here.
    made = [maker["tokens"] for maker in makers if "tokens" in maker]
    tokens = sum(made) if len(made) == len(makers) else tokens
    return {
        **times,
        "perf/rollout_tokens_per_s": tokens / generation_s if generation_s else None,
        **{
            f"critic/rewards/{source}/mean": means[REWARD]
            for source, means in sources.items()
            if REWARD in means
        },
        **{f"extra/{name}": mean for name, mean in extras.items()},
        "reward/values_left_out": sum(maker.get("left_out", 0) for maker in makers),
    }


def _busiest(makers: Iterable[Mapping[str, Any]], parts: tuple[str, ...]) -> float | None:
    of_workers: dict[int, float] = {}
    for maker in makers:
        if all(part in maker for part in parts):
            worker = maker["worker"]
            of_workers[worker] = of_workers.get(worker, 0.0) + sum(maker[part] for part in parts)
    return max(of_workers.values(), default=None)
