import numpy as np
import numpy.typing as npt
import torch

class InputBatch:
    generators: dict[int, torch.Generator]
    num_computed_tokens_cpu: npt.NDArray[np.int32]
    @property
    def req_ids(self) -> list[str]: ...
    @property
    def num_reqs(self) -> int: ...
