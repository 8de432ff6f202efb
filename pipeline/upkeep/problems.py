"""The report of a check of stored objects, which lists all findings.

One damaged object therefore does not hide the problems in other objects.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from pipeline.errors import LastingError
from pipeline.run.commit import CorruptObjectError, DataFile
from pipeline.store import StoreError
from pipeline.traces.format.domain import shown

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
"""Errors that Python, Arrow and other libraries raise for malformed data."""


@dataclass(frozen=True)
class Problem:
    """A defect. Example: Problem('steps/000000/manifest.json', None, 'not JSON: ...')."""

    key: str
    """Key of the object."""
    sample: str | None
    text: str

    def __str__(self) -> str:
        """Return the problem as one line: 'steps/000000/plan.json: not JSON: ...'."""
        if self.sample is None or self.sample in self.text:
            return f"{self.key}: {self.text}"
        id = shown(self.sample)
        return f"{self.key}: {self.text}" if id in self.text else f"{self.key}: {id}: {self.text}"


@dataclass
class Report:
    """The coverage and findings of a check of the store at `uri`."""

    uri: str
    steps: int = 0
    """Number of sealed steps."""
    pruned: int = 0
    """Number of sealed steps whose samples and routes were removed. Their other objects are
    checked."""
    samples: int = 0
    """Number of samples in the sealed steps."""
    inputs: int = 0
    """Number of staged files that run.json lists."""
    policies: int = 0
    checkpoints: int = 0
    validations: int = 0
    """Number of committed shards of validations."""
    seen: dict[str, DataFile] = field(default_factory=dict)
    """The data files that were read in full, keyed by object key."""
    problems: list[Problem] = field(default_factory=list)
    found: int = 0
    """How often a problem was found, including repeats, which `problems` does not list again. A
    check was successful if it left this number unchanged."""
    _added: set[Problem] = field(default_factory=set)

    @property
    def files(self) -> int:
        """The number of data files that were read in full."""
        return len(self.seen)

    @property
    def size(self) -> int:
        """The total size, in bytes, of the data files that were read in full."""
        return sum(file.size for file in self.seen.values())

    def add(self, key: str, text: str, sample: str | None = None) -> None:
        """Record a problem, unless it is already recorded.

        Args:
            key: The object's key.
            text: The problem. If the text begins with the key, the key is removed.
            sample: Id of the affected sample; None for a problem that affects the whole object.
        """
        for place in (f"read {key} in {self.uri}: ", f"{key} in {self.uri}: ", f"{key}: "):
            text = text.removeprefix(place)
        problem = Problem(key, sample, text)
        self.found += 1
        # The set keeps this fast for ten thousand problems. The list is also searched, because
        # callers may have removed the problem from it.
        if problem not in self._added or problem not in self.problems:
            self._added.add(problem)
            self.problems.append(problem)

    def take(self, other: "Report") -> None:
        """Record the files and problems of another report."""
        self.seen.update(other.seen)
        for problem in other.problems:
            self.add(problem.key, problem.text, problem.sample)

    @contextmanager
    def noting(self, key: str, sample: str | None = None) -> Iterator[None]:
        """If the block raises an error, record it as a problem with an object.

        Unexpected errors are also recorded, because damaged objects can make any library fail, and
        the check must continue.
        """
        try:
            yield
        except (LastingError, StoreError) as error:
            self.add(key, str(error), sample)
        except _UNFORESEEN as error:
            self.add(key, f"it cannot be checked: {type(error).__name__}: {error}", sample)

    @contextmanager
    def parsing(self, key: str) -> Iterator[None]:
        """Record errors as `noting` does, for a block that reads unchecked fields of JSON."""
        with self.noting(key):
            try:
                yield
            except KeyError as error:
                raise CorruptObjectError(
                    f"{key}: the field {error} is missing; restore the object"
                ) from error
            except (TypeError, AttributeError, ValueError) as error:
                raise CorruptObjectError(
                    f"{key}: a field has a wrong value: {error}; restore the object"
                ) from error
