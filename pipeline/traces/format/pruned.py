"""The marker of a sealed step whose samples and routes were removed to free space."""

from pipeline.run import keys
from pipeline.store import Store
from pipeline.traces.format.types import TraceError


def is_pruned(store: Store, step: int) -> bool:
    """Return whether a step's samples and routes were removed, or are being removed."""
    return store.size(keys.pruned(step)) is not None


def refuse_pruned(store: Store, step: int) -> None:
    """Raise TraceError if a step's samples and routes were removed, or are being removed."""
    if is_pruned(store, step):
        raise TraceError(
            f"step {step} of {store.uri}: its samples and routes were removed "
            f"({keys.pruned(step)}); only its manifest and metrics remain"
        )
