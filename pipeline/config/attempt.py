"""Operational settings of one start of a run: what attempts/NNN.json says to the workers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Attempt:
    """Operational settings of one start. Example: Attempt(number=0, rollout_workers=1, ...)."""

    number: int
    rollout_workers: int
    rollout_shards: int
    """Shards of a step that is planned in this attempt."""
    training_ranks: int
    total_training_steps: int
    save_freq: int
    validations: tuple[int, ...]
    """Policy versions to validate, ascending."""
    start_timeout_s: float
    step_timeout_s: float
    gpu_memory_utilization: float
    cpu_kv_cache_gib: int
    trace_buffer_mib: int

    def body(self) -> dict[str, Any]:
        """As the commit object holds it."""
        return {**asdict(self), "validations": list(self.validations)}

    @classmethod
    def of_body(cls, body: Mapping[str, Any]) -> "Attempt":
        """From the commit object; keys that are not known are ignored."""
        known = {name: body[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "validations": tuple(body["validations"])})
