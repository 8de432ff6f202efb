import torch
from torch.distributed import ProcessGroup

def copy_to_tensor_model_parallel_region(
    input_: torch.Tensor, group: ProcessGroup | None = None
) -> torch.Tensor: ...
def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    tensor_parallel_output_grad: bool = True,
    group: ProcessGroup | None = None,
) -> torch.Tensor: ...
