"""What the flow knows of a run: its checked inputs, and the run itself."""

from dataclasses import dataclass
from typing import Any

from pipeline.config.tree import RunConfig
from pipeline.flows.model import ModelFolder
from pipeline.flows.prompts import PromptTable
from pipeline.store import Store
from pipeline.traces import Geometry


@dataclass(frozen=True)
class Inputs:
    """Everything that a run is made from, checked; nothing of it is in the store yet."""

    config: RunConfig
    store: Store
    """The run's own store: <store.uri>/<experiment_name>."""
    prompts: PromptTable
    val_prompts: PromptTable | None
    """None: no validation."""
    reward: bytes | None
    """The reward file; None: samples come from a replay_file, with their rewards."""
    model: ModelFolder
    geometry: Geometry | None
    """None: a dense model."""
    notes: tuple[str, ...]
    """What the user should be told, though it is no error."""

    @property
    def prompt_count(self) -> int:
        """Rows of the prompt table."""
        return int(self.prompts.table.num_rows)

    @property
    def val_prompt_count(self) -> int:
        """Rows of the validation table; 0 without one."""
        return 0 if self.val_prompts is None else int(self.val_prompts.table.num_rows)


@dataclass(frozen=True)
class Run:
    """A run in the store. Example: Run('quickstart', 'file:///.../quickstart', ...)."""

    name: str
    uri: str
    """The run's own root."""
    store: Store
    body: dict[str, Any]
    """run.json."""
    geometry: Geometry | None
    """None: a dense model."""
    prompt_count: int
    """Rows of the staged prompt table."""
    val_prompt_count: int
    """Rows of the staged validation table; 0 without one."""
    notes: tuple[str, ...]
    """What the user should be told, though it is no error."""
