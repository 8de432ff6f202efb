"""Rules that involve several settings: pure functions, which are called before a run starts.

Rule functions return problems as sentences instead of raising errors, so that users see all
problems together.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from pipeline.config.rules.algorithms.corrections import correction_notes, correction_problems
from pipeline.config.rules.algorithms.critics import critic_notes, critic_problems, of_critic
from pipeline.config.rules.algorithms.estimators import estimator_problems
from pipeline.config.rules.budget import budget_problems
from pipeline.config.rules.cuda import cpu_engine_problems, cuda_notes, cuda_problems
from pipeline.config.rules.groups import group_problems, sampled_at_once
from pipeline.config.rules.layout import layout_problems
from pipeline.config.rules.losses import loss_notes, loss_problems
from pipeline.config.rules.overrides import ENGINE, TRANSFORMER, refused_fields
from pipeline.config.rules.pods import InstalledGpus, gpu_problems
from pipeline.config.rules.precision import option_problems
from pipeline.config.rules.rates import rate_notes, rate_problems
from pipeline.config.rules.replay import replay_notes, replay_problems, sampling_problems
from pipeline.config.rules.transformer_rules import (
    field_problems,
    intended_fields,
    recompute_notes,
)
from pipeline.config.rules.unused import unused_notes
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.model.families import FAMILIES, moe_geometry, rope_type, training_problems
from pipeline.model.limits import MOST_SAMPLES, MOST_TOKENS
from pipeline.store import is_remote, same_place
from pipeline.store.schemes import REMOTE_SHAPES

_REPLAY = "actor_rollout_ref.actor.router_replay"


def config_problems(
    config: RunConfig,
    hf_config: Mapping[str, Any] | None,
    on_cluster: InstalledGpus | None = None,
) -> list[str]:
    """Return contradictions among the settings, or with the model or the workers' machines.

    Args:
        config: The settings.
        hf_config: The model's config.json; None skips the rules that need it.
        on_cluster: The installation's GPUs if workers are pods; None if they are processes on this
            machine.

    Returns:
        One sentence per problem.
    """
    unfit: list[str] = []
    if hf_config is not None:
        unfit, hf_config = _of_model(hf_config)
    policy, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    return [
        *unfit,
        *_batch_problems(config),
        *rate_problems(actor.optim),
        *loss_problems(actor),
        *correction_problems(config),
        *critic_problems(config),
        *(() if on_cluster is None else _cluster_problems(config, on_cluster)),
        *_input_problems(config),
        *estimator_problems(config),
        *_store_problems(config),
        *_recorded_set_problems(config),
        *replay_problems(config, hf_config),
        *sampling_problems(config),
        *layout_problems(config, hf_config),
        *refused_fields(TRANSFORMER, actor.megatron.override_transformer_config),
        *option_problems(actor),
        *(cpu_problems(config, hf_config) if config.trainer.device == "cpu" else ()),
        *refused_fields(ENGINE, policy.rollout.engine_kwargs.vllm),
        *field_problems(intended_fields(actor.megatron, hf_config), actor.router_replay),
        *(_length_problems(config, hf_config) if hf_config else ()),
    ]


def _of_model(hf_config: Mapping[str, Any]) -> tuple[list[str], Mapping[str, Any] | None]:
    """Return problems with a model's config.json, and the config if the other rules can use it."""
    known = hf_config.get("model_type") in FAMILIES
    try:
        if known:
            moe_geometry(hf_config)
    except InputError as error:  # problems with its other fields do not matter
        return list(error.problems), None
    texts = training_problems(hf_config)
    return (
        [f"actor_rollout_ref.model.path: config.json {text}" for text in texts],
        hf_config if known else None,
    )


def cpu_problems(config: RunConfig, hf_config: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield problems with settings and models that a run on CPU cannot use.

    Args:
        config: The settings.
        hf_config: The model's config.json; None skips the rules that need it.
    """
    yield from cuda_problems(config.actor_rollout_ref.actor)
    yield from of_critic(config, cuda_problems)
    yield from cpu_engine_problems(config, hf_config)


def config_notes(config: RunConfig) -> list[str]:
    """Return notes on accepted settings that may not have the effect that the user expects."""
    megatron = config.actor_rollout_ref.actor.megatron
    return [
        *_name_notes(config),
        *replay_notes(config),
        *rate_notes(config.actor_rollout_ref.actor.optim, config.trainer.total_training_steps),
        *loss_notes(config.actor_rollout_ref.actor),
        *recompute_notes(megatron),
        *critic_notes(config),
        *correction_notes(config),
        *unused_notes(config),
        *(cuda_notes(megatron) if config.trainer.device == "cpu" else ()),
    ]


def rank_notes(config: RunConfig) -> list[str]:
    """Return notes on trainer.nnodes for runs whose workers are all processes on one machine."""
    trainer = config.trainer
    if trainer.nnodes == 1:
        return []
    return [
        f"trainer.nnodes: {trainer.nnodes} nodes with {trainer.n_gpus_per_node} ranks each mean "
        f"{trainer.nnodes * trainer.n_gpus_per_node} ranks, all on this machine; several nodes "
        "require Kubernetes (docs/kubernetes.md)"
    ]


def _name_notes(config: RunConfig) -> list[str]:
    name, folder = config.trainer.experiment_name, config.trainer.run_name
    text = f"trainer.experiment_name: the folder of the run {name!r} is {folder}"
    return [] if name == folder else [text]


def _batch_problems(config: RunConfig) -> Iterator[str]:
    actor, data = config.actor_rollout_ref.actor, config.data
    if data.train_batch_size % actor.ppo_mini_batch_size:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size: found {actor.ppo_mini_batch_size}, "
            f"expected a divisor of data.train_batch_size={data.train_batch_size} (both count "
            f"prompts); write {_divisor_below(data.train_batch_size, actor.ppo_mini_batch_size)}"
        )
    yield from budget_problems(config)
    yield from _limit_problems(config)
    yield from group_problems(config)
    shards = config.launch.rollout_shards
    name, size = sampled_at_once(config)
    if shards is not None and shards > size:
        yield (
            f"launch.rollout_shards: found {shards}, expected at most {name}={size}; each shard "
            "needs at least one prompt"
        )
    workers = config.launch.rollout_workers or 1
    if shards is not None and shards < workers:
        yield (
            f"launch.rollout_shards: found {shards}, expected at least "
            f"launch.rollout_workers={workers}; a worker without a shard would always be idle"
        )


def _limit_problems(config: RunConfig) -> Iterator[str]:
    """Yield problems with steps and samples that exceed the limits of the stored formats."""
    data, n = config.data, config.actor_rollout_ref.rollout.n
    if (samples := data.train_batch_size * n) > MOST_SAMPLES:
        yield (
            f"data.train_batch_size: found {data.train_batch_size}, which with actor_rollout_ref."
            f"rollout.n={n} gives {samples} samples per step, expected at most {MOST_SAMPLES}"
        )
    if (tokens := data.max_prompt_length + data.max_response_length) > MOST_TOKENS:
        yield (
            f"data.max_response_length: found {data.max_response_length}, which with "
            f"data.max_prompt_length={data.max_prompt_length} gives {tokens} tokens per sample, "
            f"expected at most {MOST_TOKENS}"
        )


def _cluster_problems(config: RunConfig, installed: InstalledGpus) -> Iterator[str]:
    replay = config.actor_rollout_ref.actor.router_replay
    places = {
        "store.uri": config.store.uri,
        f"{_REPLAY}.record_file": replay.record_file,
        f"{_REPLAY}.replay_file": replay.replay_file,
    }
    for key, place in places.items():
        if place is not None and not is_remote(place):
            yield f"{key}: found {place}, expected {REMOTE_SHAPES}, because pods share no folder"
    yield from gpu_problems(config, installed)


def _input_problems(config: RunConfig) -> Iterator[str]:
    replay_file = config.actor_rollout_ref.actor.router_replay.replay_file
    if not config.data.train_files:
        yield (
            "data.train_files: found nothing, expected Parquet file(s) with prompts; "
            "add data.train_files=PATH"
        )
    overlong = config.reward.reward_kwargs.overlong_buffer_cfg
    longest = config.data.max_response_length
    if overlong.enable and not 1 <= overlong.len <= longest:
        yield (
            f"reward.reward_kwargs.overlong_buffer_cfg.len: found {overlong.len}, expected 1 to "
            f"data.max_response_length={longest}; write the number of tokens over "
            "which the penalty grows"
        )
    if config.launch.rollout_workers == 0 and replay_file is None:
        yield (
            "launch.rollout_workers: found 0, but without "
            f"{_REPLAY}.replay_file a step requires rollout workers; write 1 or more"
        )


def _store_problems(config: RunConfig) -> list[str]:
    endpoint = config.store.endpoint
    if endpoint is None:
        return []
    parts = urlsplit(endpoint)
    if "@" in parts.netloc:
        # The message does not repeat the URL, because it contains a password.
        return [
            "store.endpoint: found a URL with credentials, which would be written into run.json; "
            "write https://HOST[:PORT], and set credentials in the environment or a profile"
        ]
    if parts.scheme in ("http", "https") and parts.netloc and parts.path in ("", "/"):
        return []
    return [
        f"store.endpoint: found {endpoint!r}, expected https://HOST[:PORT] or "
        "http://HOST[:PORT]; correct it"
    ]


def _recorded_set_problems(config: RunConfig) -> Iterator[str]:
    replay = config.actor_rollout_ref.actor.router_replay
    for name, place in (("record_file", replay.record_file), ("replay_file", replay.replay_file)):
        if place is None:
            continue
        if replay.mode == "disabled":
            yield (
                f"{_REPLAY}.{name}: found {place}, but {_REPLAY}.mode is disabled; write mode=R2 "
                f"or mode=R3, or leave {name} out"
            )
        if same_place(place, config.run_uri):
            yield (
                f"{_REPLAY}.{name}: found {place}, which is the run's own place "
                "(store.uri/trainer.experiment_name); write a different place"
            )
    if replay.replay_file is None:
        return
    if replay.record_file is not None and same_place(replay.record_file, replay.replay_file):
        yield (
            f"{_REPLAY}.record_file: found {replay.record_file}, the same as replay_file; a "
            "recorded set cannot be overwritten while it is replayed; write a different place, or "
            "leave record_file out"
        )
    if config.launch.rollout_workers:
        yield (
            f"launch.rollout_workers: found {config.launch.rollout_workers}, but with "
            f"{_REPLAY}.replay_file no rollout takes place; write 0, or leave one of the two out"
        )
    if config.data.val_files:
        yield (
            f"data.val_files: found {config.data.val_files}, but with {_REPLAY}.replay_file no "
            "rollout worker is started for validation; write data.val_files=null, or leave "
            "replay_file out"
        )


def positions_of(hf_config: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens in a sample, or None if it is unknown.

    If RoPE is scaled, the maximum is higher than max_position_embeddings. The function then returns
    None, and the engine checks the length.
    """
    longest = hf_config.get("max_position_embeddings")
    scaled = rope_type(hf_config) != "default"
    return None if scaled or not isinstance(longest, int) else longest


def _length_problems(config: RunConfig, hf_config: Mapping[str, Any]) -> list[str]:
    longest = positions_of(hf_config)
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    if longest is None or prompt + response <= longest:
        return []
    if prompt >= longest:
        return [
            f"data.max_prompt_length: found {prompt}, but the model has only {longest} positions "
            f"for prompt and response; write at most {max(longest - response, longest // 2)}"
        ]
    return [
        f"data.max_response_length: found {response}, which with data.max_prompt_length={prompt} "
        f"gives {prompt + response} tokens, but the model has {longest} positions; write at most "
        f"{longest - prompt}, or reduce data.max_prompt_length"
    ]


def _divisor_below(number: int, limit: int) -> int:
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)
