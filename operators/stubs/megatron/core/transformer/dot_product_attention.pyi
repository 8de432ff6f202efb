from torch.nn import Module

class DotProductAttention(Module):
    hidden_size_per_attention_head: int
    def __init__(self, *args: object, **kwargs: object) -> None: ...
