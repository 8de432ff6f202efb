"""Train steps whose recorded routes are wrong but have valid digests, with two ranks.

The arguments are the run store, the model folder and the folder for results. Every rank writes
`<results>/RANK.json`. For each layout and step, the file contains the message of the ReplayError
(null if the step was trained), whether weights have changed, and the step's metrics.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from operators.training.batches.step_data import layout_rules, load_step
from operators.training.errors import ReplayError
from operators.training.megatron import parallel
from operators.training.rank import Rank, make_rank
from operators.training.step import train_step
from pipeline.store import open_store
from pipeline.traces import Routes, Sample, open_manifest
from tests.exhaustive import sample_or_all
from tests.integration.training_replay.sealed import config_of

PROMPTS = 14
"""42 samples with 21 response tokens on average: more than the health check requires."""
FAULTS = ("shifted by a token", "shifted by a layer", "two exchanged", "none")
"""The fault of each step."""
STALE = len(FAULTS)
"""The last step, trained again with the policy that it produced."""
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "dp2": ({}, tuple(range(STALE + 1))),
    "pp2": ({"pipeline_model_parallel_size": 2}, (2, 3)),
    "tp2 bf16": ({"tensor_model_parallel_size": 2, "dtype": "bfloat16"}, (1, 3)),
    **sample_or_all({}, {"cp2": ({"context_parallel_size": 2}, (0, 1, 2, 3))}),
}
"""Megatron settings and steps, keyed by layout."""


def spoiled(step: int, samples: list[Sample]) -> list[Sample]:
    """Return the samples of a step with the step's fault."""
    fault = FAULTS[step]
    if fault.startswith("shifted"):
        axis = 0 if fault.endswith("token") else 1
        return [with_sets(sample, np.roll(sample.routes.sets_TLK, 1, axis)) for sample in samples]
    if fault == "two exchanged":
        a, b = exchanged(samples)
        sets = samples[a].routes.sets_TLK, samples[b].routes.sets_TLK
        samples[a], samples[b] = with_sets(samples[a], sets[1]), with_sets(samples[b], sets[0])
    return samples


def exchanged(samples: list[Sample]) -> tuple[int, int]:
    """Return the indices of two samples of equal length, with responses of more than 32 rows."""
    long = [i for i, sample in enumerate(samples) if len(sample.response_tokens_G) > 32]
    pairs = [(a, b) for a in long for b in long if a < b]
    return next((a, b) for a, b in pairs if len(samples[a].tokens_S) == len(samples[b].tokens_S))


def with_sets(sample: Sample, sets_TLK: np.ndarray) -> Sample:
    """Return a sample with different routes."""
    return replace(sample, routes=Routes(sets_TLK.copy(), sample.routes.valid_T))


def program(run_uri: str, model: str, results: str) -> None:
    """Train the steps in each layout, and write the results.

    Args:
        run_uri: The run's store.
        model: The model's folder.
        results: The folder for results.
    """
    store = open_store(run_uri)
    found = {}
    for name, (megatron, steps) in LAYOUTS.items():
        config = config_of(router_replay={"mode": "R3", "native_every": 0}, megatron=dict(megatron))
        position = parallel.start(config.actor_rollout_ref.actor.megatron)
        rank, _ = make_rank(config, position, Path(model))
        rules = layout_rules(config, position.data_parallel)
        for step in steps:
            manifest = open_manifest(store, min(step, STALE - 1))
            data = load_step(store, manifest, config, rules, position.dp_rank, rank.geometry)
            found[f"{name} {step}"] = trained(rank, data)
        parallel.stop()
    Path(results, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def trained(rank: Rank, data: Any) -> dict[str, Any]:
    """Train a step; return its error, its metrics, and whether weights have changed."""
    before = weights(rank)
    error, metrics = None, {}
    try:
        metrics = train_step(rank, data, 0.0, first=True).metrics
    except ReplayError as refused:
        error = str(refused)
    touched = any(not torch.equal(old, new) for old, new in zip(before, weights(rank), strict=True))
    return {"error": error, "touched": touched, "metrics": metrics}


def weights(rank: Rank) -> list[torch.Tensor]:
    """Return copies of all weights of this rank."""
    return [p.detach().clone() for chunk in rank.chunks for p in chunk.parameters()]


if __name__ == "__main__":
    program(*sys.argv[1:])
