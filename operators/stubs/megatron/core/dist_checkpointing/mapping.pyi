from dataclasses import dataclass
from typing import Any

import torch

@dataclass
class ShardedBase:
    key: str
    data: Any
    replica_id: tuple[int, int, int]

@dataclass
class ShardedTensor(ShardedBase):
    data: torch.Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    prepend_axis_num: int
    allow_shape_mismatch: bool

@dataclass
class ShardedTensorFactory(ShardedBase):
    data: torch.Tensor
    def build(self) -> dict[str, Any]: ...
