"""The interface between the flow and the launchers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import LastingError
from pipeline.run.restarts import repeated_text
from pipeline.store import StoreError, open_store


class LaunchError(Exception):
    """Workers cannot be started or watched; the message gives the reason and the fix."""


class StageFailedError(LaunchError):
    """Workers of a stage failed too often; the message names one worker and quotes its log."""


class StageLastingError(StageFailedError, LastingError):
    """A worker was not restarted, because its error would recur after a restart."""


@dataclass(frozen=True)
class Stage:
    """Workers that the launcher starts together and restarts one by one.

    A training gang is one command (torchrun starts the ranks), so the gang is restarted if any rank
    is lost. Example: Stage('rollout', (('python', '-m', 'operators.rollout', ...),), 3, {}).
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    """One command per worker."""
    max_restarts: int
    """Maximum number of restarts, counted over all workers of the stage."""
    environment: dict[str, str]
    """Variables added to the launcher's environment."""
    repeats: Callable[[], str | None] = lambda: None
    """Returns a text for users about the work that a restarted worker repeats, or None."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES for each worker. If empty, workers inherit the launcher's value."""


def repeats_of(run_uri: str) -> str | None:
    """Return a text for users about the steps that a restarted trainer repeats, or None.

    A StoreError becomes part of the text, because it must not prevent the restart of workers.
    """
    try:
        return repeated_text(open_store(run_uri))
    except StoreError as error:
        return f"the steps that are trained again are unknown: {error}"


class Workers(Protocol):
    """Running workers."""

    def check(self) -> bool:
        """Restart workers that ended with an error; raise StageFailedError after too many restarts.

        Several threads call this method often and concurrently. Return whether a worker is still
        queued; the caller does not count the time in the queue towards its time limits.
        """

    def stop(self, grace_s: float) -> None:
        """Wait `grace_s` seconds for the workers to end, then kill those still running.

        Later calls of `check` fail, so that no thread waits for workers that no longer exist.
        """

    def detach(self) -> bool:
        """Return whether the workers continue without this flow, which is being ended.

        If they continue, another flow can attach to them; if not, the caller must stop them. Later
        calls of `check` fail.
        """


class Screen(Protocol):
    """A display of the run's progress. Safe to use from several threads."""

    def phase(self, who: str, what: str | None) -> None:
        """Show the activity of a part of the run.

        `who` names the part. `what` is its activity; None if the part has finished.
        """

    def step(self, step: int, total: int) -> None:
        """Show that the step numbered `step` begins; the run has `total` steps."""

    def line(self, text: str) -> None:
        """Show a line about an event."""
