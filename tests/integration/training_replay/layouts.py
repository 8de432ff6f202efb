"""The layouts as a table, and the program that goes through them in one start of the ranks.

For each layout: build the model, record a native pass (R2), replay it, and write what was found to
`<folder>/<layout>.<recompute>.<rank>.json`, with the gradients of the first mini-batch beside it,
and in the first recompute mode those of each loss by token (`losses_in_layouts.py`) and what a
critic makes of the step (`values.py`, to `<folder>/<layout>.values.<rank>.npz`); some layouts have
only this. The tests read it there. Arguments: run store, model folder, folder for results,
recompute modes with commas between, names of layouts.
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
    """One row of the table; samples are packed unless it says otherwise."""

    name: str
    ranks: int
    megatron: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    sample: Sequence[str] = tuple(RECOMPUTE)
    """The recompute modes in which `make test` goes through it; `make test-all` takes all."""

    def config(self, recompute: str) -> Any:
        """The run's settings in this layout."""
        overrides = {**RECOMPUTE[recompute], **self.overrides}
        return config_of(
            megatron={**self.megatron, "override_transformer_config": overrides},
            router_replay={"mode": "R2"},
            algorithm={"adv_estimator": "gae", "lam": 0.9},
            **self.actor,
        )


TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, EP = "context_parallel_size", "expert_model_parallel_size"
PADDED = {"use_remove_padding": False}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
WHOLE = {"use_distributed_optimizer": False}
"""Every rank has whole gradients, which can be compared."""
LAYOUTS = [
    Layout("one", 1),
    Layout("one-padded", 1, PADDED),
    Layout("one-tokens", 1, actor={"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 70}),
    Layout("tp2-sp", 2, {TP: 2}),
    Layout("tp2-sp-padded", 2, {TP: 2, **PADDED}),
    Layout("pp2-uneven", 2, {PP: 2}, UNEVEN),
    Layout("pp2-vpp2", 2, {PP: 2, "virtual_pipeline_model_parallel_size": 2}),
    Layout("pp2-vpp2-padded", 2, {PP: 2, "virtual_pipeline_model_parallel_size": 2, **PADDED}),
    Layout("ep2", 2, {EP: 2}),
    Layout("ep2-padded", 2, {EP: 2, **PADDED}),
    Layout("dp2", 2),
    Layout("cp2", 2, {CP: 2, **WHOLE}, sample=("full",)),
    Layout("cp2-padded", 2, {CP: 2, **WHOLE, **PADDED}, sample=()),
    Layout("cp2-ep2", 2, {CP: 2, EP: 2, **WHOLE}, sample=()),
    Layout("cp2-ep2-padded", 2, {CP: 2, EP: 2, **WHOLE, **PADDED}, sample=()),
    Layout("cp2-tp2-sp", 4, {CP: 2, TP: 2, **WHOLE}, sample=()),
    Layout("cp2-tp2-sp-padded", 4, {CP: 2, TP: 2, **WHOLE, **PADDED}, sample=("full",)),
    Layout("cp2-pp2", 4, {CP: 2, PP: 2, **WHOLE}, UNEVEN, sample=()),
    Layout("cp2-pp2-padded", 4, {CP: 2, PP: 2, **WHOLE, **PADDED}, UNEVEN, sample=()),
    Layout("pp2-ep2", 4, {PP: 2, EP: 2, **WHOLE}, UNEVEN, sample=()),
    Layout("cp2-dp2", 4, {CP: 2, **WHOLE}, sample=()),
    Layout("cp2-dp2-padded", 4, {CP: 2, **WHOLE, **PADDED}, sample=()),
]
WITH_CRITIC = ("one", "one-tokens", "tp2-sp", "pp2-vpp2", "ep2", "dp2", "cp2", "cp2-tp2-sp-padded")
"""Layouts in which `make test` looks at a critic, beside those of which it looks at nothing else;
`make test-all` does in all."""
ONLY_CRITIC = ("pp2-ep2",)
TRIED = [layout for layout in LAYOUTS if layout.sample or TEST_ALL]
"""The layouts that this run of the tests goes through."""


def modes_of(layout: Layout, topk: int) -> Sequence[str]:
    """The recompute modes in which this run of the tests goes through a layout. With K = 8, the one
    that runs the most code is enough."""
    of_topk = tuple(RECOMPUTE) if topk == 4 else ("full",)
    if TEST_ALL or layout.sample == tuple(RECOMPUTE):
        return of_topk
    return layout.sample if topk == 4 else ()


def program(run_uri: str, model: str, results: str, recompute: str, names: Sequence[str]) -> None:
    """Go through layouts x recompute modes; see the module."""
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
    """Whether this run of the tests looks at a critic in a layout."""
    return TEST_ALL or layout.name in (*WITH_CRITIC, *ONLY_CRITIC)


def without_critic(config: Any) -> Any:
    """The settings of which no critic is built with the policy."""
    return with_value(config, "algorithm.adv_estimator", "grpo")


def examine(rank: Rank, data: StepData) -> dict[str, Any]:
    """Record a native pass, replay it in every mini-batch, and compare with native passes."""
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
    """Advantages of this rank's samples, with a KL in the reward to a made-up reference, which is
    further from the policy the later a token comes."""
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
    """Positions of a mini-batch, over all ranks, without a sample's token."""
    lengths = data.columns["rows_total"].to_pylist()
    micro_batches = [micro for share in mini_batch.shares for micro in share]
    taken = sum(lengths[row] for micro in micro_batches for row in micro.rows)
    return sum(math.prod(micro.shape) for micro in micro_batches) - taken


def passed(
    rank: Rank, data: StepData, mini_batch: Any, compared: Compared, routes: Any
) -> dict[str, torch.Tensor]:
    """Every loss and every gradient of a pass, by name."""
    reports, _ = gradients(rank, data, mini_batch, compared, routes)
    result = {}
    for index, report in enumerate(reports):
        result |= {f"loss.{index}.{name}": value for name, value in report.items()}
    for index, chunk in enumerate(rank.chunks):
        for name, parameter in chunk.named_parameters():
            result[f"grad.{index}.{name}"] = parameter.main_grad.clone()
    return result


def shifted_experts(rank: Rank, routes: dict[str, Routes]) -> dict[str, Routes]:
    """Every expert id plus one: a control that replay is live."""
    experts = rank.geometry.experts
    return {
        id: Routes(np.sort((r.sets_TLK.astype(int) + 1) % experts).astype(np.uint8), r.valid_T)
        for id, r in routes.items()
    }


def count_router_calls(rank: Rank) -> dict[int, int]:
    """Calls of each router since the dictionary was cleared."""
    calls: dict[int, int] = {}
    for layer, router in rank.routers.items():

        def count(*_: Any, layer: int = layer) -> None:
            calls[layer] = calls.get(layer, 0) + 1

        router.register_forward_hook(count)
    return calls


def as_arrays(made: LogProbPass) -> dict[str, np.ndarray]:
    """Routes and log-probs for a file, by sample id."""
    arrays = {f"routes/{id}": routes.sets_TLK for id, routes in made.routes.items()}
    return arrays | {f"logprobs/{id}": values for id, values in made.logprobs.items()}


def replay_foreign(rank: Rank, data: StepData, reference: dict[str, np.ndarray]) -> dict[str, Any]:
    """Replay what one rank recorded: the largest difference of a log-prob, and the agreement."""
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
