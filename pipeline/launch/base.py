"""What the flow needs of a launcher, whatever the workers run on."""

from dataclasses import dataclass
from typing import Protocol


class StageFailedError(Exception):
    """Workers of a stage ended too often; the text says which, how, and shows the log's end."""


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
    """Running stages. They end when the launcher does."""

    def check(self) -> None:
        """Restart workers that ended with an error; StageFailedError when too many did."""

    def stop(self, grace_s: float) -> None:
        """Give the workers time to end by themselves, then kill what is left."""
