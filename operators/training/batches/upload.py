"""Copies arrays from the CPU to the device on which a rank computes."""

from typing import Any

import numpy.typing as npt
import torch


def uploaded(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device; on CUDA, without waiting for the work that is queued there.

    Only a copy from pinned memory does not wait. torch reuses pinned memory, so pinning is cheap.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
