"""The bridges of mbridge 0.15.1 for the model families that Retrace trains, with corrections.

A bridge converts an HF config to Megatron's TransformerConfig, and converts weights between the HF
format and the Megatron format. There are two kinds of corrections. Class attributes and methods
correct mistakes in mbridge's names or code. The `_..._settings` functions set fields of
TransformerConfig that mbridge hard-codes or omits. The docstring of each correction gives its
reason. `training_problems` in pipeline/model/families.py refuses a model if a bridge would silently
ignore a part of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from mbridge.core.llm_bridge import LLMBridge
from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from mbridge.models.glm4moe import GLM4MoEBridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.mixtral import MixtralBridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen2moe import Qwen2MoEBridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from operators.cpu import without_cuda
from operators.cpu.layers import local_block_spec

HfConfig = Any
"""A transformers config."""


class _Corrected(LLMBridge):
    """Corrections for every family; this class comes before mbridge's class among the bases."""

    def _get_transformer_layer_spec(
        self, vp_stage: int | None = None
    ) -> TransformerBlockSubmodules:
        if not without_cuda.ON_CPU:
            return super()._get_transformer_layer_spec(vp_stage)
        self.has_vp_stage = True
        return local_block_spec(self.config, vp_stage)

    def _adjust_mapping_for_shared_weights(self) -> None:
        """Map the last stage's copy of tied embeddings (PP > 1) to the embeddings in the file.

        The copy does not have its own name in the file. mbridge handles this only for dense Qwen,
        by changing the class itself, so that a later untied model in the same process would be
        treated as tied.
        """
        if self.hf_config.tie_word_embeddings:
            embeddings = "model.embed_tokens.weight"
            self._DIRECT_MAPPING = {**self._DIRECT_MAPPING, "output_layer.weight": embeddings}

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        """Return the ordinary safetensors reader for all families.

        mbridge's reader for DeepSeek converts FP8 on a GPU and refuses float32. Retrace refuses FP8
        checkpoints earlier, and other DeepSeek checkpoints do not need a special reader.
        """
        return SafeTensorIO(weights_path)


class _Qwen2(_Corrected, Qwen2Bridge):
    pass


class _Qwen3(_Corrected, Qwen3Bridge):
    pass


class _Llama(_Corrected, LLaMABridge):
    pass


_DENSE_LAYER = Qwen2Bridge._MLP_MAPPING
"""Names of the weights in dense MLP layers, which an MoE model contains if mlp_only_layers lists
any layer or decoder_sparse_step is above 1. mbridge's Qwen MoE bridges lack these names."""


class _Qwen2Moe(_Corrected, Qwen2MoEBridge):
    _MLP_MAPPING: ClassVar = {**Qwen2MoEBridge._MLP_MAPPING, **_DENSE_LAYER}


class _Qwen3Moe(_Corrected, Qwen3MoEBridge):
    _MLP_MAPPING: ClassVar = {**Qwen3MoEBridge._MLP_MAPPING, **_DENSE_LAYER}


class _Mixtral(_Corrected, MixtralBridge):
    pass


def _mla_config(max_position_embeddings: int, **fields: Any) -> MLATransformerConfig:
    """Return the config without max_position_embeddings, a field that Megatron-core renamed.

    `_deepseek_settings` sets the new field.
    """
    return MLATransformerConfig(**fields)


class _DeepseekV3(_Corrected, DeepseekV3Bridge):
    TransformerConfigClass = staticmethod(_mla_config)
    # Models whose q_lora_rank is null (Moonlight) have a plain query projection.
    _ATTENTION_MAPPING: ClassVar = {
        **DeepseekV3Bridge._ATTENTION_MAPPING,
        "self_attention.linear_q_proj.weight": [
            "model.layers.{layer_number}.self_attn.q_proj.weight"
        ],
    }


class _Glm4Moe(_Corrected, GLM4MoEBridge):
    def _get_gptmodel_args(self) -> dict[str, Any]:
        """Return mbridge's arguments for the model.

        transformers 5 keeps partial_rotary_factor in rope_parameters; mbridge reads it from the
        config.
        """
        rope = self.hf_config.rope_parameters
        self.hf_config.partial_rotary_factor = rope.get("partial_rotary_factor", 1.0)
        arguments: dict[str, Any] = super()._get_gptmodel_args()
        return arguments


def _no_settings(hf: HfConfig) -> dict[str, Any]:
    return {}


def _qwen_moe_settings(hf: HfConfig) -> dict[str, Any]:
    """Read from the config which layers have experts, and whether expert weights are normalised.

    mbridge hard-codes the normalisation for each Qwen family, and treats every layer as an MoE
    layer.
    """
    dense = set(hf.mlp_only_layers or [])
    step = hf.decoder_sparse_step
    return {
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_layer_freq": [
            int(layer not in dense and (layer + 1) % step == 0)
            for layer in range(hf.num_hidden_layers)
        ],
    }


def _qwen2_moe_settings(hf: HfConfig) -> dict[str, Any]:
    """Enable the shared expert's gate, which mbridge maps but does not enable in Megatron."""
    return {**_qwen_moe_settings(hf), "moe_shared_expert_gate": True}


def _mixtral_settings(hf: HfConfig) -> dict[str, Any]:
    """Normalise the chosen experts' weights as Mixtral does; mbridge disables this."""
    return {"moe_router_pre_softmax": False}


def _group_settings(hf: HfConfig) -> dict[str, Any]:
    """Set group-limited routing, which mbridge omits."""
    grouped = (hf.n_group or 1) > 1
    return {
        "moe_router_num_groups": hf.n_group if grouped else None,
        "moe_router_group_topk": hf.topk_group if grouped else None,
    }


def _glm_settings(hf: HfConfig) -> dict[str, Any]:
    """Set shared experts, projection biases and group-limited routing; omit the auxiliary loss.

    mbridge assumes one shared expert and biased projections, and sets an auxiliary loss. The
    multi-token-prediction layer is not trained.
    """
    return {
        **_group_settings(hf),
        "add_qkv_bias": hf.attention_bias,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "mtp_num_layers": None,
    }


def _deepseek_settings(hf: HfConfig) -> dict[str, Any]:
    """Set RoPE scaling from transformers 5's rope_parameters, and group-limited routing.

    mbridge reads RoPE scaling from a place that transformers 5 does not use, and therefore ignores
    YaRN. The multi-token-prediction layer is not trained.
    """
    rope = hf.rope_parameters
    settings = {
        **_group_settings(hf),
        "mtp_num_layers": None,
        # head_dim in the HF config is only the rotary part; see _LatentDotProductAttention.
        "kv_channels": hf.v_head_dim,
        "rope_type": "rope",
        # Only YaRN scales the softmax; a value other than 1.0 would also scale it with plain RoPE.
        "rotary_scaling_factor": 1.0,
    }
    if rope["rope_type"] == "yarn":
        settings |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta_fast": rope.get("beta_fast", 32),
            "beta_slow": rope.get("beta_slow", 1),
            "mscale": rope.get("mscale", 1.0),
            "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
        }
    return settings


@dataclass(frozen=True)
class Bridge:
    """The bridge of one model_type."""

    make: Callable[..., LLMBridge]
    """The bridge's constructor, which takes the HF config and the weights' dtype."""
    settings: Callable[[HfConfig], dict[str, Any]] = _no_settings


BRIDGES = {
    "deepseek_v3": Bridge(_DeepseekV3, _deepseek_settings),
    "glm4_moe": Bridge(_Glm4Moe, _glm_settings),
    "llama": Bridge(_Llama),
    "mixtral": Bridge(_Mixtral, _mixtral_settings),
    "qwen2": Bridge(_Qwen2),
    "qwen2_moe": Bridge(_Qwen2Moe, _qwen2_moe_settings),
    "qwen3": Bridge(_Qwen3),
    "qwen3_moe": Bridge(_Qwen3Moe, _qwen_moe_settings),
}
"""Bridges, keyed by model_type, for the trained families in pipeline/model/families.py."""
