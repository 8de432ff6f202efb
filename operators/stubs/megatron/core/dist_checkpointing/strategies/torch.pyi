from pathlib import Path
from typing import Any

class TorchDistSaveShardedStrategy:
    def __init__(
        self, backend: str, version: int, *, thread_count: int, separation_hint: str
    ) -> None: ...

class TorchDistLoadShardedStrategy:
    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> dict[str, Any]: ...
