from collections.abc import Callable

from torch import Tensor

# Declared as a variable, because the CPU adapter replaces this function.
get_default_causal_mask: Callable[[int], Tensor]
