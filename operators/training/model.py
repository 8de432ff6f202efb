"""The trained model on this rank: HF folder -> Megatron chunks, weights, optimizer; its routers."""

import dataclasses
import difflib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from transformers import AutoConfig

from operators.training import cpu_megatron
from operators.training.bridges import FAMILIES, problems_of
from operators.training.optimizer import wrap_for_training
from operators.training.patched import count_tokens_without_padding
from operators.training.weights import load_weights
from pipeline.config.errors import InputError
from pipeline.config.tree import Actor

_log = logging.getLogger(__name__)
_KEY = "actor_rollout_ref.actor.megatron.override_transformer_config"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_OWNED = {
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "bf16": "dtype",
    "fp16": "dtype",
    "params_dtype": "dtype",
    "pipeline_dtype": "dtype",
}
"""Fields of TransformerConfig with a key of their own under actor_rollout_ref.actor.megatron."""


@dataclass(frozen=True)
class TrainedModel:
    """A model's part on this rank."""

    chunks: list[torch.nn.Module]
    """As Megatron's schedules take them: one, or one per virtual pipeline stage."""
    config: Any
    """Megatron's TransformerConfig."""
    optimizer: Any
    """Megatron's; None for a model that is not trained (the reference)."""
    hf_config: dict[str, Any]
    """config.json as it was read."""
    bridge: Any
    """mbridge's, which knows the names and cuts of the weights."""

    @property
    def bare_chunks(self) -> list[torch.nn.Module]:
        """The GPTModels without their wrappers."""
        return [bare(chunk) for chunk in self.chunks]


def build_model(folder: Path, actor: Actor, training: bool = True) -> TrainedModel:
    """Read an HF folder into Megatron, in the layout that parallel.start has made. Collective.

    `training=False`: no optimizer and no gradients (the reference policy).
    Raises InputError if the model or a setting cannot be trained, naming it.
    """
    hf_config = json.loads((folder / "config.json").read_text())
    bridge = _make_bridge(folder, actor)
    count_tokens_without_padding()
    try:
        chunks = _make_chunks(bridge)
    except (AssertionError, ValueError) as error:
        raise InputError([f"{folder}: Megatron-core cannot build this model: {error}"]) from error
    load_weights(bridge, [bare(chunk) for chunk in chunks], folder)
    optimizer = None
    if training:
        chunks, optimizer = wrap_for_training(chunks, bridge.config, actor)
    else:
        for chunk in chunks:
            chunk.eval().requires_grad_(False)
    return TrainedModel(chunks, bridge.config, optimizer, hf_config, bridge)


def load_hf(model: TrainedModel, folder: Path) -> None:
    """Load an HF folder's weights into a model; fp32 master weights follow. Collective.

    Adam's moments stay as they are.
    """
    load_weights(model.bridge, model.bare_chunks, folder)
    if model.optimizer is not None:
        model.optimizer.reload_model_params()


def routers(model: TrainedModel) -> dict[int, TopKRouter]:
    """The MoE routers of this rank by model index of their layer (0-based, over all stages).

    Found by walking the decoders: dense layers have none, and a multi-token-prediction layer,
    which is not in a decoder, is left alone.
    """
    found = {}
    for chunk in model.bare_chunks:
        for layer in chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, TopKRouter):
                found[layer.layer_number - 1] = router
    return found


def bare(chunk: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _make_bridge(folder: Path, actor: Actor) -> Any:
    hf = _read_config(folder)
    tp = actor.megatron.tensor_model_parallel_size
    problems = problems_of(hf)
    if hf.vocab_size % tp:
        # Padding it would give the padded tokens a share of every softmax.
        problems.append(f"vocab_size {hf.vocab_size} is not divisible by TP {tp}; choose another")
    if problems:
        raise InputError([f"{folder}/config.json: {problem}" for problem in problems])
    # transformers 5 keeps it in rope_parameters; mbridge 0.15.1 reads the old place.
    hf.rope_theta = hf.rope_parameters["rope_theta"]
    family = FAMILIES[hf.model_type]
    overrides = _checked_overrides(
        actor, MLATransformerConfig if _latent(hf) else TransformerConfig
    )
    settings = {
        **family.settings(hf),
        "sequence_parallel": actor.megatron.sequence_parallel and tp > 1,
        "calculate_per_token_loss": True,
        # mbridge says 0.001, with which a fixed expert bias would drift away from the engine's.
        "moe_router_bias_update_rate": 0.0,
        **overrides,
    }
    if cpu_megatron.ON_CPU:
        ignored = sorted(k for k, v in overrides.items() if cpu_megatron.SETTINGS.get(k, v) != v)
        if ignored:
            _log.warning("%s: %s have another value on CPU", _KEY, ", ".join(ignored))
        settings |= cpu_megatron.SETTINGS
    try:
        bridge = family.bridge(hf, dtype=_DTYPES[actor.megatron.dtype])
        bridge.set_extra_args(**settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(
            [
                f"{folder}/config.json and actor_rollout_ref.actor.megatron (with {_KEY}): "
                f"Megatron-core refuses the combination: {error}"
            ]
        ) from error
    refuse_settings(bridge.config)
    return bridge


def _read_config(folder: Path) -> Any:
    model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    if model_type not in FAMILIES:
        raise InputError(
            [
                f"{folder}/config.json: model_type {model_type!r} is not known; known: "
                f"{', '.join(sorted(FAMILIES))}"
            ]
        )
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _latent(hf: Any) -> bool:
    return hasattr(hf, "kv_lora_rank")


def _checked_overrides(actor: Actor, config_class: type) -> dict[str, Any]:
    known = [field.name for field in dataclasses.fields(config_class)]
    problems = []
    for name in actor.megatron.override_transformer_config:
        if name in _OWNED:
            problems.append(
                f"{_KEY}.{name}: set actor_rollout_ref.actor.megatron.{_OWNED[name]} instead"
            )
        elif name == "calculate_per_token_loss":
            problems.append(f"{_KEY}.{name} is always true: losses are means over tokens")
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            problems.append(
                f"{_KEY}.{name}: {config_class.__name__} of Megatron-core has no such field; the "
                f"nearest is {near}"
            )
    if problems:
        raise InputError(problems)
    return dict(actor.megatron.override_transformer_config)


def refuse_settings(config: Any) -> None:
    """Refuse what Megatron-core 0.16.1 accepts and then does wrong, or fails at in mid-step."""
    problems = []
    vpp = config.virtual_pipeline_model_parallel_size
    if vpp and (config.batch_p2p_comm or not config.overlap_p2p_comm):
        # A batched exchange posts both directions to one peer, matched in order: over two stages
        # an activation arrives as a gradient, without an error.
        problems.append(
            f"{_KEY}: a virtual pipeline needs overlap_p2p_comm true (found "
            f"{config.overlap_p2p_comm}) and batch_p2p_comm false (found {config.batch_p2p_comm}); "
            "leave both unset"
        )
    tp = config.tensor_model_parallel_size
    if config.num_moe_experts and tp > 1 and not config.sequence_parallel:
        problems.append(
            f"actor_rollout_ref.actor.megatron.sequence_parallel is false at TP {tp}: "
            "Megatron-core trains experts under TP only with it; set it to true"
        )
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(config, name) != 0:
            problems.append(
                f"{_KEY}.{name} is {getattr(config, name)} (as set, or from config.json): a "
                "log-prob pass and an update pass would differ; set it to 0.0"
            )
    if problems:
        raise InputError(problems)


def _make_chunks(bridge: Any) -> list[torch.nn.Module]:
    """Chunks with uninitialised meaning: every weight is loaded afterwards, and checked to be."""
    stages: Sequence[int | None] = range(
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 0
    ) or [None]
    provide = bridge._model_provider([])
    chunks = []
    for stage in stages:
        where = {"ignore_virtual": stage is None, "vp_stage": stage}
        chunk = provide(
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            vp_stage=stage,
        )
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if not cpu_megatron.ON_CPU:
            chunk.cuda(torch.cuda.current_device())
        chunks.append(Float16Module(bridge.config, chunk) if bridge.config.bf16 else chunk)
    return chunks
