"""Compute gradients of the routers' auxiliary loss with two ranks.

The arguments are the run store, the model folder and the folder for results. Every rank writes
`<results>/RANK.npz`. For each layout, the file contains the part of the last router's gradient that
comes from the auxiliary loss. It also contains `expected`, the gradient that autograd computes for
one micro-batch, without scaling.
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
"""The last MoE layer, because the losses of later layers would add to a router's gradient."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2, padded": {"megatron": {"use_remove_padding": False}},
    "dp2, one sample per micro-batch": {"ppo_micro_batch_size_per_gpu": 1},
    "dp2, half of the samples not trained": {},
    "dp2, averaged by sample": {"loss_agg_mode": "seq-mean-token-mean"},
    "dp2, some tokens rejected": {
        "algorithm": {
            "rollout_correction": {
                "bypass_mode": True,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": "0.5_2.0",
            }
        }
    },
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
    """Return samples with equal tokens, so that each micro-batch has the same auxiliary loss.

    The engine's log-prob for every second response token is lower by 1.
    """
    one = samples[-1]
    names = ("prompt_tokens_P", "response_tokens_G", "loss_mask_G", "logprobs_G", "version_spans")
    same = {name: getattr(one, name) for name in names}
    same["logprobs_G"] = one.logprobs_G - np.arange(len(one.logprobs_G), dtype=np.float32) % 2
    return [Sample(**{**vars(sample), **same, "routes": None}) for sample in samples]


def program(run_uri: str, model: str, results: str) -> None:
    """Compute the gradients of a mini-batch with and without the loss, and write the results.

    Args:
        run_uri: The run's store.
        model: The model's folder.
        results: The folder for results.
    """
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
    """Compute the last router's gradient in a layout.

    Args:
        run_uri: The run's store.
        model: The model's folder.
        name: The layout's name.
        coefficient: The coefficient of the auxiliary loss.

    Returns:
        The last router's gradient, or None if another rank holds it; and the gradients of its
        auxiliary loss alone, one per micro-batch.
    """
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
    old = None
    if not config.algorithm.rollout_correction.bypass_mode:
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
    """Collect the gradients of a router's auxiliary loss when it is attached, before scaling."""
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
