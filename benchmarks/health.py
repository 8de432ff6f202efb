"""Measure whether `router_replay.min_agreement` detects incorrect routes.

    python -m benchmarks.health RUN [--step N] [--dtype float32]

RUN is a run with R3 whose policies still exist (`retrace run examples/quickstart.yaml`). The
trainer's log-prob pass replays a step's samples with the recorded routes, and with faulty routes
whose digests are valid. The pass uses the policy version with which the step's training starts. It
is repeated with newer versions, because training on stale samples uses newer versions too. The
program does not train.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch.distributed as dist

from benchmarks.page import Table
from operators.training.batches.step_data import StepData, layout_rules, load_step
from operators.training.megatron import parallel
from operators.training.passes.logprob_pass import native_pass, replaying_pass
from operators.training.rank import Rank, make_rank
from operators.training.replay.health import Evidence, Health, judge
from operators.training.step_metrics import mismatch_of
from pipeline.config.tree import RunConfig
from pipeline.policies.fetch import fetch_policy
from pipeline.rl.mismatch import Mismatch
from pipeline.run import keys
from pipeline.run.amendments import description_now
from pipeline.run.run_config import config_of
from pipeline.store import open_store
from pipeline.traces import Routes, open_manifest

Recorded = Mapping[str, Routes]


@dataclass(frozen=True)
class Found:
    """Result of replaying a step once."""

    name: str
    health: Health
    evidence: Evidence


def by_token(routes: Recorded) -> Recorded:
    """Give each row the routes of the previous token."""
    return {id: Routes(np.roll(r.sets_TLK, 1, 0), r.valid_T) for id, r in routes.items()}


def by_layer(routes: Recorded) -> Recorded:
    """Give each layer the routes of the previous layer."""
    return {id: Routes(np.roll(r.sets_TLK, 1, 1), r.valid_T) for id, r in routes.items()}


def exchanged(routes: Recorded) -> Recorded:
    """Swap the routes of the first two samples of equal length that are in different groups."""
    ids = list(routes)
    first, second = next(
        (a, b)
        for i, a in enumerate(ids)
        for b in ids[i + 1 :]
        if a.rpartition("/")[0] != b.rpartition("/")[0]
        and len(routes[a].valid_T) == len(routes[b].valid_T)
    )
    return {**routes, first: routes[second], second: routes[first]}


FAULTS: Mapping[str, Callable[[Recorded], Recorded]] = {
    "as recorded": lambda routes: routes,
    "shifted by a token": by_token,
    "shifted by a layer": by_layer,
    "two samples exchanged": exchanged,
}


def replays(rank: Rank, data: StepData, floor: float) -> Sequence[Found]:
    """Replay a step with each fault.

    Args:
        rank: The only training rank.
        data: The step's samples and routes.
        floor: Value of `router_replay.min_agreement`.

    Returns:
        A result for each fault.
    """
    routes = {id: data.routes[id] for id in data.samples} if data.routes is not None else {}
    native = mismatch_of(data, native_pass(rank, data, rank.chunks).logprobs)
    found = []
    for name, fault in FAULTS.items():
        made = replaying_pass(rank, data, fault(routes))
        replayed: Mismatch = mismatch_of(data, made.logprobs)
        evidence = Evidence(made.counts, made.samples, replayed, native)
        found.append(Found(name, judge([evidence], floor), evidence))
    return found


def row(policy: str, found: Found) -> tuple[str, ...]:
    """Return a row of the table."""
    health, evidence = found.health, found.evidence
    kls = [f"{part.kl:.1e}" for part in (evidence.replayed, evidence.native) if part and part.kl]
    shares = [
        f"{share:.1%}" if share is not None else "-" for share in (health.layer, health.sample)
    ]
    return (policy, found.name, *shares, *kls, "refused" if health.findings else "trained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--policies", type=int, nargs="+", default=range(1000))
    parser.add_argument("--dtype", default=None, help="dtype of the trainer; default: the run's")
    arguments = parser.parse_args()
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(ranks | {"MASTER_PORT": "29531", "GROUP_RANK": "0"})
    store = open_store(arguments.run)
    settings = config_of(description_now(store)).model_dump(mode="json")
    if arguments.dtype:
        settings["actor_rollout_ref"]["actor"]["megatron"]["dtype"] = arguments.dtype
    config = RunConfig.model_validate(settings)
    floor = config.actor_rollout_ref.actor.router_replay.min_agreement
    sealed = open_manifest(store, arguments.step)
    rows = []
    for version in range(arguments.step, config.trainer.total_training_steps + 1):
        if version not in arguments.policies or store.size(keys.policy(version)) is None:
            continue
        position = parallel.start(config.actor_rollout_ref.actor.megatron)
        with TemporaryDirectory() as folder:
            fetch_policy(store, version, Path(folder, "policy"))
            rank, _ = make_rank(config, position, Path(folder, "policy"))
        rules = layout_rules(config, 1)
        data = load_step(store, sealed, config, rules, 0, rank.geometry)
        rows += [row(str(version), found) for found in replays(rank, data, floor)]
        data.close()
        parallel.stop()
    dist.destroy_process_group()
    headers = ("policy", "routes", "worst layer", "worst sample", "KL", "KL native", "")
    print(Table(headers, tuple(rows)).markdown())


if __name__ == "__main__":
    main()
