from collections.abc import Callable
from typing import ClassVar

from mbridge.core.bridge import Bridge
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch.nn import Module

class LLMBridge(Bridge):
    TransformerConfigClass: ClassVar[Callable[..., TransformerConfig]]
    has_vp_stage: bool
    def _get_transformer_layer_spec(
        self, vp_stage: int | None = ...
    ) -> TransformerBlockSubmodules: ...
    def _model_provider(
        self, post_model_creation_callbacks: list[Callable[[Module], None]]
    ) -> Callable[..., GPTModel]: ...
