"""Write runs as the flow prepares them for the trainer: a staged model and sealed steps.

The "engine" is an independent forward pass by transformers in float32 on random tokens. The trainer
must reproduce the engine's log-probs and routes.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pipeline.config.tree import RunConfig
from pipeline.policies.versions import refer_policy
from pipeline.run import keys
from pipeline.run.commit import new_write_id, put_file
from pipeline.run.description import RunDescription, StagedInputs, create_description
from pipeline.run.planning import policy_version
from pipeline.store import Store, open_store
from pipeline.traces import (
    Geometry,
    Provenance,
    Routes,
    Sample,
    VersionSpan,
    group_id,
    sample_id,
    seal,
    write_shard,
)
from tests.data_files import put_data
from tests.weights import digest_of

TEMPERATURE = 0.8
STALE: dict[str, Any] = {
    "trainer": {"max_staleness": 1},
    "algorithm": {"rollout_correction": {"uncorrected_staleness": True}},
}
"""Settings for samples from the previous policy version, without any correction."""
VOCABULARY = 512


def config_of(**actor: Any) -> RunConfig:
    """Return settings for tiny steps: 4 prompts x 3 samples in mini-batches of 6 samples.

    Args:
        actor: Settings of the actor. The keys `trainer` and `algorithm` contain settings for those
            sections instead.
    """
    megatron = {"dtype": "float32", **actor.pop("megatron", {})}
    trainer = actor.pop("trainer", {})
    algorithm = actor.pop("algorithm", {})
    settings = {
        "ppo_mini_batch_size": 2,
        "ppo_micro_batch_size_per_gpu": 2,
        "entropy_coeff": 0.01,
        "optim": {"lr": 1e-3},
        **actor,
        "megatron": megatron,
    }
    return RunConfig.model_validate(
        {
            "data": {"train_files": "prompts.parquet", "train_batch_size": 4},
            "actor_rollout_ref": {
                "model": {"path": "model"},
                "actor": settings,
                "rollout": {
                    "n": 3,
                    "temperature": TEMPERATURE,
                    "enable_rollout_routing_replay": True,
                },
            },
            "algorithm": algorithm,
            "trainer": {"experiment_name": "tiny", **trainer},
        }
    )


def make_samples(
    step: int,
    model: Any,
    geometry: Geometry | None,
    other_experts: bool,
    prompts: int = 4,
    version: int = 0,
) -> list[Sample]:
    """Return samples with random tokens and lengths, 3 per prompt.

    One reward is missing, one token is excluded from the loss, and the first rows of one sample are
    not valid.

    Args:
        step: The step, which is also the seed.
        model: The engine's model.
        geometry: The geometry of the routes; None for samples without routes.
        other_experts: Whether to add one to every recorded expert id.
        prompts: The number of prompts.
        version: The policy version of all tokens; it does not change the model.
    """
    n = 3
    rng = np.random.default_rng(step)
    samples = []
    for prompt in range(prompts):
        prompt_tokens = rng.integers(3, VOCABULARY, rng.integers(3, 9)).astype(np.uint32)
        for k in range(n):
            G = int(rng.integers(8, 40))
            response = rng.integers(3, VOCABULARY, G).astype(np.uint32)
            first = prompt == 0 and k == 0
            mask = np.ones(G, np.bool_)
            mask[0] = not first
            logprobs, routes = engine(model, prompt_tokens, response, geometry)
            if routes is not None and other_experts:
                routes.sets_TLK[:] = np.sort((routes.sets_TLK + 1) % geometry.experts, axis=2)
            if routes is not None and first:
                routes.valid_T[:2] = False
                routes.sets_TLK[:2] = np.arange(routes.sets_TLK.shape[2])
            masked = prompt == 1 and k == 1
            samples.append(
                Sample(
                    id=sample_id(step, str(prompt), k),
                    group=group_id(step, str(prompt)),
                    prompt_id=str(prompt),
                    prompt_tokens_P=prompt_tokens,
                    response_tokens_G=response,
                    loss_mask_G=mask,
                    logprobs_G=logprobs,
                    finish_reason="stop",
                    version_spans=(VersionSpan(version, 0, G),),
                    seed=k,
                    reward=None if masked else float(rng.integers(0, 3)),
                    reward_error="raised" if masked else None,
                    extras={},
                    routes=routes,
                )
            )
    return samples


def engine(
    model: Any, prompt: np.ndarray, response: np.ndarray, geometry: Geometry | None
) -> tuple[np.ndarray, Routes | None]:
    """Compute log-probs and routes with transformers.

    Args:
        model: The model.
        prompt: The prompt's tokens.
        response: The response's G tokens.
        geometry: The geometry of the routes; None for a pass without routes.

    Returns:
        The log-probs of the response, float32 [G], and the routers' top-k at positions 0..S-2.
    """
    tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    with torch.no_grad():
        output = model(tokens[None, :-1], output_router_logits=geometry is not None)
    logprobs = (output.logits[0] / TEMPERATURE).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    routes = None
    if geometry is not None:
        sets = [
            logits.topk(geometry.topk, dim=-1).indices.sort(dim=-1).values
            for logits in output.router_logits
        ]
        sets_TLK = torch.stack(sets, dim=1).numpy().astype(geometry.dtype)
        routes = Routes(sets_TLK, np.ones(len(sets_TLK), np.bool_))
    return logprobs[len(prompt) - 1 :].numpy().astype(np.float32), routes


def geometry_of(model: Any) -> Geometry:
    """Return the geometry of a Qwen3-MoE model, in which some layers may be dense."""
    config = model.config
    dense = set(config.mlp_only_layers or ())
    layers = tuple(layer for layer in range(config.num_hidden_layers) if layer not in dense)
    return Geometry(config.num_experts, config.num_experts_per_tok, layers)


def make_run(
    folder: Path,
    model_folder: Path,
    config: RunConfig,
    steps: int,
    routes: bool = True,
    other_experts: bool = False,
    prompts: int = 4,
    change: Callable[[int, list[Sample]], list[Sample]] = lambda _, samples: samples,
    functions: Mapping[str, str] | None = None,
) -> Store:
    """Stage a model as policy 0, and seal steps with samples from it.

    With max_staleness=1, the samples have the version that a run would use. Their log-probs always
    come from policy 0.

    Args:
        folder: The run's store, as a folder or a URI.
        model_folder: The folder of the model.
        config: The settings.
        steps: The number of steps.
        routes: Whether the samples have routes.
        other_experts: Whether to add one to every recorded expert id.
        prompts: The number of prompts per step.
        change: Function that changes the samples of a step before they are written.
        functions: Users' files, keyed by the setting that names the function.

    Returns:
        The run's store.
    """
    store = open_store(str(folder))
    files = {
        path.name: put_file(store, keys.input_file(f"{index:064d}", path.name), path)
        for index, path in enumerate(sorted(model_folder.iterdir()))
    }
    refer_policy(store, 0, list(files.values()), digest_of(model_folder))
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    geometry = geometry_of(model) if routes else None
    data = put_data(store, keys.input_file(f"{len(files):064d}", "prompts.parquet"), b"")
    custom = {
        key: put_data(
            store, keys.input_file(f"{len(files) + 1 + index:064d}", "custom.py"), text.encode()
        )
        for index, (key, text) in enumerate((functions or {}).items())
    }
    inputs = StagedInputs(data, None, None, files, custom)
    settings = config.model_dump(mode="json")
    create_description(store, RunDescription("tiny", settings, inputs, geometry, {}))
    for step in range(steps):
        staleness = config.trainer.max_staleness
        version = policy_version(step, staleness) if staleness else 0
        made = make_samples(step, model, geometry, other_experts, prompts, version)
        samples = change(step, made)
        provenance = Provenance("R3", 0, "transformers") if geometry else None
        write_shard(store, step, 0, new_write_id(), samples, geometry, provenance)
        ids = [sample.id for sample in samples]
        records = config.actor_rollout_ref.actor.router_replay.records_routes
        seal(store, step, 1, lambda _, ids=ids: ids, version, training=records)
    return store
