"""Train two steps with each estimator, loss and aggregation mode in the tables.

The arguments are a run store with two sealed steps, the model folder and the folder for results.
Every rank writes `<results>/RANK.json`. For each case, the file contains the metrics of both steps
and the digests of this rank's weights.
"""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import torch.distributed as dist

from operators.training.batches.step_data import layout_rules, load_step
from operators.training.megatron import parallel
from operators.training.rank import make_rank
from operators.training.step import train_step
from pipeline.rl.estimator_table import ESTIMATORS
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.aggregate import AggregationMode
from pipeline.store import open_store
from pipeline.traces import open_manifest
from tests.integration.training_replay.baselines import with_baselines
from tests.integration.training_replay.nonfinite import digest
from tests.integration.training_replay.sealed import config_of

_CHOSEN = {"clip_cov_ratio": 0.2, "clip_cov_lb": -100.0, "clip_cov_ub": 100.0, "kl_cov_ratio": 0.2}
"""Settings that make Clip-Cov and KL-Cov choose tokens in a tiny batch."""
BASE = "vanilla"


def loss_settings(name: str) -> dict[str, Any]:
    """Return the settings of a loss, with its aggregation mode if the loss prescribes one."""
    mode = LOSSES[name].aggregation
    return {
        "policy_loss": {"loss_mode": name, **_CHOSEN},
        **({} if mode is None else {"loss_agg_mode": mode}),
    }


_CORRECTIONS: dict[str, dict[str, Any]] = {
    "decoupled_token_is": {"rollout_is_batch_normalize": True},
    "decoupled_seq_is_rs": {"rollout_rs_threshold": "0.01_100.0"},
    "decoupled_token_icepop": {},
    "bypass_ppo_clip": {},
    "bypass_pg_geo_rs_seq_tis": {"rollout_rs_threshold": "0.5_2.0"},
}
"""Presets, with bounds that keep some samples of policy 0 in the second step."""

CASES: dict[str, dict[str, Any]] = {
    **{name: loss_settings(name) for name in LOSSES},
    **{
        f"adv_estimator={name}": {"algorithm": {"adv_estimator": name}}
        for name in ESTIMATORS
        if name != "grpo"
    },
    "grpo without std": {"algorithm": {"norm_adv_by_std_in_grpo": False}},
    **{
        mode: {"loss_agg_mode": mode, "loss_scale_factor": 64}
        for mode in get_args(AggregationMode)
        if mode != "token-mean"
    },
    **{
        preset: {"algorithm": {"rollout_correction": {"preset": preset, **settings}}}
        for preset, settings in _CORRECTIONS.items()
    },
}
"""Settings of `actor` and `algorithm`, keyed by case. The first case must have unique results."""


def program(run_uri: str, model: str, results: str) -> None:
    """Train both steps in each case, and write the results.

    Args:
        run_uri: The run's store.
        model: The model's folder.
        results: The folder for results.
    """
    store = open_store(run_uri)
    found: dict[str, Any] = {}
    for case, settings in CASES.items():
        # In a narrow range, losses with clipping differ from those without it.
        config = config_of(**{"clip_ratio": 0.01, **settings})
        position = parallel.start(config.actor_rollout_ref.actor.megatron)
        rank, _ = make_rank(config, position, Path(model))
        rules = layout_rules(config, position.data_parallel)
        digests, metrics = [digest(rank)], []
        for step in range(2):
            manifest = open_manifest(store, step)
            data = load_step(store, manifest, config, rules, position.dp_rank, rank.geometry)
            data = with_baselines(data, config.algorithm.adv_estimator)
            metrics.append(train_step(rank, data, 0.0, first=step == 0).metrics)
            digests.append(digest(rank))
        found[case] = {"digests": digests, "metrics": metrics}
        parallel.stop()
    Path(results, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    program(*sys.argv[1:])
