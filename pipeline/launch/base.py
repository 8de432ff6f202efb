"""What the flow needs of a launcher, whatever the workers run on."""

from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import LastingError


class LaunchError(Exception):
    """Workers cannot be started or watched; the message gives the reason and the fix."""


class StageFailedError(LaunchError):
    """Workers of a stage ended too often; the message names the worker and ends with its log."""


class StageLastingError(StageFailedError, LastingError):
    """A worker met what a restart would meet again, so none was tried."""


@dataclass(frozen=True)
class Stage:
    """Workers that are started together and restarted one by one.

    A training gang is one command (torchrun starts the ranks): a lost rank restarts the gang.
    Example: Stage('rollout', (('python', '-m', 'operators.rollout', ...),), 3, {}).
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    """One command per worker."""
    max_restarts: int
    """Of the stage as a whole."""
    environment: dict[str, str]
    """Added to the launcher's own."""


class Workers(Protocol):
    """Running workers."""

    def check(self) -> bool:
        """Restart what ended with an error; StageFailedError when that happened too often.

        Called often and from several threads. Returns whether a worker is still queued for a place
        to run: that time does not count.
        """

    def stop(self, grace_s: float) -> None:
        """Give the workers time to end by themselves, then kill what is left.

        From now on `check` fails, so that no thread waits for workers that are gone.
        """

    def detach(self) -> bool:
        """The flow is being ended from outside. Returns whether the workers go on without it, so
        that another flow can attach to them; if not, stop them. From now on `check` fails.
        """


class Screen(Protocol):
    """Shows people what a run is doing. Safe to use from several threads."""

    def phase(self, who: str, what: str | None) -> None:
        """Show what a part of the run is doing now; None: it has finished."""

    def step(self, step: int, total: int) -> None:
        """Show that a step of `total` begins."""

    def line(self, text: str) -> None:
        """Show that something happened."""
