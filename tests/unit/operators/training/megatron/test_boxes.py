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


def test_a_range_of_rows_is_one_box():
    (box,) = boxes_of((6, 4), 8, 20)
    assert (box.offset, box.shape) == ((2, 0), (3, 4))


def test_a_range_across_rows_has_two_ends_and_a_middle_part():
    boxes = [(box.offset, box.shape) for box in boxes_of((6, 4), 3, 17)]
    assert boxes == [((0, 3), (1, 1)), ((1, 0), (3, 4)), ((4, 0), (1, 1))]
