"""Estimates of the memory that the fullest training GPU, the host and the engines need.

All functions are pure functions of config.json and settings. docs/sizes.md lists the parts that are
counted, and the assumptions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pipeline.config.actor import Actor, Megatron
from pipeline.config.critic import over_actor
from pipeline.config.rules.budget import OF_CRITIC, Pass, budget, passes_of
from pipeline.config.rules.precision import precision_aware
from pipeline.config.tree import RunConfig
from pipeline.inputs.sizes.activations import (
    Layer,
    LayerCut,
    Recompute,
    layer_of,
    norm_input_bytes,
    recompute_of,
)
from pipeline.inputs.sizes.cut import (
    Cut,
    PipelineStage,
    RankWeights,
    cut_of,
    rank_weights,
    stages_of,
)
from pipeline.inputs.sizes.memory import GIB, Memory, MemoryPart
from pipeline.model.widths import Widths, weight_count, widths_of
from pipeline.run.attempts import attempt_of

_ITEM = {"bfloat16": 2, "float32": 4}
_FP32 = 4
_CHUNK_TOKENS = 1024
_CHUNK_COPIES = 1.5
"""The loss needs at most this many times the size of the float32 logits for _CHUNK_TOKENS tokens.

Both numbers come from operators/training/passes/logprobs.py: one is CHUNK_TOKENS, and the docstring
of `logprobs_and_entropy` states the other.
"""
RUNTIME = 4 * GIB
"""GPU memory, in bytes, that is assumed to be unavailable for tensors.

It covers CUDA's context, NCCL's buffers, cuBLAS's workspaces, and fragments that PyTorch's
allocator cannot use.
"""
RUNTIME_PART = "CUDA, NCCL, fragments"
LOG_PROB_PARTS: Mapping[Pass, str] = {
    "log_prob": "log-prob pass",
    "reference": "log-prob pass of the reference",
    "values": "pass of the critic's values",
}
"""For each pass without gradients, the name of the part of memory that the pass itself needs."""
CRITIC = "critic's "
"""The prefix of the names of the parts that the critic needs."""


def estimate_memory(config: RunConfig, hf_config: Mapping[str, Any], local: bool = False) -> Memory:
    """Estimate the memory that a run needs.

    Args:
        config: Settings of the run, with a checked layout.
        hf_config: The model's config.json.
        local: Whether ranks use Megatron-core's local layers on the CPU.

    Raises:
        InputError: The model does not belong to a known family.
    """
    widths, cut = widths_of(hf_config), cut_of(config)
    item = _ITEM[config.actor_rollout_ref.actor.megatron.dtype]
    longest = config.data.max_prompt_length + config.data.max_response_length
    runtime = () if local else (MemoryPart(RUNTIME_PART, RUNTIME),)
    stages = []
    for stage in stages_of(config, widths):
        weights = rank_weights(widths, cut, stage)
        static = _static_parts(config, cut, weights)
        layer_cut = LayerCut(widths, cut, item, longest if local else None)
        critic = _critic_parts(config, layer_cut, stage)
        fullest_pass = max(_passes(config, layer_cut, stage, static, critic), key=_sum)
        host = _host_checkpoint(config, cut, weights), _host_older(config, weights)
        stages.append(((*fullest_pass, *runtime), host))
    attempt = attempt_of(config, 0)
    fullest = max(range(cut.pp), key=lambda number: _sum(stages[number][0]))
    return Memory(
        local=local,
        parameters=weight_count(widths),
        stage=fullest,
        parts=stages[fullest][0],
        host_checkpoint=max(checkpoint for _, (checkpoint, _) in stages),
        host_older=max(older for _, (_, older) in stages),
        engine=_engine_parts(config, widths),
        training_gpus=attempt.training_ranks,
        rollout_gpus=attempt.rollout_workers
        * config.actor_rollout_ref.rollout.tensor_model_parallel_size,
    )


def _sum(parts: tuple[MemoryPart, ...]) -> int:
    return sum(part.bytes for part in parts)


def _static_parts(config: RunConfig, cut: Cut, weights: RankWeights) -> tuple[MemoryPart, ...]:
    """Return the parts that the policy and the reference need during updates."""
    actor = config.actor_rollout_ref.actor
    megatron, item = actor.megatron, _ITEM[actor.megatron.dtype]
    parts = _trained_parts(actor, cut, weights, "")
    own = config.actor_rollout_ref.ref.megatron.param_offload
    away = megatron.param_offload if own is None else own
    if config.has_reference and not away:
        parts.append(MemoryPart("reference policy", weights.total * item))
    return tuple(parts)


def _trained_parts(settings: Actor, cut: Cut, weights: RankWeights, of: str) -> list[MemoryPart]:
    """Return a model's weights, gradients and optimizer state on a rank; names begin with `of`."""
    sharded = settings.megatron.use_distributed_optimizer
    dense_copies, expert_copies = (cut.dense_copies, cut.expert_copies) if sharded else (1, 1)
    numbers = weights.dense / dense_copies + weights.experts / expert_copies
    return [
        MemoryPart(f"{of}weights", weights.total * _ITEM[settings.megatron.dtype]),
        MemoryPart(f"{of}gradients", weights.total * _gradient_bytes(settings)),
        MemoryPart(f"{of}optimizer state", round(numbers * _state_bytes(settings))),
    ]


def _critic_parts(
    config: RunConfig, layer_cut: LayerCut, stage: PipelineStage
) -> tuple[MemoryPart, ...]:
    """Return the parts that the critic needs during its updates; () without a critic.

    A value head replaces the output layer, so the vocabulary's table is not counted in the last
    stage.
    """
    if not config.has_critic:
        return ()
    widths, cut = replace(layer_cut.widths, tied=False), layer_cut.cut
    weights = rank_weights(widths, cut, stage)
    if stage.last:
        table = widths.vocabulary // cut.tp * widths.hidden
        weights = replace(weights, dense=weights.dense - table + widths.hidden)
    settings = over_actor(config.critic, config.actor_rollout_ref.actor)
    return tuple(_trained_parts(settings, cut, weights, CRITIC))


def _gradient_bytes(actor: Actor) -> int:
    """Return the bytes per weight of a gradient that is summed over ranks."""
    if precision_aware(actor):
        return _FP32 if actor.optim.main_grads_dtype == "fp32" else _ITEM["bfloat16"]
    in_fp32 = actor.megatron.override_ddp_config.get("grad_reduce_in_fp32", True)
    return _FP32 if in_fp32 else _ITEM[actor.megatron.dtype]


def _state_bytes(actor: Actor) -> float:
    """Return the bytes per weight of the optimizer state on the GPU.

    The state consists of Adam's two moments and, if the model's weight is bfloat16, of a float32
    copy of the weight. State that is offloaded to the host is not counted.

    With the precision-aware optimizer, Transformer Engine keeps only those 16 bits of the float32
    weight that the bfloat16 weight lacks. HybridDeviceOptimizer, which offloads state to the host,
    keeps all 32 bits.
    """
    moments = (actor.optim.exp_avg_dtype, actor.optim.exp_avg_sq_dtype)
    state = sum(_FP32 if dtype == "fp32" else _ITEM["bfloat16"] for dtype in moments)
    override = actor.optim.override_optimizer_config
    offloads = override.get("optimizer_cpu_offload", False)
    remainders = override.get("store_param_remainders", True)
    if actor.megatron.dtype == "bfloat16":
        less = precision_aware(actor) and remainders and not offloads
        state += _FP32 - _ITEM["bfloat16"] if less else _FP32
    if not offloads:
        return state
    return float(state * (1 - override.get("optimizer_offload_fraction", 0)))


def _passes(
    config: RunConfig,
    layer_cut: LayerCut,
    stage: PipelineStage,
    static: tuple[MemoryPart, ...],
    critic: tuple[MemoryPart, ...],
) -> Iterator[tuple[MemoryPart, ...]]:
    """Yield the parts of memory that each pass of a step needs.

    The passes are updates and passes without gradients.
    """
    actor = config.actor_rollout_ref.actor
    megatron = actor.megatron
    critics = over_actor(config.critic, actor).megatron
    of_critic = {f"{CRITIC}{name}" for name in _offloaded(critics, {"weights"})}
    for of in passes_of(config):
        away = set(of_critic)
        if of in ("reference", *OF_CRITIC):  # these passes run a model other than the policy
            away |= _offloaded(megatron, {"weights"})
        elif of == "log_prob":
            away |= _offloaded(megatron, set())
        if of == "values":
            away -= {f"{CRITIC}weights"}
        if of == "critic_update":
            away -= of_critic
        here = [part for part in (*static, *critic) if part.name not in away]
        if of == "reference" and all(part.name != "reference policy" for part in here):
            here += [MemoryPart("reference policy", p.bytes) for p in static if p.name == "weights"]
        if of == "update":
            yield (*here, *_update_parts(config, layer_cut, stage, of))
        elif of == "critic_update":
            made = _update_parts(config, layer_cut, stage, of)
            yield (*here, *(MemoryPart(f"{CRITIC}{part.name}", part.bytes) for part in made))
        else:
            forward = _forward_bytes(config, layer_cut, stage, of)
            yield (*here, MemoryPart(LOG_PROB_PARTS[of], forward))


def _offloaded(megatron: Megatron, weights: set[str]) -> set[str]:
    """Return the names of a trained model's offloaded parts."""
    away = {"gradients"} if megatron.grad_offload else set()
    away |= {"optimizer state"} if megatron.optimizer_offload else set()
    return away | (weights if megatron.param_offload else set())


def _forward_bytes(config: RunConfig, layer_cut: LayerCut, stage: PipelineStage, of: Pass) -> int:
    """Return the peak memory in bytes of a pass without gradients.

    The peak is the larger of two sums. The first consists of a layer's input and temporary tensors.
    The second consists of the last hidden states and a chunk's logits or, for a value head, of
    these states and their float32 copy.
    """
    tokens = tokens_of_micro_batch(config, of)
    layers = [layer_of(layer_cut, moe) for moe in set(stage.layers)]
    held = max((layer.input + layer.working for layer in layers), default=0) * tokens
    if stage.last:
        last = (norm_input_bytes(layer_cut) + _output_bytes(layer_cut)) * tokens
        at_head = _value_bytes if of in OF_CRITIC else _logits_bytes
        held = max(held, last + at_head(layer_cut, tokens))
    return round(held)


def _update_parts(
    config: RunConfig, layer_cut: LayerCut, stage: PipelineStage, of: Pass
) -> tuple[MemoryPart, ...]:
    """Return the parts of memory that only an update needs.

    These are the kept activations, and either a layer's backward pass or the loss: the two are not
    in memory at the same time, so only the larger one counts.
    """
    actor, cut = config.actor_rollout_ref.actor, layer_cut.cut
    tokens = tokens_of_micro_batch(config, of)
    recompute = recompute_of(actor.megatron.override_transformer_config)
    layers = {moe: layer_of(layer_cut, moe) for moe in set(stage.layers)}
    in_flight = _chunks_in_flight(cut, stage)
    chunks = [_chunk_bytes([layers[moe] for moe in chunk], recompute) for chunk in stage.chunks]
    kept = sum(chunks) / len(chunks) * in_flight * tokens
    if stage.last:
        kept += (norm_input_bytes(layer_cut) + _output_bytes(layer_cut)) * tokens
    working = max((_working(layer, recompute) for layer in layers.values()), default=0) * tokens
    of_loss = _value_bytes if of in OF_CRITIC else _loss_bytes
    loss = round(of_loss(layer_cut, tokens)) if stage.last else 0
    largest = (
        MemoryPart("loss", loss)
        if loss > working
        else MemoryPart("backward pass of a layer", round(working))
    )
    return (MemoryPart("activations", round(kept)), largest)


def tokens_of_micro_batch(config: RunConfig, of: Pass = "update") -> int:
    """Return the maximum number of tokens on one rank in a micro-batch of a pass.

    All samples are assumed to have the maximum length. In every pass, a micro-batch is a part of a
    mini-batch.
    """
    actor, data, cut = config.actor_rollout_ref.actor, config.data, cut_of(config)
    longest = data.max_prompt_length + data.max_response_length
    if of in OF_CRITIC:
        actor = over_actor(config.critic, actor)
    samples = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    replicas = cut.dense_copies // cut.cp
    of_mini_batch = -(-samples // replicas) * longest // cut.cp
    limits = budget(config, of)
    most = limits.tokens if limits.samples is None else limits.samples * longest
    assert most is not None
    return min(of_mini_batch, most // cut.cp)


def _chunks_in_flight(cut: Cut, stage: PipelineStage) -> int:
    """Return the maximum number of a chunk's forward passes that wait for their backward pass.

    The number follows from Megatron-core's schedules: interleaved 1F1B with virtual stages, and
    plain 1F1B without them.
    """
    behind = cut.pp - stage.number - 1
    if cut.vpp == 1:
        return behind + 1
    return 2 * behind + (cut.vpp - 1) * cut.pp + 1


def _chunk_bytes(layers: list[Layer], recompute: Recompute) -> float:
    """Return the bytes that a chunk keeps per token."""
    if recompute.granularity is None:
        return sum(layer.bytes() for layer in layers)
    if recompute.granularity == "selective":
        return sum(layer.bytes(recompute.modules) for layer in layers)
    if recompute.method == "block":
        whole = layers[recompute.layers :]
        return sum(x.input for x in layers[: recompute.layers]) + sum(x.bytes() for x in whole)
    return sum(layer.input for layer in layers[:: recompute.layers])


def _working(layer: Layer, recompute: Recompute) -> float:
    """Return the maximum bytes per token of a layer's backward pass, excluding kept activations."""
    if recompute.granularity is None:
        return layer.working
    if recompute.granularity == "selective":
        return layer.working + layer.bytes() - layer.bytes(recompute.modules)
    group = recompute.layers if recompute.method == "uniform" else 1
    return layer.working + group * layer.bytes()


def _output_bytes(layer_cut: LayerCut) -> float:
    """Return the bytes per token of the final norm's output.

    Tensor-parallel ranks gather this output for the loss.
    """
    parts = layer_cut.cut.sequence_parts
    return layer_cut.widths.hidden * layer_cut.item * (1 if parts == 1 else 1 + 1 / parts)


def _loss_bytes(layer_cut: LayerCut, tokens: int) -> int:
    """Return the bytes that the loss needs.

    This memory holds the gradient of all tokens' hidden states, one chunk's logits, and the
    gradient of the output layer's weight, which is summed in float32.
    """
    widths, cut, item = layer_cut.widths, layer_cut.cut, layer_cut.item
    hidden = tokens * widths.hidden * item
    weight = widths.vocabulary // cut.tp * widths.hidden * (_FP32 + item)
    return round(_logits_bytes(layer_cut, tokens) + hidden + weight)


def _value_bytes(layer_cut: LayerCut, tokens: int) -> float:
    """Return the size in bytes of a value head's float32 input and of that input's gradient."""
    return 2.0 * _FP32 * tokens * layer_cut.widths.hidden


def _logits_bytes(layer_cut: LayerCut, tokens: int) -> float:
    """Return the size in bytes of a chunk's logits and of the temporary tensors for them."""
    vocabulary = layer_cut.widths.vocabulary // layer_cut.cut.tp
    return _CHUNK_COPIES * _FP32 * min(tokens, _CHUNK_TOKENS) * vocabulary


def _host_checkpoint(config: RunConfig, cut: Cut, weights: RankWeights) -> int:
    """Return the host memory that a node needs to write a checkpoint of these weights.

    A rank copies its share of the optimizer state, and its share of the weights that data-parallel
    ranks have in common. On the CPU, tensors with their own storage are written without a copy.
    """
    own = weights.dense / cut.dense_copies + weights.experts / cut.expert_copies
    item = _ITEM[config.actor_rollout_ref.actor.megatron.dtype]
    return round(config.trainer.n_gpus_per_node * own * (3 * _FP32 + item))


def _host_older(config: RunConfig, weights: RankWeights) -> int:
    """Return a node's host memory for copies of older weights; 0 if no step needs them.

    The first step that needs them is the `native_every`-th one.
    """
    actor = config.actor_rollout_ref.actor
    if not config.has_staleness_pass(actor.router_replay.native_every):
        return 0
    return config.trainer.n_gpus_per_node * weights.total * _ITEM[actor.megatron.dtype]


def _engine_parts(config: RunConfig, widths: Widths) -> tuple[MemoryPart, ...]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    item, tp = _ITEM[rollout.dtype], rollout.tensor_model_parallel_size
    if widths.latent is None:
        cached = max((widths.key + widths.value) // tp, 2 * widths.query // widths.heads)
    else:  # the compressed keys and values, on every rank
        cached = widths.latent.key_value + widths.latent.rotary
    longest = data.max_prompt_length + data.max_response_length
    return (
        MemoryPart("weights", weight_count(widths) * item // tp),
        MemoryPart(
            "cache of one longest sequence", cached * len(widths.moe_layers) * longest * item
        ),
    )
