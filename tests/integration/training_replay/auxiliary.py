"""Gradients of the routers' auxiliary loss in two ranks. Arguments: run store, model, results.

Every rank leaves `<results>/RANK.npz`: by layout, what the loss adds to the gradient of the last
router; and `expected`, that gradient by autograd, of one micro-batch and without any scale.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from operators.training.batches.step_data import layout_rules, load_step
from operators.training.megatron import parallel
from operators.training.passes.compared import compare
from operators.training.passes.logprob_pass import native_pass
from operators.training.passes.update import gradients
from operators.training.rank import make_rank
from pipeline.store import open_store
from pipeline.traces import Sample, open_manifest
from tests.integration.training_replay.sealed import config_of

_ATTACH = TopKRouter.attach_and_log_load_balancing_loss
LAST = 3
"""The last MoE layer: later ones would add to its gradient."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2, padded": {"megatron": {"use_remove_padding": False}},
    "dp2, one sample a micro-batch": {"ppo_micro_batch_size_per_gpu": 1},
    "dp2, half of the samples not trained": {},
    "dp2, averaged by sample": {"loss_agg_mode": "seq-mean-token-mean"},
    "tp2": {"megatron": {"tensor_model_parallel_size": 2}},
    "cp2": {"megatron": {"context_parallel_size": 2}},
    "cp2, averaged by sample": {
        "megatron": {"context_parallel_size": 2},
        "loss_agg_mode": "seq-mean-token-sum",
    },
    "pp2": {"megatron": {"pipeline_model_parallel_size": 2}},
    "pp2, averaged by sample": {
        "megatron": {"pipeline_model_parallel_size": 2},
        "loss_agg_mode": "seq-mean-token-sum-norm",
    },
}


def alike(_: int, samples: list[Sample]) -> list[Sample]:
    """Samples of the same tokens, so that each micro-batch has the same auxiliary loss."""
    one = samples[-1]
    names = ("prompt_tokens_P", "response_tokens_G", "loss_mask_G", "logprobs_G", "version_spans")
    same = {name: getattr(one, name) for name in names}
    return [Sample(**{**vars(sample), **same, "routes": None}) for sample in samples]


def program(run_uri: str, model: str, results: str) -> None:
    """Take the gradients of a mini-batch with and without the loss."""
    found = {}
    for name in LAYOUTS:
        with_loss, expected = last_router_gradient(run_uri, model, name, 1.0)
        without, _ = last_router_gradient(run_uri, model, name, 0.0)
        if with_loss is not None and without is not None:
            found[name] = with_loss - without
        if name == "dp2" and expected:
            found["expected"] = expected[0]
    np.savez(Path(results, f"{dist.get_rank()}.npz"), **found)
    dist.destroy_process_group()


def last_router_gradient(
    run_uri: str, model: str, name: str, coefficient: float
) -> tuple[np.ndarray | None, list[np.ndarray]]:
    """The last router's gradient (None: not on this rank), and its auxiliary loss's alone."""
    settings = LAYOUTS[name]
    overrides = {
        "moe_aux_loss_coeff": coefficient,
        "moe_router_load_balancing_type": "aux_loss",
    }
    megatron = {
        **settings.get("megatron", {}),
        "use_distributed_optimizer": False,
        "override_transformer_config": overrides,
    }
    config = config_of(**{**settings, "megatron": megatron})
    position = parallel.start(config.actor_rollout_ref.actor.megatron)
    rank, _ = make_rank(config, position, Path(model))
    rules = layout_rules(config, position.data_parallel)
    manifest = open_manifest(open_store(run_uri), 0)
    data = load_step(open_store(run_uri), manifest, config, rules, position.dp_rank, rank.geometry)
    if "not trained" in name:
        data = replace(data, untrained=frozenset(list(data.ids.values())[::2]))
    old = native_pass(rank, data, rank.chunks).logprobs
    alone = watched(rank.routers.get(LAST))
    gradients(rank, data, data.layout.mini_batches[0], compare(rank, data, old, None), None)
    TopKRouter.attach_and_log_load_balancing_loss = _ATTACH
    found = None
    if LAST in rank.routers:
        found = rank.routers[LAST].weight.main_grad.clone().numpy()
    parallel.stop()
    return found, alone


def watched(router: Any) -> list[np.ndarray]:
    """Gradients of a router's auxiliary loss as it is attached, before any scale."""
    found: list[np.ndarray] = []

    def attach(self: Any, activation: Any, coefficient: float, loss: Any, *rest: Any, **named: Any):
        if self is router:
            (gradient,) = torch.autograd.grad(loss, self.weight, retain_graph=True)
            found.append(gradient.float().numpy())
        return _ATTACH(self, activation, coefficient, loss, *rest, **named)

    TopKRouter.attach_and_log_load_balancing_loss = attach
    return found


if __name__ == "__main__":
    program(*sys.argv[1:])
