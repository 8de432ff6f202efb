"""What a check of stored objects found: a list, so that one bad object does not hide the next."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline.store import StoreError
from pipeline.store.commit import CorruptObjectError, DataFile
from pipeline.traces.records import TraceError


@dataclass(frozen=True)
class Problem:
    """Something wrong. Example: Problem('steps/000000/manifest.json', None, 'not JSON: ...')."""

    key: str
    """Of the object."""
    sample: str | None
    text: str

    def __str__(self) -> str:
        """As one line: 'steps/000000/plan.json: not JSON: ...'."""
        named = self.sample is None or self.sample in self.text
        return f"{self.key}: {self.text}" if named else f"{self.key}: {self.sample}: {self.text}"


@dataclass
class Report:
    """What a check has seen of the store at `uri`."""

    uri: str
    steps: int = 0
    """Sealed steps."""
    pruned: int = 0
    """Sealed steps whose samples and routes were removed; what is left of them is checked."""
    samples: int = 0
    """Of the sealed steps."""
    inputs: int = 0
    """Staged files that run.json names."""
    policies: int = 0
    checkpoints: int = 0
    validations: int = 0
    """Committed shards of validations."""
    seen: dict[str, DataFile] = field(default_factory=dict)
    """The data files that were read whole, by key."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def files(self) -> int:
        """How many data files were read whole."""
        return len(self.seen)

    @property
    def size(self) -> int:
        """Bytes of the data files."""
        return sum(file.size for file in self.seen.values())

    def add(self, key: str, text: str, sample: str | None = None) -> None:
        """Take a problem of an object down, once; the text need not repeat the object's name."""
        for place in (f"read {key} in {self.uri}: ", f"{key} in {self.uri}: ", f"{key}: "):
            text = text.removeprefix(place)
        problem = Problem(key, sample, text)
        if problem not in self.problems:
            self.problems.append(problem)

    @contextmanager
    def noting(self, key: str, sample: str | None = None) -> Iterator[None]:
        """Take an error of the block down as a problem of this object."""
        try:
            yield
        except (TraceError, StoreError) as error:
            self.add(key, str(error), sample)

    @contextmanager
    def parsing(self, key: str) -> Iterator[None]:
        """As `noting`, for a block that looks into a JSON object which may lack anything."""
        with self.noting(key):
            try:
                yield
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise CorruptObjectError(
                    f"{key}: it does not say what it must: {error!r}"
                ) from error
