"""Train two recorded steps of the quickstart with every algorithm, each from policy 0.

The arguments are the run that recorded the steps, the file for the results, this process's number
and the total number of processes, which share the cases. For each of this process's cases, the file
contains the metrics of both steps, and the digests of the weights before and after each step.
"""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch.distributed as dist

from operators.training.batches.step_data import layout_rules, load_step
from operators.training.megatron import parallel
from operators.training.rank import make_rank
from operators.training.step import train_step
from pipeline.config.reading.load import load_config
from pipeline.config.rules.check import config_problems
from pipeline.store import open_store
from pipeline.traces import open_manifest
from tests.integration.run.algorithm_cases import CASES, SHARED
from tests.integration.run.retrace_runs import EXAMPLE, small
from tests.integration.training_replay.nonfinite import digest


def train(run_uri: str, words: list[str]) -> dict[str, Any]:
    """Train both steps of a run with these settings, and return metrics and digests of weights."""
    config = load_config(EXAMPLE, words).config
    problems = config_problems(config, None)
    assert problems == [], problems
    position = parallel.start(config.actor_rollout_ref.actor.megatron)
    rank, _ = make_rank(config, position, Path(config.actor_rollout_ref.model.path))
    rules = layout_rules(config, position.data_parallel)
    digests, metrics = [digest(rank)], []
    algorithm, store = config.algorithm, open_store(run_uri)
    kl_coef = algorithm.kl_ctrl.kl_coef if algorithm.use_kl_in_reward else 0.0
    for step in range(2):
        manifest = open_manifest(store, step)
        data = load_step(store, manifest, config, rules, position.dp_rank, rank.geometry)
        with closing(data):
            trained = train_step(rank, data, 0.0, first=step == 0, kl_coef=kl_coef)
        kl_coef = trained.next_kl_coef or 0.0
        metrics.append(trained.metrics)
        digests.append(digest(rank))
    parallel.stop()
    return {"digests": digests, "metrics": metrics}


def program(run_uri: str, results: str, part: str, parts: str) -> None:
    """Train in this process's cases, and write the results.

    Args:
        run_uri: The run that recorded the steps.
        results: The file for the results.
        part: This process's number, counted from 0.
        parts: The number of processes.
    """
    folder = Path(results).parent
    found = {
        case: train(run_uri, small(folder, "case", *SHARED, *CASES[case]))
        for case in list(CASES)[int(part) :: int(parts)]
    }
    Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    program(*sys.argv[1:])
