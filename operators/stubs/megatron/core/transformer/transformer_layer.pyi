from torch.nn import Module

class TransformerLayer(Module):
    layer_number: int
    mlp: Module
