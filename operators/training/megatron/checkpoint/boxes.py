"""Divides a range of a flattened tensor into boxes of the tensor."""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A contiguous box of a tensor.

    Example: in a tensor with 8 columns, Box((2, 0), (3, 8)) consists of rows 2 to 4.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements in the box."""
        return math.prod(self.shape)


def boxes_of(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Divide the elements begin..end-1 of a flattened (row-major) tensor into boxes, in order.

    Each box is contiguous in the flat tensor. There are at most 2 * dimensions - 1 boxes: the end
    of a row, whole rows and the beginning of a row. A partial row is divided in the same way.

    Args:
        shape: The shape of the tensor.
        begin: The first element of the range.
        end: The element after the last element of the range.
    """
    if begin >= end:
        return
    if len(shape) < 2:
        yield Box((begin,), (end - begin,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = begin // row, end // row
    if begin % row:
        yield from _in_row(shape, first, begin % row, min(row, end - first * row))
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last >= first and end % row:
        yield from _in_row(shape, last, 0, end % row)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    for box in boxes_of(shape[1:], begin, end):
        yield Box((row, *box.offset), (1, *box.shape))
