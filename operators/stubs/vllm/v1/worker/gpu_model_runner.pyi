import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.worker.gpu_input_batch import InputBatch

class CpuGpuBuffer:
    np: npt.NDArray[np.int32]

class GPUModelRunner:
    model: torch.nn.Module
    input_batch: InputBatch
    query_start_loc: CpuGpuBuffer
    discard_request_mask: CpuGpuBuffer
