from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.logprobs import FlatLogprobs

class WeightVersionSpan:
    version: str
    start: int
    end: int

class CompletionOutput:
    token_ids: list[int]
    # The type if flat_logprobs=True, which the rollout engine sets.
    logprobs: FlatLogprobs | None
    routed_experts: npt.NDArray[np.integer[Any]] | None
    finish_reason: str | None
    weight_versions: list[WeightVersionSpan] | None

class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
