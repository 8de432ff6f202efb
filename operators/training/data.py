"""What a rank reads of a sealed step: its own samples, and of their routes its own layers.

Advantages come from the manifest's columns, so every rank can compute all of them and a group's
samples may lie on several ranks.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from operators.training.layout import Layout, LayoutRules, make_layout
from operators.training.replay import ReplayError
from pipeline.config.tree import RunConfig
from pipeline.rl.advantages import grpo_advantages
from pipeline.store import Store
from pipeline.traces import Manifest, read_routes, read_samples
from pipeline.traces.records import Geometry, Routes, Sample


@dataclass(frozen=True)
class StepData:
    """A sealed step as one rank sees it."""

    step: int
    manifest: Manifest
    layout: Layout
    samples: Mapping[str, Sample]
    """Of this data-parallel rank."""
    advantages: Mapping[str, float]
    """Of all samples."""
    routes: Mapping[str, Routes] | None
    """Recorded routes to replay, of this rank's layers; {} if it has none; None: none are read."""
    read_s: float
    """Seconds spent reading."""


def load_step(
    store: Store,
    manifest: Manifest,
    config: RunConfig,
    rules: LayoutRules,
    dp_rank: int,
    geometry: Geometry | None,
) -> StepData:
    """Read a rank's share of a sealed step.

    `geometry` names the MoE layers of this rank; routes are read if the config replays recorded
    ones. Raises ReplayError if the manifest has none, or those of another model; StoreError and
    TraceError from reading.
    """
    started = time.monotonic()
    rows = manifest.rows
    columns = rows.select(["id", "group", "reward", "prompt_length", "response_length"])
    values = columns.to_pydict()
    ids = values["id"]
    rewards = np.array([np.nan if r is None else r for r in values["reward"]], np.float64)
    advantages = grpo_advantages(rewards, values["group"], config.algorithm.norm_adv_by_std_in_grpo)
    lengths = {
        id: prompt + response - 1
        for id, prompt, response in zip(
            ids, values["prompt_length"], values["response_length"], strict=True
        )
    }
    layout = make_layout(manifest.step, lengths, rules)
    mine = layout.ids(dp_rank)
    samples = read_samples(store, manifest, mine)
    routes = None
    if replays_recorded(config) and geometry is not None:
        _check_geometry(manifest, geometry)
        routes = read_routes(store, manifest, mine, geometry.layers) if geometry.layers else {}
    return StepData(
        step=manifest.step,
        manifest=manifest,
        layout=layout,
        samples={sample.id: sample for sample in samples},
        advantages=dict(zip(ids, advantages.tolist(), strict=True)),
        routes=routes,
        read_s=time.monotonic() - started,
    )


def replays_recorded(config: RunConfig) -> bool:
    """Whether the manifest's own routes are replayed: the engine's, or those of replay_file.

    With replay_file R2 takes what an earlier log-prob pass recorded, and records nothing anew.
    """
    replay = config.actor_rollout_ref.actor.router_replay
    return replay.mode == "R3" or (replay.mode == "R2" and replay.replay_file is not None)


def records(config: RunConfig) -> bool:
    """Whether the log-prob pass records the routes that the update replays."""
    mode = config.actor_rollout_ref.actor.router_replay.mode
    return mode == "R2" and not replays_recorded(config)


def layout_rules(config: RunConfig, data_parallel: int) -> LayoutRules:
    """What of the config decides the layout."""
    actor = config.actor_rollout_ref.actor
    megatron = actor.megatron
    return LayoutRules(
        seed=config.trainer.seed,
        mini_batch_samples=actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
        micro_batch_samples=actor.ppo_micro_batch_size_per_gpu,
        epochs=actor.ppo_epochs,
        data_parallel=data_parallel,
        micro_batch_multiple=megatron.pipeline_model_parallel_size
        if megatron.virtual_pipeline_model_parallel_size
        else 1,
        sequence_slices=megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1,
    )


def valid_rows(manifest: Manifest) -> tuple[int, int]:
    """(rows with a valid recording in the manifest, all rows) of the whole step."""
    valid = sum(number or 0 for number in manifest.rows["rows_valid"].to_pylist())
    return valid, sum(manifest.rows["rows_total"].to_pylist())


def _check_geometry(manifest: Manifest, geometry: Geometry) -> None:
    found = manifest.geometry
    if found is None:
        raise ReplayError(
            f"step {manifest.step}: the manifest has no routes to replay; set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True, or "
            "actor_rollout_ref.actor.router_replay.mode=disabled"
        )
    missing = sorted(set(geometry.layers) - set(found.layers))
    if missing or (found.experts, found.topk) != (geometry.experts, geometry.topk):
        raise ReplayError(
            f"step {manifest.step}: the routes have {found.experts} experts, top-{found.topk}, "
            f"layers {list(found.layers)}; this rank's routers have {geometry.experts} experts, "
            f"top-{geometry.topk}, layers {list(geometry.layers)}: the routes are another model's"
        )
