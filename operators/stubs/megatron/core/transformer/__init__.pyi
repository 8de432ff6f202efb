from megatron.core.transformer.transformer_config import (
    MLATransformerConfig as MLATransformerConfig,
)
from megatron.core.transformer.transformer_config import TransformerConfig as TransformerConfig
