"""The findings of the doctor's checks, and the requirements that the checks use."""

from dataclasses import dataclass
from enum import Enum

from pipeline.config.tree import RunConfig
from pipeline.device import Device
from pipeline.store.schemes import DEFAULT_STORE


class State(Enum):
    """The result of a check. The line about a finding begins with the value."""

    OK = "ok"
    ABSENT = "-"
    """Not installed, and not known to be required."""
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the report. Example: Finding('torch', State.OK, '2.13.0+cpu')."""

    name: str
    state: State
    text: str
    """What was found; for State.BROKEN, the text ends with the fix."""

    def __str__(self) -> str:
        return f"{self.state.value:<7} {self.name:<19} {self.text}"


@dataclass(frozen=True)
class Needs:
    """The requirements of a run. Without settings, defaults apply and no engine is required."""

    config: RunConfig | None = None
    store_uri: str = DEFAULT_STORE
    device: Device = "cpu"
    missing: tuple[str, ...] = ()
    """What this machine lacks for the run: GPUs, memory, packages, disk space."""

    @property
    def rollout(self) -> bool:
        """Return whether the run has rollout workers."""
        if self.config is None:
            return False
        return self.config.actor_rollout_ref.actor.router_replay.replay_file is None

    @property
    def training(self) -> bool:
        """Return whether the run has training ranks."""
        return self.config is not None


def ok(name: str, text: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(name, State.OK, text)


def broken(name: str, text: str) -> Finding:
    """Return the finding of a check that failed; `text` ends with the fix."""
    return Finding(name, State.BROKEN, text)


def absent(name: str, text: str, needed: bool) -> Finding:
    """Return the finding about a package that is not installed.

    Args:
        name: The package or check.
        text: What was found, and the fix.
        needed: Whether the run needs the package. If not, the finding is ABSENT, not BROKEN.
    """
    return Finding(name, State.BROKEN if needed else State.ABSENT, text)
