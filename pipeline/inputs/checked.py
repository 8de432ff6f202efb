"""The checked inputs of a run, before anything is staged."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.tree import RunConfig
from pipeline.inputs.model_folder import ModelFolder
from pipeline.inputs.prompts.token_table import PromptTable
from pipeline.inputs.writes import Writes
from pipeline.store import Store
from pipeline.traces import Geometry


@dataclass(frozen=True)
class CheckedInputs:
    """All inputs of a run, checked but not yet staged."""

    config: RunConfig
    store: Store
    """The run's own store: <store.uri>/<experiment_name>."""
    prompts: PromptTable
    val_prompts: PromptTable | None
    """None if the run does not validate."""
    reward: bytes | None
    """The content to stage for the reward file (see pipeline.scoring.code); None with built-in
    scorers, or with a replay_file, whose samples already have rewards."""
    functions: Mapping[str, bytes]
    """The contents of the files with users' estimators and losses, keyed by the setting that names
    the function."""
    model: ModelFolder
    geometry: Geometry | None
    """None for a dense model."""
    writes: Writes | None
    """The estimated number of bytes that the run writes; None if the model is not on this machine
    and no index gives its size."""
    notes: tuple[str, ...]
    """Notes for the user that are not errors."""

    @property
    def prompt_count(self) -> int:
        """Number of rows in the prompt table."""
        return self.prompts.rows

    @property
    def val_prompt_count(self) -> int:
        """Number of rows in the validation table; 0 if there is none."""
        return 0 if self.val_prompts is None else self.val_prompts.rows
