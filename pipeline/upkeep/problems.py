"""Findings of a check of stored objects: a list, so that one bad object does not hide the next."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from pipeline.errors import LastingError
from pipeline.run.commit import CorruptObjectError, DataFile
from pipeline.run.weights import WeightsFile
from pipeline.store import StoreError

_UNFORESEEN = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    pa.ArrowException,
)
"""What Python, Arrow and others raise when they are given what is none of theirs."""


@dataclass(frozen=True)
class Problem:
    """Something wrong. Example: Problem('steps/000000/manifest.json', None, 'not JSON: ...')."""

    key: str
    """Key of the object."""
    sample: str | None
    text: str

    def __str__(self) -> str:
        """The problem as one line: 'steps/000000/plan.json: not JSON: ...'."""
        named = self.sample is None or self.sample in self.text
        return f"{self.key}: {self.text}" if named else f"{self.key}: {self.sample}: {self.text}"


@dataclass
class Report:
    """What a check has covered and found in the store at `uri`."""

    uri: str
    steps: int = 0
    """Sealed steps."""
    pruned: int = 0
    """Sealed steps whose samples and routes were removed; their other objects are checked."""
    samples: int = 0
    """Samples of the sealed steps."""
    inputs: int = 0
    """Staged files that run.json and amendments name."""
    policies: int = 0
    checkpoints: int = 0
    validations: int = 0
    """Committed shards of validations."""
    seen: dict[str, DataFile] = field(default_factory=dict)
    """The data files that were read in full, by key."""
    weights: dict[str, WeightsFile] = field(default_factory=dict)
    """Those of them that hold a policy's weights."""
    problems: list[Problem] = field(default_factory=list)
    _added: set[Problem] = field(default_factory=set)
    notes: list[Problem] = field(default_factory=list)
    """What could not be checked, or is odd but not wrong."""

    @property
    def files(self) -> int:
        """The number of data files that were read in full."""
        return len(self.seen)

    @property
    def size(self) -> int:
        """Bytes of the data files."""
        return sum(file.size for file in self.seen.values())

    def add(self, key: str, text: str, sample: str | None = None) -> None:
        """Record a problem of an object once, without the object's name at the text's start."""
        for place in (f"read {key} in {self.uri}: ", f"{key} in {self.uri}: ", f"{key}: "):
            text = text.removeprefix(place)
        problem = Problem(key, sample, text)
        # The set makes ten thousand problems quick; the list may have been cut since.
        if problem not in self._added or problem not in self.problems:
            self._added.add(problem)
            self.problems.append(problem)

    def note(self, key: str, text: str) -> None:
        """Record what is no problem, once."""
        if (noted := Problem(key, None, text)) not in self.notes:
            self.notes.append(noted)

    @contextmanager
    def noting(self, key: str, sample: str | None = None) -> Iterator[None]:
        """Record an error of the block as a problem of this object.

        Also one that nobody foresaw: stored things can make any library fail, and what comes after
        them is still to be checked.
        """
        try:
            yield
        except (LastingError, StoreError) as error:
            self.add(key, str(error), sample)
        except _UNFORESEEN as error:
            self.add(key, f"it cannot be checked: {type(error).__name__}: {error}", sample)

    @contextmanager
    def parsing(self, key: str) -> Iterator[None]:
        """Do the same as `noting` for a block that reads a JSON object of unchecked form."""
        with self.noting(key):
            try:
                yield
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise CorruptObjectError(
                    f"{key}: it does not say what it must: {error!r}"
                ) from error
