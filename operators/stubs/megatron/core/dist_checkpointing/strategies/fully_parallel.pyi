from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed import ProcessGroup

class FullyParallelSaveStrategyWrapper:
    def __init__(
        self, strategy: TorchDistSaveShardedStrategy, parallelization_group: ProcessGroup
    ) -> None: ...
