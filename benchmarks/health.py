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
from pipeline.run.attempts import config_of
from pipeline.run.description import description_now
from pipeline.store import open_store
from pipeline.traces import Routes, open_manifest

Recorded = Mapping[str, Routes]
Fault = Callable[[Recorded, Mapping[str, int]], Recorded]
"""(routes, lengths of the prompts) -> faulty routes, each keyed by sample id."""

ALL = slice(None)


@dataclass(frozen=True)
class Found:
    """Result of replaying a step once."""

    name: str
    health: Health
    evidence: Evidence


def shifted(routes: Routes, first: int, layers: slice = ALL, axis: int = 0) -> Routes:
    """Shift a sample's routes by one token (axis 0) or layer (axis 1), from row `first` on."""
    sets_TLK = routes.sets_TLK.copy()
    sets_TLK[first:, layers] = np.roll(sets_TLK[first:, layers], 1, axis)
    return Routes(sets_TLK, routes.valid_T)


def in_one(change: Callable[[Routes, int], Routes]) -> Fault:
    """Return a fault in the sample with the longest response."""

    def fault(routes: Recorded, prompts: Mapping[str, int]) -> Recorded:
        longest = max(routes, key=lambda id: len(routes[id].valid_T) - prompts[id])
        return {**routes, longest: change(routes[longest], prompts[longest])}

    return fault


def in_all(change: Callable[[Routes, int], Routes]) -> Fault:
    """Return a fault in every sample."""
    return lambda routes, prompts: {id: change(of, prompts[id]) for id, of in routes.items()}


def copied(routes: Routes, _: int) -> Routes:
    """Give the third layer the routes of the second layer."""
    sets_TLK = routes.sets_TLK.copy()
    sets_TLK[:, 2] = sets_TLK[:, 1]
    return Routes(sets_TLK, routes.valid_T)


def exchanged(routes: Recorded, _: Mapping[str, int]) -> Recorded:
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


def permuted(routes: Recorded, prompts: Mapping[str, int]) -> Recorded:
    """Give each response the routes of the next response of its group with the same length."""
    alike: dict[tuple[str, int], list[str]] = {}
    for id, of in routes.items():
        alike.setdefault((id.rpartition("/")[0], len(of.valid_T)), []).append(id)
    found = dict(routes)
    for ids in alike.values():
        for id, other in zip(ids, [*ids[1:], ids[0]], strict=True):
            sets_TLK = routes[id].sets_TLK.copy()
            sets_TLK[prompts[id] :] = routes[other].sets_TLK[prompts[id] :]
            found[id] = Routes(sets_TLK, routes[id].valid_T)
    return found


FAULTS: Mapping[str, Fault] = {
    "as recorded": lambda routes, _: routes,
    "shifted by a token": in_all(lambda of, _: shifted(of, 0)),
    "responses shifted by a token": in_all(lambda of, prompt: shifted(of, prompt)),
    "shifted by a layer": in_all(lambda of, _: shifted(of, 0, axis=1)),
    "third layer copied from second": in_all(copied),
    "responses permuted in groups": permuted,
    "two samples exchanged": exchanged,
    "one layer of one sample shifted": in_one(lambda of, _: shifted(of, 0, slice(1, 2))),
    "half of one response shifted": in_one(
        lambda of, prompt: shifted(of, (prompt + len(of.valid_T)) // 2)
    ),
    "last 16 rows of one sample shifted": in_one(lambda of, _: shifted(of, len(of.valid_T) - 16)),
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
    prompts = {id: len(data.samples[id].prompt_tokens_P) for id in data.samples}
    found = []
    for name, fault in FAULTS.items():
        made = replaying_pass(rank, data, fault(routes, prompts))
        replayed: Mismatch = mismatch_of(data, made.logprobs)
        evidence = Evidence(tuple(made.counts), made.samples, replayed, native)
        found.append(Found(name, judge([evidence], floor), evidence))
    return found


def row(policy: str, found: Found) -> tuple[str, ...]:
    """Return a row of the table."""
    health, evidence = found.health, found.evidence
    sets, different, foreign = sum(of.sets_LPC.sum(axis=(0, 1)) for of in evidence.samples.values())
    kls = [f"{part.kl:.1e}" for part in (evidence.replayed, evidence.native) if part and part.kl]
    refused = {
        f"{len(health.layers)} layers": health.layers,
        f"{len(health.samples)} samples": health.samples,
        "KL": health.kl,
    }
    return (
        *(policy, found.name, f"{1 - different / sets:.1%}", f"{foreign / sets:.2%}"),
        *("-" if share is None else f"{share:.1%}" for share in (health.layer, health.sample)),
        *(f"{health.evidence or 0.0:.2f}", *kls),
        ", ".join(name for name, why in refused.items() if why) or "trained",
    )


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
    headers = (
        *("policy", "routes", "agreement", "foreign", "worst layer", "worst sample"),
        *("evidence", "KL", "KL native", "refused because of"),
    )
    print(Table(headers, tuple(rows)).markdown())


if __name__ == "__main__":
    main()
