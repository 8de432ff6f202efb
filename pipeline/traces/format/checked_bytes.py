"""Parts of a file, as a file: pyarrow reads the ranges that were checked, and no others."""

import io
from bisect import bisect_right


class CheckedBytes(io.RawIOBase):
    """A file that reads checked ranges only, each as a whole or in parts."""

    def __init__(self, size: int, pieces: dict[int, bytes]) -> None:
        super().__init__()
        self._size = size
        self._pieces = pieces
        self._starts = sorted(pieces)
        self._at = 0

    def at(self, offset: int) -> bytes:
        """The bytes of the range from there on, which was fetched."""
        return self._pieces[offset]

    def readable(self) -> bool:
        """See io.RawIOBase, as below."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The place of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Choose the place of the next read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read bytes of one range. Raises OSError for bytes that were not checked."""
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
