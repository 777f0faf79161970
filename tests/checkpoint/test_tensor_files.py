"""Places in tensors: pieces as boxes, boxes as blocks, and whether boxes overlap; against one array of counts."""

import math
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddp_kit.checkpoint.format import Box, boxes_of, overlap, split_box

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """Each value is its place in row-major order."""
    return np.arange(math.prod(shape)).reshape(shape)


def within(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.begin, box.end))


@given(SHAPES, st.randoms(use_true_random=False))
def test_boxes_of_a_range_are_few_and_have_its_values_in_order(shape: tuple[int, ...], random: Random) -> None:
    begin, end = sorted(random.choices(range(math.prod(shape) + 1), k=2))
    boxes = boxes_of(shape, (end - begin,), (begin,), flat=True)
    values = [value for box in boxes for value in numbered(shape)[within(box)].reshape(-1)]
    assert values == [*range(begin, end)]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.integers(1, 7), st.randoms(use_true_random=False))
def test_split_box_yields_blocks_in_order_below_the_limit(shape: tuple[int, ...], most: int, random: Random) -> None:
    ends = [sorted(random.choices(range(size + 1), k=2)) for size in shape]
    box = Box(*map(tuple, zip(*ends, strict=True))) if shape else Box((), ())
    found = [*split_box(box, most)] if 0 not in box.shape else []
    values = [value for block in found for value in numbered(shape)[within(block)].reshape(-1)]
    assert values == [*numbered(shape)[within(box)].reshape(-1)]
    assert all(math.prod(block.shape) <= most for block in found)


@given(SHAPES, st.integers(0, 5), st.randoms(use_true_random=False))
def test_overlap_is_true_if_a_value_is_in_two_boxes(shape: tuple[int, ...], count: int, random: Random) -> None:
    counts, boxes = np.zeros(shape, int), []
    for _ in range(count):
        ends = [sorted(random.choices(range(size + 1), k=2)) for size in shape]
        box = Box(*map(tuple, zip(*ends, strict=True))) if shape else Box((), ())
        if 0 not in box.shape:
            boxes.append(box)
            counts[within(box)] += 1
    assert overlap(boxes) == bool((counts > 1).any())
