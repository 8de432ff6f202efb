"""Megatron's own layers in place of Transformer Engine's, and the names that mbridge expects.

Used on CPU only; with CUDA, models have Transformer Engine's layers, as mbridge expects.
"""

import re
from collections.abc import Collection, Iterator

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from operators.training.megatron.cpu_megatron import ON_CPU
from operators.training.megatron.local_attention import GatheringDotProductAttention


class _LatentDotProductAttention(GatheringDotProductAttention):
    """Accepts the widths of keys and values that multi-latent attention passes to core attention.

    Local core attention has no such arguments. It takes both widths from its inputs, except for the
    width of its output, TransformerConfig.kv_channels, which must be the width of a value head.
    (Megatron builds core attention twice, the first time without the widths.)
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
                f"attention needs the width of a value head, {v_channels}"
            )


def local_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The decoder's layers of this pipeline stage, without Transformer Engine."""
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
"""Names in the local layers -> names in Transformer Engine's, which mbridge expects."""
_STANDARD_ATTENTION = r"(\.layers\.\d+\.)input_layernorm\.weight$"
_LATENT = "linear_kv_up_proj"


class NamedForBridge:
    """A model chunk under the parameter names that mbridge expects.

    mbridge splits, gathers and renames by these names only, so its tensor- and expert-parallel code
    works unchanged on local layers. The state dict is kept: mbridge reads it once per weight, which
    would otherwise be quadratic, on a GPU too.
    """

    def __init__(self, model: GPTModel, left_out: Collection[str] = ()) -> None:
        """`left_out` are parameters that the bridge does not see."""
        self.decoder = model.decoder
        self._model = model
        state = {
            name: tensor
            for name, tensor in model.state_dict().items()
            if "_extra_state" not in name and name not in left_out
        }
        self._names = bridge_names(list(state)) if ON_CPU else {name: name for name in state}
        self._state = {self._names[name]: tensor for name, tensor in state.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by mbridge's names; they share memory with the model."""
        return self._state

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters by mbridge's names."""
        return (
            (self._names[name], parameter)
            for name, parameter in self._model.named_parameters()
            if name in self._names
        )


def bridge_names(names: list[str]) -> dict[str, str]:
    """Map names in the local layers to mbridge's.

    Transformer Engine fuses a norm into the linear layer after it: the input norm of standard
    attention (latent attention keeps it separate and has qk_norms instead), and the norm before a
    dense MLP (not before experts).
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
