"""Whether places take what a run writes: at all, and as much as its next steps make."""

import pyarrow.compute as pc
from rich.filesize import decimal

from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.model_folder import ModelFolder
from pipeline.inputs.prompts import PromptTable
from pipeline.inputs.writes import Writes, estimate, needed_bytes
from pipeline.model.geometry import Geometry
from pipeline.run.restarts import finished_steps
from pipeline.store import StoreError, open_store, shown_uri
from pipeline.store.schemes import free_bytes


def probe(key: str, place: str) -> None:
    """Raise InputError unless objects can be created at a place; leaves nothing behind."""
    try:
        open_store(place).probe()
    except StoreError as error:
        # The system's own errors have no fix; the store's have.
        fix = "; choose another place" if isinstance(error.__cause__, OSError) else ""
        raise InputError(
            [f"{key}: found {shown_uri(place)}, which cannot be written: {error}{fix}"]
        ) from error


def writes_of(
    config: RunConfig, model: ModelFolder, geometry: Geometry | None, prompts: PromptTable
) -> Writes | None:
    """How much a run writes; None if its model is not here and does not say how large it is."""
    if model.parameters is None:
        return None
    tokens = pc.mean(pc.list_value_length(prompts.table["token_ids"])).as_py()
    return estimate(config, geometry, model.parameters, tokens)


def space_problems(inputs: CheckedInputs) -> list[str]:
    """A store on a disk that has no room for the next two steps; nothing for other stores."""
    uri, writes = inputs.config.store.uri, inputs.writes
    free = free_bytes(uri)
    if writes is None or free is None:
        return []
    finished = finished_steps(inputs.store)
    needed = needed_bytes(writes, finished, inputs.config.trainer.total_training_steps)
    if needed <= free:
        return []
    return [
        f"store.uri: {shown_uri(uri)} has {free:,} bytes free ({decimal(free)}), but the next "
        f"steps, two at most, need {needed:,} ({decimal(needed)}): {decimal(writes.step)} a step, "
        f"{decimal(writes.checkpoint)} a checkpoint; free some space, or choose another place"
    ]
