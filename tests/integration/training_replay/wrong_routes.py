"""Steps whose recorded routes are wrong, though every digest fits, in two ranks.

Arguments: run store, model folder, folder for results. Every rank leaves `<results>/RANK.json`: by
layout and step, the text of the ReplayError, or null where the step was trained; whether weights
were touched; the metrics of health.
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
"""42 samples of 21 response tokens on average: more than a verdict needs."""
FAULTS = ("shifted by a token", "shifted by a layer", "two exchanged", "none")
"""By step."""
STALE = len(FAULTS)
"""The last step once more, with the policy that it has made."""
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "dp2": ({}, tuple(range(STALE + 1))),
    "pp2": ({"pipeline_model_parallel_size": 2}, (2, 3)),
    "tp2 bf16": ({"tensor_model_parallel_size": 2, "dtype": "bfloat16"}, (1, 3)),
    **sample_or_all({}, {"cp2": ({"context_parallel_size": 2}, (0, 1, 2, 3))}),
}
"""Megatron's settings, and the steps."""


def spoiled(step: int, samples: list[Sample]) -> list[Sample]:
    """The samples of a step with its fault."""
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
    """Two samples of one length, each with a response of more than 32 rows."""
    long = [i for i, sample in enumerate(samples) if len(sample.response_tokens_G) > 32]
    pairs = [(a, b) for a in long for b in long if a < b]
    return next((a, b) for a, b in pairs if len(samples[a].tokens_S) == len(samples[b].tokens_S))


def with_sets(sample: Sample, sets_TLK: np.ndarray) -> Sample:
    """A sample with other routes."""
    return replace(sample, routes=Routes(sets_TLK.copy(), sample.routes.valid_T))


def program(run_uri: str, model: str, results: str) -> None:
    """Train the steps in each layout."""
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
    """Train a step, and tell what happened."""
    before = weights(rank)
    error, metrics = None, {}
    try:
        metrics = train_step(rank, data, 0.0, first=True).metrics
    except ReplayError as refused:
        error = str(refused)
    touched = any(not torch.equal(old, new) for old, new in zip(before, weights(rank), strict=True))
    return {"error": error, "touched": touched, "metrics": metrics}


def weights(rank: Rank) -> list[torch.Tensor]:
    """All weights of this rank."""
    return [p.detach().clone() for chunk in rank.chunks for p in chunk.parameters()]


if __name__ == "__main__":
    program(*sys.argv[1:])
