"""Models on this rank: HF folder -> Megatron chunks, weights, optimizer; their routers."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from mbridge.core.llm_bridge import LLMBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from transformers import AutoConfig

from operators.training.megatron import cpu_megatron
from operators.training.megatron.bridges import BRIDGES, HfConfig
from operators.training.megatron.optimizer import wrap_for_training
from operators.training.megatron.patched import count_tokens_without_padding
from operators.training.megatron.value_head import with_value_head
from operators.training.megatron.weights import load_weights
from pipeline.config.actor import Actor
from pipeline.config.rules.overrides import override_problems
from pipeline.config.rules.transformer_rules import MEGATRON, OVERRIDE, field_problems
from pipeline.errors import InputError
from pipeline.model.families import training_problems

_log = logging.getLogger(__name__)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class LoadedModel:
    """A model's part on this rank, with its weights."""

    chunks: Sequence[torch.nn.Module]
    """Chunks for Megatron's schedules: one, or one per virtual pipeline stage."""
    config: TransformerConfig
    bridge: LLMBridge
    """Maps names and partitions of the weights."""

    @property
    def bare_chunks(self) -> list[GPTModel]:
        """The GPTModels without their wrappers."""
        return [bare(chunk) for chunk in self.chunks]


@dataclass(frozen=True)
class TrainedModel(LoadedModel):
    """A model with optimizer, for training."""

    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer


def build_model(folder: Path, actor: Actor) -> TrainedModel:
    """Read an HF folder into Megatron, in the layout made by parallel.start. Collective.

    Raises InputError, naming the cause, for a model or setting that cannot be trained.
    """
    return _wrapped(_load(folder, actor), actor)


def build_critic(folder: Path, settings: Actor, seed: int) -> TrainedModel:
    """Build the same model with a value head, drawn from a seed, as its output layer. Collective.

    `settings` are the critic's, as `over_actor` gives them. Raises InputError.
    """
    return _wrapped(_load(folder, settings, value_seed=seed), settings)


def _wrapped(model: LoadedModel, actor: Actor) -> TrainedModel:
    chunks, optimizer = wrap_for_training(model.chunks, model.config, actor)
    return TrainedModel(chunks, model.config, model.bridge, optimizer)


def build_reference(folder: Path, actor: Actor) -> LoadedModel:
    """Build the reference policy: the same without gradients and optimizer. Collective."""
    model = _load(folder, actor)
    for chunk in model.chunks:
        chunk.eval().requires_grad_(False)
    return model


def _load(folder: Path, actor: Actor, value_seed: int | None = None) -> LoadedModel:
    """Make the chunks and load their weights; `value_seed`: with a value head drawn from it."""
    has_values = value_seed is not None
    bridge = _make_bridge(folder, actor, tied=False if has_values else None)
    count_tokens_without_padding()
    try:
        chunks = _make_chunks(bridge, [] if value_seed is None else [with_value_head(value_seed)])
    except (AssertionError, ValueError) as error:
        raise InputError([f"{folder}: Megatron-core cannot build this model: {error}"]) from error
    load_weights(bridge, [bare(chunk) for chunk in chunks], folder, with_output=not has_values)
    return LoadedModel(chunks, bridge.config, bridge)


def routers(model: LoadedModel) -> dict[int, TopKRouter]:
    """The MoE routers of this rank by model index of their layer (0-based, over all stages).

    The search covers the decoders: dense layers have no router, and a multi-token-prediction layer
    is not in a decoder.
    """
    found = {}
    for chunk in model.bare_chunks:
        for layer in chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, TopKRouter):
                found[layer.layer_number - 1] = router
    return found


def bare(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = cast(torch.nn.Module, chunk.module)
    return cast(GPTModel, chunk)


def _make_bridge(folder: Path, actor: Actor, tied: bool | None) -> LLMBridge:
    """`tied`: whether the output layer is the embedding; None: as the model's config says."""
    hf = _read_config(folder)
    if tied is not None:
        hf.tie_word_embeddings = tied
    tp = actor.megatron.tensor_model_parallel_size
    if hf.vocab_size % tp:
        # With a padded vocabulary, padding would take a share of every softmax.
        raise InputError(
            [
                f"{folder}/config.json has vocab_size={hf.vocab_size}, expected a multiple of "
                f"{MEGATRON}.tensor_model_parallel_size={tp}; write a smaller one"
            ]
        )
    # transformers 5 keeps rope_theta in rope_parameters; mbridge 0.15.1 reads the old place.
    hf.rope_theta = hf.rope_parameters["rope_theta"]
    of_family = BRIDGES[hf.model_type]
    overrides = actor.megatron.override_transformer_config
    if problems := list(override_problems(overrides)):
        raise InputError(problems)
    settings = {
        **of_family.settings(hf),
        "sequence_parallel": actor.megatron.sequence_parallel and tp > 1,
        "calculate_per_token_loss": True,
        # With mbridge's 0.001, a fixed expert bias would drift away from the engine's.
        "moe_router_bias_update_rate": 0.0,
        **overrides,
    }
    if cpu_megatron.ON_CPU:
        ignored = sorted(k for k, v in overrides.items() if cpu_megatron.SETTINGS.get(k, v) != v)
        if ignored:
            _log.warning("%s: %s have another value on CPU", OVERRIDE, ", ".join(ignored))
        settings |= cpu_megatron.SETTINGS
    try:
        bridge = of_family.make(hf, dtype=_DTYPES[actor.megatron.dtype])
        bridge.set_extra_args(**settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(
            [
                f"{folder}/config.json and {MEGATRON} (with {OVERRIDE}): "
                f"Megatron-core refuses the combination: {error}"
            ]
        ) from error
    # Megatron-core's own fields, whether from settings, config.json or mbridge.
    if problems := field_problems(vars(bridge.config), actor.router_replay):
        raise InputError(problems)
    return bridge


def _read_config(folder: Path) -> HfConfig:
    """Read the transformers config of a model. Raises InputError if it cannot be trained."""
    path = folder / "config.json"
    # The file as written comes first: transformers refuses families that it does not know.
    problems = training_problems(json.loads(path.read_text()))
    if not problems:
        hf = AutoConfig.from_pretrained(folder, local_files_only=True)
        problems = training_problems(hf.to_dict())
    if problems:
        raise InputError([f"{path} {problem}" for problem in problems])
    return hf


def _make_chunks(bridge: LLMBridge, changes: list[Callable[..., None]]) -> list[torch.nn.Module]:
    """Make chunks with uninitialised weights; load_weights loads all and checks that it does.

    `changes` are called with each GPTModel, as mbridge calls them.
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
        if not cpu_megatron.ON_CPU:
            chunk.cuda(torch.cuda.current_device())
        chunks.append(Float16Module(bridge.config, chunk) if bridge.config.bf16 else chunk)
    return chunks
