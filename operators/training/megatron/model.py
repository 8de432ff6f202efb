"""Builds this rank's part of a model from an HF folder: Megatron chunks, weights and optimizer."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from mbridge.core.llm_bridge import LLMBridge
from mbridge.core.parallel_states import ParallelStates
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from transformers import AutoConfig

from operators.cpu import without_cuda
from operators.training.megatron.bridges import BRIDGES, HfConfig
from operators.training.megatron.optimizer import optimizer_config, wrap_for_training
from operators.training.megatron.patched import count_tokens_without_padding
from operators.training.megatron.value_head import with_value_head
from operators.training.megatron.weights import load_weights
from pipeline.config.actor import Actor
from pipeline.config.rules.cuda import chosen
from pipeline.config.rules.layout import expert_tensor_parallel_size
from pipeline.config.rules.overrides import (
    MEGATRON,
    OVERRIDE,
    TRANSFORMER,
    refused_fields,
    unknown_fields,
)
from pipeline.config.rules.transformer_rules import field_problems
from pipeline.errors import InputError
from pipeline.model.families import training_problems
from pipeline.model.fields import complete, missing_fields, value_problems

_log = logging.getLogger(__name__)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class LoadedModel:
    """This rank's part of a model, with its weights."""

    chunks: Sequence[torch.nn.Module]
    """Chunks for Megatron's schedules: one, or one per virtual pipeline stage."""
    config: TransformerConfig
    bridge: LLMBridge
    """The bridge that maps the weights' names and partitions."""

    @property
    def bare_chunks(self) -> list[GPTModel]:
        """The chunks' GPTModels, without wrappers."""
        return [bare(chunk) for chunk in self.chunks]


@dataclass(frozen=True)
class TrainedModel(LoadedModel):
    """A model with its optimizer, for training."""

    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer


def build_model(folder: Path, actor: Actor) -> TrainedModel:
    """Load an HF folder into Megatron in `parallel.start`'s layout; every rank must call this.

    Raises InputError, naming the cause, if the model or a setting does not allow training.
    """
    return _wrapped(_load(folder, actor), actor)


def build_critic(folder: Path, settings: Actor, seed: int) -> TrainedModel:
    """Build the model with a value head as its output layer; every rank must call this.

    Args:
        folder: The HF model.
        settings: The critic's settings in the actor's form (`over_actor`).
        seed: The seed from which the value head is drawn.

    Raises:
        InputError: The model or a setting does not allow training.
    """
    return _wrapped(_load(folder, settings, value_seed=seed), settings)


def _wrapped(model: LoadedModel, actor: Actor) -> TrainedModel:
    chunks, optimizer = wrap_for_training(model.chunks, model.config, actor)
    return TrainedModel(chunks, model.config, model.bridge, optimizer)


def build_reference(folder: Path, actor: Actor) -> LoadedModel:
    """Build the reference policy, without gradients or an optimizer; every rank must call this."""
    model = _load(folder, actor)
    for chunk in model.chunks:
        chunk.eval().requires_grad_(False)
    return model


def _load(folder: Path, actor: Actor, value_seed: int | None = None) -> LoadedModel:
    """Create chunks and load their weights; `value_seed` adds a value head drawn from the seed."""
    has_values = value_seed is not None
    bridge = _make_bridge(folder, actor, tied=False if has_values else None)
    count_tokens_without_padding()
    try:
        chunks = _make_chunks(bridge, [] if value_seed is None else [with_value_head(value_seed)])
    except (AssertionError, ValueError) as error:
        raise InputError([f"{folder}: Megatron-core cannot build this model: {error}"]) from error
    load_weights(bridge, [bare(chunk) for chunk in chunks], folder, with_output=not has_values)
    return LoadedModel(chunks, bridge.config, bridge)


def check_fields(folder: Path, actor: Actor) -> None:
    """Build Megatron-core's settings for an HF folder as a rank would, without other ranks.

    Raises InputError if Megatron-core refuses their combination.
    """
    megatron = actor.megatron
    layout = ParallelStates(
        tp_size=megatron.tensor_model_parallel_size,
        pp_size=megatron.pipeline_model_parallel_size,
        vpp_size=megatron.virtual_pipeline_model_parallel_size,
        cp_size=megatron.context_parallel_size,
        ep_size=megatron.expert_model_parallel_size,
        etp_size=expert_tensor_parallel_size(megatron),
    )
    _make_bridge(folder, actor, None, layout)
    optimizer_config(actor)


def routers(model: LoadedModel) -> dict[int, TopKRouter]:
    """Return this rank's MoE routers, keyed by their layer's index in the model (from 0).

    The search covers only the decoders, so it leaves out multi-token-prediction layers. Dense
    layers do not have a router.
    """
    found = {}
    for chunk in model.bare_chunks:
        for layer in chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, TopKRouter):
                found[layer.layer_number - 1] = router
    return found


def bare(chunk: torch.nn.Module) -> GPTModel:
    """Return the GPTModel inside DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = cast(torch.nn.Module, chunk.module)
    return cast(GPTModel, chunk)


def _make_bridge(
    folder: Path, actor: Actor, tied: bool | None, layout: ParallelStates | None = None
) -> LLMBridge:
    """Create the bridge for a model.

    `tied` determines whether the output layer shares the embedding's weight; None keeps the
    config's setting. `layout` is None for the layout of the process groups.
    """
    hf = _read_config(folder)
    if tied is not None:
        hf.tie_word_embeddings = tied
    tp = actor.megatron.tensor_model_parallel_size
    if hf.vocab_size % tp:
        # If the vocabulary were padded, the padding would take a share of every softmax.
        raise InputError(
            [
                f"{folder}/config.json has vocab_size={hf.vocab_size}, expected a multiple of "
                f"{MEGATRON}.tensor_model_parallel_size={tp}; use a smaller parallel size"
            ]
        )
    # transformers 5 keeps rope_theta in rope_parameters; mbridge 0.15.1 reads it from the config.
    hf.rope_theta = hf.rope_parameters["rope_theta"]
    of_family = BRIDGES[hf.model_type]
    overrides = actor.megatron.override_transformer_config
    problems = [
        *refused_fields(TRANSFORMER, overrides),
        *unknown_fields(TRANSFORMER, TransformerConfig, overrides),
    ]
    if problems:
        raise InputError(problems)
    settings = {
        **of_family.settings(hf),
        "sequence_parallel": actor.megatron.sequence_parallel and tp > 1,
        "calculate_per_token_loss": True,
        # With mbridge's value of 0.001, the expert bias would drift away from the engine's fixed
        # bias.
        "moe_router_bias_update_rate": 0.0,
        # As in vLLM, whose router computes probabilities in fp32. Otherwise they would have the
        # precision of the model.
        "moe_router_dtype": "fp32",
        **({} if without_cuda.ON_CPU else chosen(latent=hasattr(hf, "kv_lora_rank"))),
        **overrides,
    }
    if without_cuda.ON_CPU:
        ignored = sorted(k for k, v in overrides.items() if without_cuda.SETTINGS.get(k, v) != v)
        if ignored:
            _log.warning("%s: on CPU, fixed values replace %s", OVERRIDE, ", ".join(ignored))
        settings |= without_cuda.SETTINGS
    try:
        bridge = of_family.make(hf, _DTYPES[actor.megatron.dtype], layout)
        bridge.set_extra_args(**settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(
            [
                f"{folder}/config.json and {MEGATRON} (with {OVERRIDE}): "
                f"Megatron-core refuses the combination: {error}"
            ]
        ) from error
    # Check Megatron-core's resulting fields, which come from settings, config.json or mbridge.
    if problems := field_problems(vars(bridge.config), actor.router_replay):
        raise InputError(problems)
    return bridge


def _read_config(folder: Path) -> HfConfig:
    """Read the transformers config of a model. Raises InputError if it cannot be trained."""
    path = folder / "config.json"
    # The file itself is checked first, because transformers refuses families that it does not
    # support.
    config = json.loads(path.read_text())
    problems = value_problems(config) or training_problems(complete(config))
    if not problems:
        hf = AutoConfig.from_pretrained(folder, local_files_only=True)
        for name, value in missing_fields(config).items():
            setattr(hf, name, value)
        problems = training_problems(hf.to_dict())
    if problems:
        raise InputError([f"{path} {problem}" for problem in problems])
    return hf


def _make_chunks(bridge: LLMBridge, changes: list[Callable[..., None]]) -> list[torch.nn.Module]:
    """Create chunks with uninitialised weights; load_weights checks that it loads all of them.

    mbridge calls each of `changes` with each GPTModel.
    """
    stages: Sequence[int | None] = range(
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 0
    ) or [None]
    provide = bridge._model_provider(changes)
    chunks: list[torch.nn.Module] = []
    for stage in stages:
        whole = stage is None
        chunk = provide(
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=whole, vp_stage=stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=whole, vp_stage=stage
            ),
            vp_stage=stage,
        )
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if not without_cuda.ON_CPU:
            chunk.cuda(torch.cuda.current_device())
        chunks.append(Float16Module(bridge.config, chunk) if bridge.config.bf16 else chunk)
    return chunks
