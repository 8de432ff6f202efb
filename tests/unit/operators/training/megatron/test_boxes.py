"""Division of ranges of a flattened tensor into boxes."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from operators.training.megatron.checkpoint.boxes import boxes_of


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    begin = draw(st.integers(0, math.prod(shape)))
    return shape, begin, draw(st.integers(begin, math.prod(shape)))


@given(ranges())
def test_boxes_cover_the_range_in_order(case):
    """The boxes contain each element once, in order, and there are no more boxes than
    documented."""
    shape, begin, end = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(boxes_of(shape, begin, end))
    found = [
        number
        for box in boxes
        for number in numbers[
            tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
        ].ravel()
    ]
    assert found == list(range(begin, end))
    assert all(box.numel > 0 for box in boxes)
    assert len(boxes) <= 2 * len(shape) - 1
