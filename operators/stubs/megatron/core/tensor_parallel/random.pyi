from collections.abc import Callable

from torch import Tensor

# Declared as variables, because the CPU adapter replaces these functions.
_get_cuda_rng_state: Callable[..., Tensor]
_set_cuda_rng_state: Callable[..., None]

def initialize_rng_tracker(*, inference_rng_tracker: bool, force_reset: bool) -> None: ...
