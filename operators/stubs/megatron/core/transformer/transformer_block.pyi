from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import Module

class TransformerBlockSubmodules:
    layer_specs: list[ModuleSpec]

class TransformerBlock(Module):
    layers: list[TransformerLayer]  # a ModuleList
