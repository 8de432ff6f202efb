import torch

class _ParamAndGradBuffer:
    grad_data: torch.Tensor
