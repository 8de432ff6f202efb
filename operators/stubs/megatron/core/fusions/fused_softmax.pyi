from collections.abc import Callable

from torch import Tensor

# A variable, because the CPU adapter replaces it.
get_default_causal_mask: Callable[[int], Tensor]
