"""Blocks of tensors against masks of NumPy: exhaustive where small, random where large."""

from itertools import combinations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_formats.core.geometry import Box, Shape, flat_boxes, missing, overlaps, slab, slabs
from held import boxes, cuts, shapes

SMALL: list[Shape] = [(), (0,), (1,), (4,), (2, 3), (3, 0), (0, 2), (2, 2, 2), (1, 3, 2)]


def all_boxes(shape: Shape) -> list[Box]:
    """Every block of a tensor, empty ones too."""
    ends = [[(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in shape]
    return [Box(tuple(a for a, _ in chosen), tuple(b for _, b in chosen)) for chosen in product(*ends)]


def count(shape: Shape, *parts: Box) -> np.ndarray:
    """How many of the blocks hold each element."""
    held = np.zeros(shape, int)
    for part in parts:
        held[part.index] += 1
    return held


@pytest.mark.parametrize("shape", SMALL)
def test_a_common_block_holds_what_both_hold(shape: Shape) -> None:
    for a, b in product(all_boxes(shape), repeat=2):
        common = a & b
        both = (count(shape, a) > 0) & (count(shape, b) > 0)
        assert (common is None) == (not both.any())
        if common is not None:
            assert np.array_equal(count(shape, common) > 0, both)
            assert common == b & a


@pytest.mark.parametrize("shape", SMALL)
def test_remainder_and_removed_boxes_are_the_block(shape: Shape) -> None:
    for a, b in product(all_boxes(shape), repeat=2):
        left = list(a.minus(b))
        taken = [c for c in [a & b] if c is not None]
        assert np.array_equal(count(shape, *left, *taken), count(shape, a))
        assert len(left) <= max(1, 2 * len(shape))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 2), (2, 0)])
def test_missing_is_what_no_part_covers(shape: Shape) -> None:
    whole = Box.whole(shape)
    for n in range(3):
        for parts in combinations(all_boxes(shape), n):
            gaps = missing(whole, parts)
            assert np.array_equal(count(shape, *gaps), (count(shape, *parts) == 0).astype(int))


@given(st.data())
def test_missing_and_overlaps_are_exact(data: st.DataObject) -> None:
    shape = data.draw(shapes(4, 6))
    parts = data.draw(st.lists(boxes(shape), max_size=6))
    assert np.array_equal(count(shape, *missing(Box.whole(shape), parts)), (count(shape, *parts) == 0).astype(int))
    common = {(i, j) for (i, a), (j, b) in combinations(enumerate(parts), 2) if (count(shape, a, b) > 1).any()}
    common_parts = list(overlaps(parts))
    assert set(common_parts) == common
    assert len(common_parts) == len(common)


@pytest.mark.parametrize("shape", [(40,), (9, 13), (4, 5, 6)])
@pytest.mark.parametrize("lost", [0, 2, 7])
def test_missing_is_exact_where_many_parts_are_halved(shape: Shape, lost: int) -> None:
    cells = [Box(at, tuple(i + 1 for i in at)) for at in np.ndindex(*shape)]
    parts = [part for i, part in enumerate(cells * 2) if lost == 0 or i % len(cells) % lost]
    gaps = missing(Box.whole(shape), parts)
    assert np.array_equal(count(shape, *gaps), (count(shape, *parts) == 0).astype(int))


def test_many_scalars_in_one_place_leave_nothing_missing() -> None:
    assert missing(Box((), ()), [Box((), ())] * 100) == []


@given(st.data())
def test_a_cut_neither_misses_nor_overlaps_until_it_is_disturbed(data: st.DataObject) -> None:
    shape = data.draw(shapes(4, 6).filter(prod))
    parts = data.draw(cuts(shape, 6))
    assert missing(Box.whole(shape), parts) == []
    assert list(overlaps(parts)) == []
    lost = data.draw(st.integers(0, len(parts) - 1))
    gaps = missing(Box.whole(shape), parts[:lost] + parts[lost + 1 :])
    assert np.array_equal(count(shape, *gaps), count(shape, parts[lost]))
    assert list(overlaps([*parts, parts[lost]])) == [(lost, len(parts))]


@pytest.mark.timeout(20)
def test_overlaps_of_many_disjoint_blocks_take_no_quadratic_time() -> None:
    parts = [Box((i, 0), (i + 1, 4)) for i in range(20_000)]
    assert list(overlaps(parts)) == []


@pytest.mark.parametrize("shape", [*SMALL, (2, 3, 2, 2), (1, 1, 5), (3, 1, 2)])
def test_a_flat_range_is_few_blocks_in_storage_order(shape: Shape) -> None:
    flat = np.arange(prod(shape)).reshape(shape)
    for start in range(flat.size + 1):
        for stop in range(start, flat.size + 1):
            cut = list(flat_boxes(shape, start, stop))
            values = [value for box in cut for value in flat[box.index].ravel()]
            assert values == list(range(start, stop))
            assert len(cut) <= max(1, 2 * len(shape) - 1)
            assert all(box.size for box in cut)


@pytest.mark.parametrize("shape", [*SMALL, (2, 3, 2, 2), (1, 1, 5), (4, 1, 3)])
def test_slabs_are_the_tensor_in_storage_order_within_budget(shape: Shape) -> None:
    flat = np.arange(prod(shape)).reshape(shape)
    for most in range(1, flat.size + 2):
        cut = list(slabs(shape, most))
        values = [value for box in cut for value in flat[box.index].ravel()]
        assert values == list(range(flat.size))
        assert all(0 < box.size <= most for box in cut)


@given(shapes(5, 9), st.integers(1, 10_000))
def test_slabs_are_as_few_as_rows_allow(shape: Shape, most: int) -> None:
    sizes = [box.size for box in slabs(shape, most)]
    assert sum(sizes) == prod(shape)
    if prod(shape) <= most:
        assert len(sizes) <= 1


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4)])
def test_a_slab_lies_between_two_cuts_across_one_axis(shape: Shape) -> None:
    values = np.arange(prod(shape)).reshape(shape)
    for axis, length in enumerate(shape):
        for start in range(length + 1):
            for stop in range(start, length + 1):
                taken = values[slab(shape, axis, start, stop).index]
                assert np.array_equal(taken, np.take(values, range(start, stop), axis))


@given(st.data())
def test_within_and_shift_undo_each_other(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    inner, outer = data.draw(boxes(shape)), data.draw(boxes(shape))
    assert inner.within(outer).shift(outer.start) == inner
    assert inner.within(outer).shape == inner.shape
