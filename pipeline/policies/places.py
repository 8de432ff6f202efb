"""Reading the coded tensors of stored difference files, one at a time.

A reader of a chain reads the tensors in the order in which they are stored. Each request therefore
also fetches the bytes that follow its tensor, and most tensors need no additional request.
"""

from collections.abc import Sequence

from pipeline.policies.difference import difference_places
from pipeline.policies.weights import LARGEST_HEADER, LENGTH
from pipeline.run.commit import DataFile, parsing
from pipeline.store.base import Store

_PIECE = 64 << 20  # maximum number of bytes per request


class CodedTensors:
    """The coded tensors of a version's difference files."""

    def __init__(self, store: Store, files: Sequence[DataFile], ahead: int) -> None:
        """Read the headers of the files.

        Args:
            store: The store of the run.
            files: The difference files of one version.
            ahead: Minimum number of bytes to fetch at a time, while tensors are read in order.

        Raises:
            CorruptObjectError: A file is not a difference file.
            ObjectMissingError: A file is missing.
            StoreError: The store cannot be read.
        """
        self._store = store
        self._ahead = ahead
        self._places = {
            name: (file, begin, end) for file in files for name, begin, end in _places(store, file)
        }
        self._file: DataFile | None = None
        self._begin = 0
        self._held = memoryview(b"")
        """The most recently fetched bytes: a part of `_file` that starts at `_begin`."""

    def file_of(self, name: str) -> DataFile:
        """Return the file that holds a tensor. Raises KeyError."""
        return self._places[name][0]

    def read(self, name: str) -> memoryview:
        """Return the coded bytes of a tensor. Raises KeyError and StoreError."""
        file, begin, end = self._places[name]
        if file != self._file or not self._begin <= begin <= end <= self._end:
            in_order = file != self._file or self._begin <= begin <= self._end
            size = max(end - begin, min(self._ahead, file.size - begin) if in_order else 0)
            self._held = memoryview(b"")  # hold the bytes of only one read in memory
            self._held = memoryview(self._bytes(file, begin, size))
            self._file, self._begin = file, begin
        return self._held[begin - self._begin : end - self._begin]

    @property
    def _end(self) -> int:
        return self._begin + len(self._held)

    def _bytes(self, file: DataFile, begin: int, size: int) -> bytearray:
        found = bytearray(size)
        for at in range(0, size, _PIECE):
            length = min(_PIECE, size - at)
            found[at : at + length] = self._store.read_range(file.key, begin + at, length)
        return found


def _places(store: Store, file: DataFile) -> list[tuple[str, int, int]]:
    """Return the names of a file's tensors, each with the begin and end offsets of its bytes."""
    with parsing(store, file.key):
        length = min(file.size, LENGTH)
        size = int.from_bytes(store.read_range(file.key, 0, length), "little")
        first = LENGTH + size
        if size > LARGEST_HEADER or first > file.size:
            raise ValueError(
                f"its header has {size} bytes, expected at most {LARGEST_HEADER} bytes inside the "
                f"file's {file.size}"
            )
        places = difference_places(store.read_range(file.key, LENGTH, size))
        end = first + (places[-1].end if places else 0)
        if end != file.size:
            raise ValueError(f"it has {file.size} bytes, expected {end} as in its header")
    return [(place.name, first + place.begin, first + place.end) for place in places]
