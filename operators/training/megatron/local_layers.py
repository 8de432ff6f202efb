"""Megatron's own layers in place of Transformer Engine's, and the names that mbridge expects.

Used on CPU only; with CUDA, models have Transformer Engine's layers, as mbridge expects.
"""

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from operators.training.megatron.cpu_megatron import ON_CPU

_PADDING = 1.25
"""How much longer sequences that are computed together may be with padding than without."""


class PackedDotProductAttention(DotProductAttention):
    """Megatron's local core attention, made to know sequences that are packed into one row.

    Sequences of similar lengths are computed together, padded on the right, which causal attention
    does not see. Transformer Engine's attention has a kernel for packed sequences.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: object,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Attend within each sequence: [T, heads, width] -> [T, 1, heads * width]."""
        if packed_seq_params is None:
            unpacked: torch.Tensor = super().forward(query, key, value, *args, **kwargs)
            return unpacked
        places, attended = [], []
        for places_NB, real_NB in _alike(packed_seq_params.cu_seqlens_q.numpy()):
            padded = (x[places_NB] for x in (query, key, value))
            attended_NBX = super().forward(*padded, *args, **kwargs)
            places.append(places_NB[real_NB])
            attended.append(attended_NBX[real_NB])
        order_T = torch.cat(places).argsort()
        return torch.cat(attended)[order_T, None]


def _alike(ends: npt.NDArray[np.int32]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Groups of sequences of similar lengths, longest first.

    Of each group: the positions of its B sequences in the row, padded to the longest's N, [N, B],
    and which of them are real. `ends` is that of MicroBatch.
    """
    starts_S, lengths_S = ends[:-1], np.diff(ends)
    left = np.argsort(-lengths_S, kind="stable")
    while len(left):
        tokens = np.cumsum(lengths_S[left])
        padded = lengths_S[left[0]] * np.arange(1, len(left) + 1)
        count = int((padded <= _PADDING * tokens).cumprod().sum())
        group, left = left[:count], left[count:]
        offsets_N1 = np.arange(lengths_S[group[0]])[:, None]
        real_NB = offsets_N1 < lengths_S[group]
        places_NB = starts_S[group] + np.minimum(offsets_N1, lengths_S[group] - 1)
        yield torch.from_numpy(places_NB), torch.from_numpy(real_NB)


class _LatentDotProductAttention(PackedDotProductAttention):
    """Accepts the widths of keys and values that multi-latent attention passes to core attention.

    Local core attention has no such arguments. It takes both widths from its inputs, except for the
    width of its output, TransformerConfig.kv_channels, which must be the width of a value head.
    (Megatron builds core attention twice, the first time without the widths.)
    """

    def __init__(
        self,
        *args: object,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
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
    attention = _LatentDotProductAttention if latent else PackedDotProductAttention
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

    def __init__(self, model: GPTModel) -> None:
        self.decoder = model.decoder
        self._model = model
        state = {name: t for name, t in model.state_dict().items() if "_extra_state" not in name}
        self._names = bridge_names(list(state)) if ON_CPU else {name: name for name in state}
        self._state = {self._names[name]: tensor for name, tensor in state.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by mbridge's names; they share memory with the model."""
        return self._state

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters by mbridge's names."""
        return ((self._names[name], p) for name, p in self._model.named_parameters())


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
