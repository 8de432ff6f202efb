from typing import Any

from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str,
    sharded_strategy: FullyParallelSaveStrategyWrapper,
    *,
    validate_access_integrity: bool,
) -> None: ...
def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str,
    sharded_strategy: TorchDistLoadShardedStrategy,
) -> dict[str, Any]: ...
def load_common_state_dict(checkpoint_dir: str) -> dict[str, Any]: ...
