"""A file object that lets pyarrow read only the checked byte ranges of a file."""

import io
from bisect import bisect_right


class CheckedBytes(io.RawIOBase):
    """A file object that returns only bytes from checked ranges."""

    def __init__(self, size: int, pieces: dict[int, bytes]) -> None:
        super().__init__()
        self._size = size
        self._pieces = pieces
        self._starts = sorted(pieces)
        self._at = 0

    def at(self, offset: int) -> bytes:
        """Return the fetched range that starts at an offset."""
        return self._pieces[offset]

    def readable(self) -> bool:
        """Return True; see io.RawIOBase for this method and the methods below."""
        return True

    def seekable(self) -> bool:
        """Return True: a read may start at any offset."""
        return True

    def tell(self) -> int:
        """Return the offset of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the offset of the next read and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read bytes from one range. Raises OSError for bytes that were not checked."""
        end = self._size if size < 0 else min(self._size, self._at + size)
        place = bisect_right(self._starts, self._at) - 1
        start = self._starts[max(place, 0)]
        piece = self._pieces[start]
        if not start <= self._at <= end <= start + len(piece):
            raise OSError(f"bytes {self._at}..{end} were not checked")
        whole = (self._at, end) == (start, start + len(piece))
        data = piece if whole else piece[self._at - start : end - start]
        self._at = end
        return data
