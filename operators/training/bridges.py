"""Which HF models can be trained, and mbridge 0.15.1's bridges to them, corrected.

A bridge turns an HF config into Megatron's TransformerConfig and HF weights into Megatron's and
back. The corrections are of two kinds: class attributes and methods where mbridge's names or code
are wrong, and `_..._settings`, fields of TransformerConfig that mbridge fixes or leaves out. Each
says its reason. Whatever a bridge would ignore in silence is refused by `problems_of`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.mixtral import MixtralBridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen2moe import Qwen2MoEBridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.transformer import MLATransformerConfig

from operators.training.cpu_megatron import ON_CPU
from operators.training.local_layers import local_block_spec

HfConfig = Any
"""A transformers config."""


class _Corrected:
    """Corrections that every family needs; stands before mbridge's class."""

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        if not ON_CPU:
            return super()._get_transformer_layer_spec(vp_stage)
        self.has_vp_stage = True
        return local_block_spec(self.config, vp_stage)

    def _adjust_mapping_for_shared_weights(self) -> None:
        """At PP > 1 the last stage has its own copy of tied embeddings, which has no name of its
        own in the file. mbridge knows this for dense Qwen only, and there it writes into the class,
        so that a later untied model of the process is taken for tied."""
        if self.hf_config.tie_word_embeddings:
            embeddings = "model.embed_tokens.weight"
            self._DIRECT_MAPPING = {**self._DIRECT_MAPPING, "output_layer.weight": embeddings}

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        """DeepSeek's reader in mbridge converts FP8 on a GPU and refuses float32; FP8 checkpoints
        are refused by problems_of, and everything else is read like any model."""
        return SafeTensorIO(weights_path)


class _Qwen2(_Corrected, Qwen2Bridge):
    pass


class _Qwen3(_Corrected, Qwen3Bridge):
    pass


class _Llama(_Corrected, LLaMABridge):
    pass


_DENSE_LAYER = Qwen2Bridge._MLP_MAPPING
"""mbridge's Qwen MoE bridges know no dense layers (mlp_only_layers, decoder_sparse_step)."""


class _Qwen2Moe(_Corrected, Qwen2MoEBridge):
    _MLP_MAPPING: ClassVar = {**Qwen2MoEBridge._MLP_MAPPING, **_DENSE_LAYER}


class _Qwen3Moe(_Corrected, Qwen3MoEBridge):
    _MLP_MAPPING: ClassVar = {**Qwen3MoEBridge._MLP_MAPPING, **_DENSE_LAYER}


class _Mixtral(_Corrected, MixtralBridge):
    pass


def _mla_config(max_position_embeddings: int, **fields: Any) -> MLATransformerConfig:
    """Megatron-core has renamed max_position_embeddings; _deepseek_settings gives the new field."""
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


def _no_settings(hf: HfConfig) -> dict[str, Any]:
    return {}


def _qwen_moe_settings(hf: HfConfig) -> dict[str, Any]:
    """mbridge fixes for each Qwen family whether the chosen weights are normalised, and takes every
    layer for a MoE layer."""
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
    """mbridge maps the shared expert's gate but does not ask Megatron for it."""
    return {**_qwen_moe_settings(hf), "moe_shared_expert_gate": True}


def _mixtral_settings(hf: HfConfig) -> dict[str, Any]:
    """Mixtral normalises the chosen weights; mbridge says it does not."""
    return {"moe_router_pre_softmax": False}


def _deepseek_settings(hf: HfConfig) -> dict[str, Any]:
    """mbridge leaves out group-limited routing, and looks for RoPE scaling where transformers 5
    keeps none, so that YaRN is dropped. The multi-token-prediction layer is not trained."""
    grouped = (hf.n_group or 1) > 1
    rope = hf.rope_parameters
    settings = {
        "moe_router_num_groups": hf.n_group if grouped else None,
        "moe_router_group_topk": hf.topk_group if grouped else None,
        "mtp_num_layers": None,
        # head_dim of the HF config is the rotary part alone; see _LatentDotProductAttention.
        "kv_channels": hf.v_head_dim,
        "rope_type": "rope",
        # mscale is YaRN's; without it plain RoPE would scale the softmax.
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
class Family:
    """How one model_type is trained."""

    bridge: Callable[..., Any]
    settings: Callable[[HfConfig], dict[str, Any]] = _no_settings
    rope_types: tuple[str, ...] = ("default",)
    """What mbridge passes on to Megatron."""


FAMILIES = {
    "deepseek_v3": Family(_DeepseekV3, _deepseek_settings, ("default", "yarn")),
    "llama": Family(_Llama),
    "mixtral": Family(_Mixtral, _mixtral_settings),
    "qwen2": Family(_Qwen2),
    "qwen2_moe": Family(_Qwen2Moe, _qwen2_moe_settings),
    "qwen3": Family(_Qwen3),
    "qwen3_moe": Family(_Qwen3Moe, _qwen_moe_settings),
}
"""By the HF config's model_type."""


def problems_of(hf: HfConfig) -> list[str]:
    """What of a model of a known family would be lost on the way to Megatron; [] if nothing."""
    problems = []
    if getattr(hf, "quantization_config", None):
        problems.append("quantization_config is set; convert the weights to bfloat16 first")
    rope = hf.rope_parameters or {}
    known = FAMILIES[hf.model_type].rope_types
    if rope.get("rope_type", "default") not in known:
        problems.append(f"rope_type {rope['rope_type']!r}; supported: {', '.join(known)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append("partial_rotary_factor; supported: 1.0")
    if getattr(hf, "sliding_window", None):
        problems.append(f"sliding_window {hf.sliding_window}; supported: null")
    if hf.hidden_act != "silu":
        problems.append(f"hidden_act {hf.hidden_act!r}; supported: silu")
    if hf.model_type == "deepseek_v3":
        problems += _deepseek_problems(hf)
    return problems


def _deepseek_problems(hf: HfConfig) -> list[str]:
    problems = []
    if not hf.norm_topk_prob and hf.num_experts_per_tok > 1:
        problems.append("norm_topk_prob false; Megatron always normalises sigmoid scores")
    if (hf.n_group or 1) > 1 and hf.num_experts_per_tok // hf.topk_group != 2:
        problems.append(
            f"num_experts_per_tok {hf.num_experts_per_tok} // topk_group {hf.topk_group} is not 2: "
            "HF ranks groups by their best 2 experts, Megatron by that many"
        )
    if not hf.rope_interleave:
        problems.append("rope_interleave false; Megatron's latent attention interleaves")
    return problems
