"""What the flow needs of a launcher, whatever the workers run on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import LastingError
from pipeline.run.restarts import repeated_text
from pipeline.store import StoreError, open_store


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
    repeats: Callable[[], str | None] = lambda: None
    """What a restarted worker does again before it goes on, for people; None: nothing."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each worker; empty: no GPUs, and the variable is left as it is."""


def repeats_of(run_uri: str) -> str | None:
    """What a trainer of a run does again when it is started again, for people; None: nothing.

    A store that does not answer is said too: it must not keep workers from being restarted.
    """
    try:
        return repeated_text(open_store(run_uri))
    except StoreError as error:
        return f"which steps are trained again is not known: {error}"


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
