"""Tensors seen another way read what the same view of a NumPy array shows, whole and in any block."""

from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.flat_partitions import FlatPiece, tensor_in
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Tensor, read
from ckpt_formats.core.views import (
    LayersBlob,
    permuted,
    reshaped,
    stacked,
    transposed_in_file,
    unstacked,
    unstacked_all,
)
from held import STORABLE, array, arrays, assert_shows, bits, folder, lay, scattered, shapes, tensor


@given(st.data())
def test_view_exchanges_axes(data: st.DataObject) -> None:
    values = data.draw(arrays())
    axes = data.draw(st.permutations(range(values.ndim)))
    with folder() as at:
        assert_shows(permuted(data.draw(scattered(at, values)), axes), values.transpose(axes), data)


@given(st.data())
def test_view_transposes_a_matrix(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(0, 5)] * 2))
    values = array(data.draw(st.sampled_from(STORABLE)), shape)
    with folder() as at:
        assert_shows(transposed_in_file(data.draw(scattered(at, values))), values.T, data)


def test_transposed_view_is_of_plain_values_of_a_file_only() -> None:
    with pytest.raises(UnsupportedError, match="cannot be transposed"):
        transposed_in_file(tensor(np.zeros((2, 3), np.float32)))


@given(st.data())
def test_view_stacks_tensors_and_takes_them_apart(data: st.DataObject) -> None:
    shape = data.draw(shapes(3, 4))
    several = [array(DTYPES["bfloat16"], shape, seed) for seed in range(data.draw(st.integers(1, 3)))]
    with folder() as at:
        tensors = []
        for i, values in enumerate(several):
            (at / str(i)).mkdir()
            tensors.append(data.draw(scattered(at / str(i), values)))
        whole = stacked(tensors)
        assert_shows(whole, np.stack(several), data)
        assert len(unstacked_all(whole)) == len(several)
        for i, (one, values) in enumerate(zip(unstacked_all(whole), several, strict=True)):
            assert_shows(one, values, data)
            assert_shows(unstacked(whole, i), values, data)


@given(st.data())
def test_view_takes_a_tensor_apart_along_its_first_axis(data: st.DataObject) -> None:
    """However it is cut, also between the tensors that it consists of."""
    values = data.draw(arrays().filter(lambda part: part.ndim > 0))
    with folder() as at:
        whole = data.draw(scattered(at, values))
        for one, row in zip(unstacked_all(whole), values, strict=True):
            assert_shows(one, row[...], data)


@given(st.data())
def test_view_piles_tensors_along_new_axes(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple))
    shape = data.draw(shapes(2, 4))
    values = array(DTYPES["float16"], (*lengths, *shape))
    pile = LayersBlob(lengths, {place: tensor(values[place]) for place in product(*map(range, lengths))})
    assert_shows(Tensor.of(pile), values, data)


@given(st.data())
def test_view_shapes_a_part_of_a_vector(data: st.DataObject) -> None:
    """Whether its values lie plainly in files or not."""
    shape = data.draw(shapes(3, 5))
    before, after = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    vector = array(DTYPES["int16"], (before + prod(shape) + after,))
    values = vector[before : before + prod(shape)].reshape(shape)
    with folder() as at:
        assert_shows(reshaped(data.draw(scattered(at, vector)), before, shape), values, data)
    assert_shows(reshaped(tensor(vector), before, shape), values, data)


def test_columns_of_a_part_of_a_vector_are_read_to_the_last_row() -> None:
    vector = array(DTYPES["int16"], (26,))
    view = reshaped(tensor(vector), 1, (2, 3, 4)).crop(Box((0, 1, 1), (2, 3, 3)))
    assert bits(read(view)) == bits(np.ascontiguousarray(vector[1:25].reshape(2, 3, 4)[:, 1:3, 1:3]))


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("begin", [0, 2])
def test_a_tensor_within_a_flat_buffer_that_ranks_cut_anywhere(shape: Shape, begin: int, tmp_path: Path) -> None:
    buffer = array(DTYPES["float32"], (begin + prod(shape) + 1,))
    raw = lay(tmp_path / "file", buffer, 3, (4,))
    values = buffer[begin:-1].reshape(shape)
    for length in range(1, buffer.size + 1):
        starts = range(0, buffer.size, length)
        pieces = [FlatPiece(at, raw.flat(at, min(at + length, buffer.size))) for at in starts]
        view = tensor_in(shape, buffer.dtype, begin, pieces)
        assert list(view.problems()) == []
        assert bits(read(view)) == bits(values)
