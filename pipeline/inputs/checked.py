"""Checked inputs of a run, before anything is staged."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.tree import RunConfig
from pipeline.inputs.model_folder import ModelFolder
from pipeline.inputs.prompts import PromptTable
from pipeline.inputs.writes import Writes
from pipeline.store import Store
from pipeline.traces import Geometry


@dataclass(frozen=True)
class CheckedInputs:
    """Everything that a run is made from, checked; nothing is staged yet."""

    config: RunConfig
    store: Store
    """The run's own store: <store.uri>/<experiment_name>."""
    prompts: PromptTable
    val_prompts: PromptTable | None
    """None: no validation."""
    reward: bytes | None
    """The reward file; None: the built-in scorers, or a replay_file, whose samples have rewards."""
    functions: Mapping[str, bytes]
    """Files of users' estimators and losses, by the setting that names the function."""
    model: ModelFolder
    geometry: Geometry | None
    """None: a dense model."""
    writes: Writes | None
    """None: the model is not here, and does not say how large it is."""
    notes: tuple[str, ...]
    """Notes for the user: worth knowing, but not errors."""

    @property
    def prompt_count(self) -> int:
        """Rows of the prompt table."""
        return int(self.prompts.table.num_rows)

    @property
    def val_prompt_count(self) -> int:
        """Rows of the validation table; 0 without one."""
        return 0 if self.val_prompts is None else int(self.val_prompts.table.num_rows)
