"""mbridge 0.15.1's bridges to the families that are trained, corrected.

A bridge turns an HF config into Megatron's TransformerConfig and HF weights into Megatron's and
back. The corrections are of two kinds: class attributes and methods where mbridge's names or code
are wrong, and `_..._settings`, fields of TransformerConfig that mbridge fixes or leaves out. Each
has its reason in its docstring. `training_problems` of pipeline/model/families.py refuses models of
which a bridge would silently ignore a part.
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

from operators.training.megatron.cpu_megatron import ON_CPU
from operators.training.megatron.local_layers import local_block_spec

HfConfig = Any
"""A transformers config."""


class _Corrected(LLMBridge):
    """Corrections for every family; listed before mbridge's class among the bases."""

    def _get_transformer_layer_spec(
        self, vp_stage: int | None = None
    ) -> TransformerBlockSubmodules:
        if not ON_CPU:
            return super()._get_transformer_layer_spec(vp_stage)
        self.has_vp_stage = True
        return local_block_spec(self.config, vp_stage)

    def _adjust_mapping_for_shared_weights(self) -> None:
        """At PP > 1 the last stage has its own copy of tied embeddings, without its own name in the
        file. mbridge handles this for dense Qwen only, and there it changes the class, so that a
        later untied model in the same process is treated as tied."""
        if self.hf_config.tie_word_embeddings:
            embeddings = "model.embed_tokens.weight"
            self._DIRECT_MAPPING = {**self._DIRECT_MAPPING, "output_layer.weight": embeddings}

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        """DeepSeek's reader in mbridge converts FP8 on a GPU and refuses float32. FP8 checkpoints
        are refused earlier, and everything else is read like any other model."""
        return SafeTensorIO(weights_path)


class _Qwen2(_Corrected, Qwen2Bridge):
    pass


class _Qwen3(_Corrected, Qwen3Bridge):
    pass


class _Llama(_Corrected, LLaMABridge):
    pass


_DENSE_LAYER = Qwen2Bridge._MLP_MAPPING
"""mbridge's Qwen MoE bridges lack dense layers (mlp_only_layers, decoder_sparse_step)."""


class _Qwen2Moe(_Corrected, Qwen2MoEBridge):
    _MLP_MAPPING: ClassVar = {**Qwen2MoEBridge._MLP_MAPPING, **_DENSE_LAYER}


class _Qwen3Moe(_Corrected, Qwen3MoEBridge):
    _MLP_MAPPING: ClassVar = {**Qwen3MoEBridge._MLP_MAPPING, **_DENSE_LAYER}


class _Mixtral(_Corrected, MixtralBridge):
    pass


def _mla_config(max_position_embeddings: int, **fields: Any) -> MLATransformerConfig:
    """Megatron-core renamed max_position_embeddings; _deepseek_settings sets the new field."""
    return MLATransformerConfig(**fields)


class _DeepseekV3(_Corrected, DeepseekV3Bridge):
    TransformerConfigClass = staticmethod(_mla_config)
    # Models with q_lora_rank null (Moonlight) have a plain query projection.
    _ATTENTION_MAPPING: ClassVar = {
        **DeepseekV3Bridge._ATTENTION_MAPPING,
        "self_attention.linear_q_proj.weight": [
            "model.layers.{layer_number}.self_attn.q_proj.weight"
        ],
    }


class _Glm4Moe(_Corrected, GLM4MoEBridge):
    def _get_gptmodel_args(self) -> dict[str, Any]:
        """transformers 5 keeps partial_rotary_factor in rope_parameters."""
        rope = self.hf_config.rope_parameters
        self.hf_config.partial_rotary_factor = rope.get("partial_rotary_factor", 1.0)
        arguments: dict[str, Any] = super()._get_gptmodel_args()
        return arguments


def _no_settings(hf: HfConfig) -> dict[str, Any]:
    return {}


def _qwen_moe_settings(hf: HfConfig) -> dict[str, Any]:
    """mbridge fixes for each Qwen family whether the chosen weights are normalised, and treats
    every layer as a MoE layer."""
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
    """mbridge maps the shared expert's gate but does not turn it on in Megatron."""
    return {**_qwen_moe_settings(hf), "moe_shared_expert_gate": True}


def _mixtral_settings(hf: HfConfig) -> dict[str, Any]:
    """Mixtral normalises the chosen weights; mbridge sets that it does not."""
    return {"moe_router_pre_softmax": False}


def _group_settings(hf: HfConfig) -> dict[str, Any]:
    """mbridge leaves out group-limited routing."""
    grouped = (hf.n_group or 1) > 1
    return {
        "moe_router_num_groups": hf.n_group if grouped else None,
        "moe_router_group_topk": hf.topk_group if grouped else None,
    }


def _glm_settings(hf: HfConfig) -> dict[str, Any]:
    """mbridge takes one shared expert and biased projections for granted, and has an auxiliary
    loss. The multi-token-prediction layer is not trained."""
    return {
        **_group_settings(hf),
        "add_qkv_bias": hf.attention_bias,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "mtp_num_layers": None,
    }


def _deepseek_settings(hf: HfConfig) -> dict[str, Any]:
    """mbridge reads RoPE scaling from a place that
    transformers 5 does not use, so that YaRN is lost. The multi-token-prediction layer is not
    trained."""
    rope = hf.rope_parameters
    settings = {
        **_group_settings(hf),
        "mtp_num_layers": None,
        # head_dim in the HF config is the rotary part alone; see _LatentDotProductAttention.
        "kv_channels": hf.v_head_dim,
        "rope_type": "rope",
        # Only YaRN scales the softmax; another value would scale it with plain RoPE too.
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
    """Makes the bridge from the HF config and the weights' dtype."""
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
"""Bridges by model_type, for the trained families of pipeline/model/families.py."""
