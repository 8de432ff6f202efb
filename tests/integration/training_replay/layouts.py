"""The table of layouts, and the program that runs several of them in one launch of the ranks.

For each layout, the program builds the model, records a native pass (R2) and replays it. It writes
these files for the tests, the last two only in the first recompute mode:

    <folder>/<layout>.<recompute>.<rank>.json            results
    <folder>/<layout>.<recompute>.<rank>.gradients.npz   gradients for the first mini-batch
    <folder>/<layout>.<rank>.losses.npz                  gradients of losses (losses_in_layouts.py)
    <folder>/<layout>.values.<rank>.npz                  a critic's values (values.py)

Some layouts have only the last file. The arguments are the run store, the model folder, the folder
for results, the recompute modes separated by commas, and the names of layouts.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from operators.training.batches.step_data import StepData, layout_rules, load_step
from operators.training.megatron import parallel
from operators.training.passes.compared import Compared, compare
from operators.training.passes.logprob_pass import LogProbPass, recording_pass, replaying_pass
from operators.training.passes.update import gradients
from operators.training.rank import Rank, make_rank
from pipeline.config.keys import with_value
from pipeline.rl.estimator_table import ESTIMATORS
from pipeline.store import open_store
from pipeline.traces import Routes, open_manifest
from tests.exhaustive import TEST_ALL
from tests.integration.training_replay.baselines import with_baselines
from tests.integration.training_replay.corrected import corrections_of
from tests.integration.training_replay.losses_in_layouts import token_gradients
from tests.integration.training_replay.sealed import config_of
from tests.integration.training_replay.values import save_values

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@dataclass(frozen=True)
class Layout:
    """One row of the table. Samples are packed unless the row disables it."""

    name: str
    ranks: int
    megatron: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    sample: Sequence[str] = tuple(RECOMPUTE)
    """The recompute modes that `make test` covers; `make test-all` covers all."""

    def config(self, recompute: str) -> Any:
        """Return the run's settings for this layout."""
        overrides = {**RECOMPUTE[recompute], **self.overrides}
        return config_of(
            megatron={**self.megatron, "override_transformer_config": overrides},
            router_replay={"mode": "R2"},
            algorithm={"adv_estimator": "gae", "lam": 0.9},
            **self.actor,
        )


TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, EP = "context_parallel_size", "expert_model_parallel_size"
VPP = {"virtual_pipeline_model_parallel_size": 2}
BY_TOKENS = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 70}
PADDED = {"use_remove_padding": False}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
WHOLE = {"use_distributed_optimizer": False}
"""Gives every rank full gradients, which can be compared."""
LAYOUTS = [
    Layout("one", 1),
    Layout("one-padded", 1, PADDED, sample=("full",)),
    Layout("one-tokens", 1, actor=BY_TOKENS, sample=("full",)),
    Layout("tp2-sp", 2, {TP: 2}, sample=("full",)),
    Layout("tp2-sp-padded", 2, {TP: 2, **PADDED}, sample=()),
    Layout("pp2-uneven", 2, {PP: 2}, UNEVEN, sample=("full",)),
    Layout("pp2-vpp2", 2, {PP: 2, **VPP}),
    Layout("pp2-vpp2-padded", 2, {PP: 2, **VPP, **PADDED}, sample=("full",)),
    Layout("ep2", 2, {EP: 2}, sample=("full",)),
    Layout("ep2-padded", 2, {EP: 2, **PADDED}, sample=()),
    Layout("dp2", 2, sample=("full",)),
    Layout("cp2", 2, {CP: 2, **WHOLE}, sample=("full",)),
    Layout("cp2-padded", 2, {CP: 2, **WHOLE, **PADDED}, sample=()),
    Layout("cp2-ep2", 2, {CP: 2, EP: 2, **WHOLE}, sample=("full",)),
    Layout("cp2-ep2-padded", 2, {CP: 2, EP: 2, **WHOLE, **PADDED}, sample=()),
    Layout("cp2-tp2-sp", 4, {CP: 2, TP: 2, **WHOLE}, sample=()),
    Layout("cp2-tp2-sp-padded", 4, {CP: 2, TP: 2, **WHOLE, **PADDED}, sample=("full",)),
    Layout("cp2-pp2", 4, {CP: 2, PP: 2, **WHOLE}, UNEVEN, sample=("full",)),
    Layout("cp2-pp2-padded", 4, {CP: 2, PP: 2, **WHOLE, **PADDED}, UNEVEN, sample=()),
    Layout("pp2-ep2", 4, {PP: 2, EP: 2, **WHOLE}, UNEVEN, sample=()),
    Layout("cp2-dp2", 4, {CP: 2, **WHOLE}, sample=()),
    Layout("cp2-dp2-padded", 4, {CP: 2, **WHOLE, **PADDED}, sample=()),
]
WITH_CRITIC = ("one", "one-tokens", "tp2-sp", "pp2-vpp2", "ep2", "dp2", "cp2", "cp2-tp2-sp-padded")
"""Layouts in which `make test` tests the policy and a critic; `make test-all` tests both in all."""
ONLY_CRITIC = ("pp2-ep2",)
"""Layouts in which `make test` tests only a critic."""
TRIED = [layout for layout in LAYOUTS if layout.sample or TEST_ALL]
"""Layouts in which this test session tests the policy."""


def modes_of(layout: Layout, topk: int) -> Sequence[str]:
    """Return the recompute modes of a layout in this test session.

    With K = 8, the mode that runs the most code is enough.
    """
    of_topk = tuple(RECOMPUTE) if topk == 4 else ("full",)
    if TEST_ALL or layout.sample == tuple(RECOMPUTE):
        return of_topk
    return layout.sample if topk == 4 else ()


def program(run_uri: str, model: str, results: str, recompute: str, names: Sequence[str]) -> None:
    """Run layouts in recompute modes, and write the results.

    Args:
        run_uri: The run's store.
        model: The model's folder.
        results: The folder for results.
        recompute: The recompute modes, separated by commas.
        names: The names of the layouts.
    """
    store = open_store(run_uri)
    manifest = open_manifest(store, 0)
    saved = Path(results, "reference.npz")
    for layout in (layout for layout in LAYOUTS if layout.name in names):
        for mode in recompute.split(","):
            config = layout.config(mode)
            position = parallel.start(config.actor_rollout_ref.actor.megatron)
            rank, _ = make_rank(without_critic(config), position, Path(model))
            rules = layout_rules(config, position.data_parallel)
            data = load_step(store, manifest, config, rules, position.dp_rank, rank.geometry)
            if mode == recompute.split(",")[0] and has_critic(layout):
                target = Path(results, f"{layout.name}.values")
                save_values(replace(rank, config=config), data, Path(model), target)
            if layout not in TRIED:
                parallel.stop()
                continue
            found = examine(rank, data)
            made = found.pop("made")
            np.savez(
                Path(results, f"{layout.name}.{mode}.{dist.get_rank()}.gradients.npz"),
                **found.pop("gradients"),
            )
            if mode == recompute.split(",")[0] and rank.geometry.topk == 4:
                losses = token_gradients(rank, data, made)
                np.savez(Path(results, f"{layout.name}.{dist.get_rank()}.losses.npz"), **losses)
            if layout.name == "one":
                np.savez(saved, **as_arrays(made))
            elif saved.exists():
                found["foreign"] = replay_foreign(rank, data, dict(np.load(saved)))
            path = Path(results, f"{layout.name}.{mode}.{dist.get_rank()}.json")
            path.write_text(json.dumps(found))
            parallel.stop()
    dist.destroy_process_group()


def has_critic(layout: Layout) -> bool:
    """Return whether this test session tests a critic in a layout."""
    return TEST_ALL or layout.name in (*WITH_CRITIC, *ONLY_CRITIC)


def without_critic(config: Any) -> Any:
    """Return the settings with an estimator that does not need a critic."""
    return with_value(config, "algorithm.adv_estimator", "grpo")


def examine(rank: Rank, data: StepData) -> dict[str, Any]:
    """Record a native pass, replay it in each mini-batch, and compare with native passes."""
    calls = count_router_calls(rank)
    made = recording_pass(rank, data)
    again = replaying_pass(rank, data, made.routes)
    logprobs_differ = sum(
        not np.array_equal(made.logprobs[id], again.logprobs[id]) for id in made.logprobs
    )
    compared = compare(rank, data, made.logprobs, None)
    advantages = {name: advantages_by(rank, data, made.logprobs, name) for name in ESTIMATORS}
    differ, tensors, mini_batches = 0, 0, []
    first: dict[str, np.ndarray] = {}
    for mini_batch in data.layout.mini_batches:
        calls.clear()
        native = passed(rank, data, mini_batch, compared, None)
        runs = sorted({*calls.values()})
        replayed = passed(rank, data, mini_batch, compared, made.routes)
        other = passed(rank, data, mini_batch, compared, shifted_experts(rank, made.routes))
        names = native.keys()
        first = first or {n: x.numpy() for n, x in native.items() if n.startswith("grad")}
        assert names == replayed.keys()
        differ += sum(not torch.equal(native[name], replayed[name]) for name in names)
        mini_batches.append(
            {
                "micro_batches": len(mini_batch.shares[0]),
                "padding": padding_of(data, mini_batch),
                "router_runs": runs,
                "changed_by_other_sets": sum(
                    not torch.equal(native[name], other[name]) for name in names
                ),
                "losses": sum(name.startswith("loss") for name in names),
            }
        )
        tensors += len(names)
    return {
        "made": made,
        "corrections": corrections_of(rank, data, made.logprobs),
        "advantages": advantages,
        "gradients": first,
        "dp_rank": rank.position.dp_rank,
        "layers": sorted(rank.routers),
        "logprobs_differ": logprobs_differ,
        "samples_with_logprobs": len(made.logprobs),
        "samples": len(data.samples),
        "tensors": tensors,
        "differ": differ,
        "mini_batches": mini_batches,
        "counts": {layer: vars(count) for layer, count in again.counts.items()},
        "expected_rows": sum(len(s.tokens_S) - 1 for s in data.samples.values()),
        "left_at_routers": sum(r.router_replay is not None for r in rank.routers.values()),
    }


def advantages_by(rank: Rank, data: StepData, old: Any, name: str) -> dict[str, list[float]]:
    """Return the advantages of this rank's samples, with a KL penalty in the reward.

    The reference is artificial: its distance from the policy grows with the token's position.

    Args:
        rank: This training rank.
        data: The step's data.
        old: Old log-probs, keyed by sample id.
        name: The estimator.
    """
    config = rank.config
    for key, value in (("adv_estimator", name), ("gamma", 0.9), ("use_kl_in_reward", True)):
        config = with_value(config, f"algorithm.{key}", value)
    reference = {
        id: (log_probs - 0.01 * np.arange(len(log_probs))).astype(np.float32)
        for id, log_probs in old.items()
    }
    data = with_baselines(data, name)
    values = {id: np.linspace(-1, 1, len(log_probs)) for id, log_probs in old.items()}
    made = compare(replace(rank, config=config), data, old, reference, 0.5, values)
    return {id: values.tolist() for id, values in made.advantages.items()}


def padding_of(data: StepData, mini_batch: Any) -> int:
    """Return the number of positions in a mini-batch without a sample's token, over all ranks."""
    lengths = data.columns["rows_total"].to_pylist()
    micro_batches = [micro for share in mini_batch.shares for micro in share]
    taken = sum(lengths[row] for micro in micro_batches for row in micro.rows)
    return sum(math.prod(micro.shape) for micro in micro_batches) - taken


def passed(
    rank: Rank, data: StepData, mini_batch: Any, compared: Compared, routes: Any
) -> dict[str, torch.Tensor]:
    """Return every loss and every gradient from a pass, keyed by name.

    Args:
        rank: This training rank.
        data: The step's data.
        mini_batch: The mini-batch.
        compared: The old log-probs, advantages and other values that the loss needs.
        routes: Routes to replay, keyed by sample id; None for native routing.
    """
    reports, _ = gradients(rank, data, mini_batch, compared, routes)
    result = {}
    for index, report in enumerate(reports):
        result |= {f"loss.{index}.{name}": value for name, value in report.items()}
    for index, chunk in enumerate(rank.chunks):
        for name, parameter in chunk.named_parameters():
            result[f"grad.{index}.{name}"] = parameter.main_grad.clone()
    return result


def shifted_experts(rank: Rank, routes: dict[str, Routes]) -> dict[str, Routes]:
    """Return routes with every expert id increased by one, to check that replay takes effect."""
    experts = rank.geometry.experts
    return {
        id: Routes(np.sort((r.sets_TLK.astype(int) + 1) % experts).astype(np.uint8), r.valid_T)
        for id, r in routes.items()
    }


def count_router_calls(rank: Rank) -> dict[int, int]:
    """Count the calls of each router by layer; the caller may clear the returned dictionary."""
    calls: dict[int, int] = {}
    for layer, router in rank.routers.items():

        def count(*_: Any, layer: int = layer) -> None:
            calls[layer] = calls.get(layer, 0) + 1

        router.register_forward_hook(count)
    return calls


def as_arrays(made: LogProbPass) -> dict[str, np.ndarray]:
    """Return routes and log-probs, keyed by sample id, as they are written to a file."""
    arrays = {f"routes/{id}": routes.sets_TLK for id, routes in made.routes.items()}
    return arrays | {f"logprobs/{id}": values for id, values in made.logprobs.items()}


def replay_foreign(rank: Rank, data: StepData, reference: dict[str, np.ndarray]) -> dict[str, Any]:
    """Replay the routes that one rank recorded.

    Args:
        rank: This training rank.
        data: The step's data.
        reference: Routes and log-probs of one rank, as `as_arrays` returns them.

    Returns:
        The largest difference between log-probs, and the counts of replayed and agreeing rows.
    """
    layers = sorted(rank.routers)
    routes = {
        id: Routes(np.ascontiguousarray(reference[f"routes/{id}"][:, layers]), _all_valid(sample))
        for id, sample in data.samples.items()
    }
    made = replaying_pass(rank, data, routes)
    differences = [
        float(np.abs(made.logprobs[id] - reference[f"logprobs/{id}"]).max()) for id in made.logprobs
    ]
    return {
        "largest_difference": max(differences, default=0.0),
        "replayed": sum(count.replayed for count in made.counts.values()),
        "agreeing": sum(count.agreeing for count in made.counts.values()),
    }


def _all_valid(sample: Any) -> np.ndarray:
    return np.ones(len(sample.tokens_S) - 1, np.bool_)


if __name__ == "__main__":
    program(*sys.argv[1:5], sys.argv[5:])
