"""Train with NaN losses on one of two ranks, with no token in the loss, or without advantages.

The arguments are the run store, the model folder and the folder for results. Every rank writes
`<results>/RANK.json`. For each layout and case, the file contains the metrics or the message of the
UpdateError, whether the weights have changed, and whether they are finite.
"""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from operators.training.batches.step_data import layout_rules, load_step
from operators.training.errors import UpdateError
from operators.training.megatron import parallel
from operators.training.passes import update
from operators.training.passes.objective import loss_and_report, objective_of
from operators.training.rank import make_rank
from operators.training.step import train_step
from pipeline.store import open_store
from pipeline.traces import open_manifest
from tests.integration.training_replay.sealed import config_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"expert_model_parallel_size": 2},
    "pp2 bf16": {"pipeline_model_parallel_size": 2, "dtype": "bfloat16"},
}
WITHOUT_ADVANTAGE = "without advantage"
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "one": ({}, (1,)),
    "one, without clipping": ({"clip_grad": 0.0}, (1,)),
    "three": ({}, (1, 2, 3)),
    "four": ({}, (0, 1, 2, 3)),
    "not allowed": ({"skip_nonfinite": False}, (0,)),
    "empty": ({}, (0, 1, 2, 3)),
    WITHOUT_ADVANTAGE: ({"weight_decay": 10.0}, ()),
}
"""For each case: optimizer settings, and the mini-batches (of 4) with the fault."""


class Spoiled:
    """The objective and loss of the update, with a fault in some mini-batches.

    The fault is a NaN loss on rank 1, a mask that excludes all tokens on every rank, or (in all
    mini-batches) an advantage of 0 for every token.
    """

    def __init__(self, mini_batches: tuple[int, ...], case: str) -> None:
        self.mini_batches = mini_batches
        self.case = case
        self.current = -1

    def objective_of(self, *arguments: Any) -> Any:
        """Return the objective; the update calls this at the start of each mini-batch."""
        self.current += 1
        return objective_of(*arguments)

    def loss_and_report(self, objective: Any, targets: Any, *made: Any) -> Any:
        """Return the loss with the fault; the update calls this for each micro-batch."""
        if self.case == WITHOUT_ADVANTAGE:
            targets = replace(targets, advantages_T=torch.zeros_like(targets.advantages_T))
        if self.case == "empty":
            targets = replace(targets, mask_T=torch.zeros_like(targets.mask_T))
            return loss_and_report(objective, targets, *made)
        loss, tokens, report = loss_and_report(objective, targets, *made)
        if self.current in self.mini_batches and dist.get_rank() == 1:
            loss, report = (
                loss * float("nan"),
                {**report, "policy": report["policy"] * float("nan")},
            )
        return loss, tokens, report


def program(run_uri: str, model: str, results: str) -> None:
    """Train the step in each layout and case, and write the results.

    Args:
        run_uri: The run's store.
        model: The model's folder.
        results: The folder for results.
    """
    store = open_store(run_uri)
    manifest = open_manifest(store, 0)
    found: dict[str, Any] = {}
    for name, megatron in LAYOUTS.items():
        for case, (optim, mini_batches) in CASES.items():
            config = config_of(
                megatron=dict(megatron),
                optim={"lr": 1e-3, **optim},
                ppo_epochs=2,
                entropy_coeff=0.0 if case == WITHOUT_ADVANTAGE else 0.01,
            )
            position = parallel.start(config.actor_rollout_ref.actor.megatron)
            rank, _ = make_rank(config, position, Path(model))
            rules = layout_rules(config, position.data_parallel)
            data = load_step(store, manifest, config, rules, position.dp_rank, rank.geometry)
            spoiled = Spoiled(mini_batches, case)
            update.objective_of = spoiled.objective_of
            update.loss_and_report = spoiled.loss_and_report
            before = digest(rank)
            result: dict[str, Any] = {"metrics": None, "error": None}
            try:
                result["metrics"] = train_step(rank, data, 0.0, first=True).metrics
            except UpdateError as error:
                result["error"] = str(error)
            parameters = [p for chunk in rank.chunks for p in chunk.parameters()]
            result["finite"] = all(bool(torch.isfinite(p).all()) for p in parameters)
            found[f"{name}: {case}"] = {**result, "touched": digest(rank) != before}
            parallel.stop()
    Path(results, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def digest(rank: Any) -> str:
    """Return the SHA-256 of this rank's weights."""
    made = hashlib.sha256()
    for chunk in rank.chunks:
        for parameter in chunk.parameters():
            made.update(parameter.detach().float().numpy().tobytes())
    return made.hexdigest()


if __name__ == "__main__":
    program(*sys.argv[1:])
