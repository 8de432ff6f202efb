"""Train steps whose recorded routes are wrong but have valid digests, with two ranks.

The arguments are the run store, the model folder and the folder for results. Every rank writes
`<results>/RANK.json`. For each layout and step, the file contains the message of the ReplayError
(null if the step was trained), whether weights have changed, and the step's metrics.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.health import FAULTS as OF_BENCHMARK
from benchmarks.health import Recorded
from operators.training.batches.step_data import layout_rules, load_step
from operators.training.errors import ReplayError
from operators.training.megatron import parallel
from operators.training.rank import Rank, make_rank
from operators.training.step import train_step
from pipeline.store import open_store
from pipeline.traces import Routes, Sample, open_manifest
from tests.exhaustive import sample_or_all
from tests.integration.training_replay.sealed import config_of

PROMPTS = 16
"""48 samples with 23 response tokens on average."""


def responses_permuted(routes: Recorded, prompts: Mapping[str, int]) -> Recorded:
    """Give each response the routes of the next response of its group, as far as it has rows."""
    found = {}
    for id, of in routes.items():
        group, k = id.rsplit("/", 1)
        other = routes[f"{group}/{(int(k) + 1) % 3}"].sets_TLK[prompts[id] : len(of.valid_T)]
        sets_TLK = of.sets_TLK.copy()
        sets_TLK[prompts[id] : prompts[id] + len(other)] = other
        found[id] = Routes(sets_TLK, of.valid_T)
    return found


FAULTS = OF_BENCHMARK | {"responses permuted in groups": responses_permuted}
NAMES = [*(name for name in FAULTS if name != "as recorded"), "as recorded"]
"""The fault of each step. The last step is trained."""
STALE = len(NAMES)
"""The last step, trained again with the policy that it produced."""
_SOME = (NAMES.index("one layer of one sample shifted"), NAMES.index("as recorded"))
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "dp2": ({}, tuple(range(STALE + 1))),
    "pp2": ({"pipeline_model_parallel_size": 2}, _SOME),
    "tp2 bf16": ({"tensor_model_parallel_size": 2, "dtype": "bfloat16"}, _SOME),
    **sample_or_all({}, {"cp2": ({"context_parallel_size": 2}, tuple(range(STALE)))}),
}
"""Megatron settings and steps, keyed by layout."""


def spoiled(step: int, samples: list[Sample]) -> list[Sample]:
    """Return the samples of a step with the step's fault."""
    routes = {sample.id: sample.routes for sample in samples}
    prompts = {sample.id: len(sample.prompt_tokens_P) for sample in samples}
    faulty = FAULTS[NAMES[step]](routes, prompts)
    return [replace(sample, routes=faulty[sample.id]) for sample in samples]


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
            right = step >= NAMES.index("as recorded")
            found[f"{name} {step}"] = trained(rank, data, first=right)
        parallel.stop()
    Path(results, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def trained(rank: Rank, data: Any, first: bool) -> dict[str, Any]:
    """Train a step; return its error, its metrics, and whether weights have changed.

    A native pass is planned only in the first step of an attempt.
    """
    before = weights(rank)
    error, metrics = None, {}
    try:
        metrics = train_step(rank, data, 0.0, first).metrics
    except ReplayError as refused:
        error = str(refused)
    touched = any(not torch.equal(old, new) for old, new in zip(before, weights(rank), strict=True))
    return {"error": error, "touched": touched, "metrics": metrics}


def weights(rank: Rank) -> list[torch.Tensor]:
    """Return copies of all weights of this rank."""
    return [p.detach().clone() for chunk in rank.chunks for p in chunk.parameters()]


if __name__ == "__main__":
    program(*sys.argv[1:])
