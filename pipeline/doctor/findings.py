"""What a check of the machine found, and what the checks are asked for."""

from dataclasses import dataclass
from enum import Enum

from pipeline.config.tree import RunConfig
from pipeline.device import Device
from pipeline.store.schemes import DEFAULT_STORE


class State(Enum):
    """How a check ended; the value is what the line begins with."""

    OK = "ok"
    ABSENT = "-"
    """Not installed, and no settings say that it is needed."""
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the report. Example: Finding('torch', State.OK, '2.13.0+cpu')."""

    name: str
    state: State
    text: str
    """What was found; where it is broken, with what to do."""

    def __str__(self) -> str:
        return f"{self.state.value:<7} {self.name:<19} {self.text}"


@dataclass(frozen=True)
class Needs:
    """What a run's settings ask for; without settings the defaults, and no engine for certain."""

    config: RunConfig | None = None
    store_uri: str = DEFAULT_STORE
    device: Device = "cpu"

    @property
    def rollout(self) -> bool:
        """Whether rollout workers run."""
        if self.config is None:
            return False
        return self.config.actor_rollout_ref.actor.router_replay.replay_file is None

    @property
    def training(self) -> bool:
        """Whether training ranks run."""
        return self.config is not None


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name, State.OK, text)


def broken(name: str, text: str) -> Finding:
    """Something does not work; `text` ends with the fix."""
    return Finding(name, State.BROKEN, text)


def absent(name: str, text: str, needed: bool) -> Finding:
    """Something is not installed: broken only if it is needed."""
    return Finding(name, State.BROKEN if needed else State.ABSENT, text)
