"""Megatron's own layers instead of Transformer Engine's, and the names that mbridge expects.

Only models on CPU use these layers and need their parameters renamed. With CUDA, models have
Transformer Engine's layers, which mbridge expects.
"""

import re

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from operators.cpu.attention import GatheringDotProductAttention


class _LatentDotProductAttention(GatheringDotProductAttention):
    """Core attention that accepts the widths of keys and values from multi-latent attention.

    Local core attention does not accept these widths as arguments; it takes them from its inputs.
    The width of the output is TransformerConfig.kv_channels, which must equal the width of the
    values in each head. (Megatron builds core attention twice, the first time without the widths.)
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: object,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        if v_channels not in (None, self.hidden_size_per_attention_head):
            raise ValueError(
                f"kv_channels is {self.hidden_size_per_attention_head}; local multi-latent "
                f"attention requires the width of a value head, {v_channels}"
            )


def local_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the decoder layers of this pipeline stage, without Transformer Engine."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    latent = config.multi_latent_attention
    attention = _LatentDotProductAttention if latent else GatheringDotProductAttention
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = attention
    return spec


_LOCAL_NAMES = (
    (r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r"experts.\2.weight\1"),
    (r"self_attention\.q_layernorm\.weight$", "self_attention.linear_q_up_proj.layer_norm_weight"),
    (
        r"self_attention\.kv_layernorm\.weight$",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
)
"""Names in the local layers, and the names in Transformer Engine's layers, which mbridge uses."""
_STANDARD_ATTENTION = r"(\.layers\.\d+\.)input_layernorm\.weight$"
_LATENT = "linear_kv_up_proj"


def bridge_names(names: list[str]) -> dict[str, str]:
    """Map the names in the local layers to mbridge's names.

    Transformer Engine fuses two norms, each into the linear layer that follows it: the input norm
    of standard attention, and the norm before a dense MLP (not before experts). Latent attention
    keeps the input norm separate; its fused norms are the q and kv norms.
    """
    latent = any(_LATENT in name for name in names)
    dense = {name.split(".mlp.")[0] for name in names if ".mlp.linear_fc1.weight" in name}
    renamed = {}
    for name in names:
        new = name
        if latent:
            for pattern, replacement in _LOCAL_NAMES:
                new = re.sub(pattern, replacement, new)
        else:
            new = re.sub(*_LOCAL_NAMES[0], new)
            new = re.sub(_STANDARD_ATTENTION, r"\1self_attention.linear_qkv.layer_norm_weight", new)
        layer, _, rest = new.partition(".pre_mlp_layernorm.")
        if rest and layer in dense:
            new = f"{layer}.mlp.linear_fc1.layer_norm_weight"
        renamed[name] = new
    return renamed
