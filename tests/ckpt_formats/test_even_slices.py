"""Slices that are arithmetic are the fragments that they stand for."""

import pickle
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.flat_partitions import FlatPiece, even_tensor, tensor_in
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import FileBlob, Tensor, read
from held import folder

FLOAT = DTYPES["float32"]
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def both(shape: Shape, ranks: int, at: int, path: Path = Path("/nowhere"), missing: int = 0) -> tuple[Tensor, Tensor]:
    """A tensor whose slices are computed, and the same one with a fragment for each; the last ranks may be missing."""
    size, seal = -(-prod(shape) // ranks), Seal(path, 8, 9, "crc32", 1, "archive/data/0")
    vectors = tuple(
        FileBlob.packed(path, 8 + 4 * rank * (at + size + 3), (at + size + 3,), FLOAT, seal)
        for rank in range(ranks - missing)
    )
    pieces = [FlatPiece(rank * size, vector.flat(at, at + size)) for rank, vector in enumerate(vectors)]
    return even_tensor(shape, vectors, at, size), tensor_in(shape, FLOAT, 0, pieces)


@given(shape=shapes, ranks=st.integers(1, 9), at=st.integers(0, 3), data=st.data())
def test_slices_of_even_length_have_the_fragments_of_a_list(
    shape: Shape, ranks: int, at: int, data: st.DataObject
) -> None:
    missing = data.draw(st.integers(0, ranks - 1))
    computed, listed = both(shape, ranks, at, missing=missing)
    assert tuple(computed.fragments) == listed.fragments
    assert (len(computed.fragments), bool(computed.fragments)) == (len(listed.fragments), bool(listed.fragments))
    assert computed.fragments[:1] == computed.examples() == listed.fragments[:1]
    assert [computed.fragments[i] for i in range(len(listed.fragments))] == list(listed.fragments)
    assert list(computed.problems()) == list(listed.problems())
    assert list(computed.sources()) == list(listed.sources())
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))
    assert tuple(computed.crop(box).fragments) == tuple(listed.crop(box).fragments)
    assert list(computed.placed(box, box)) == list(listed.placed(box, box))
    again = pickle.loads(pickle.dumps(computed))
    assert again == computed
    assert hash(again) == hash(computed)


@given(shape=shapes.filter(prod), ranks=st.integers(1, 9), at=st.integers(0, 3))
def test_slices_of_even_length_read_values_from_their_ranks(shape: Shape, ranks: int, at: int) -> None:
    with folder() as place:
        computed, _ = both(shape, ranks, at, place / "file")
        size = -(-prod(shape) // ranks)
        values = np.arange(prod(shape), dtype=FLOAT)
        padded = np.concatenate([values, np.zeros(ranks * size - values.size, FLOAT)]).reshape(ranks, size)
        rows = np.pad(padded, ((0, 0), (at, 3)), constant_values=-1)
        (place / "file").write_bytes(bytes(8) + rows.tobytes())
        assert np.array_equal(read(computed), values.reshape(shape))
        last = tuple(n - 1 for n in shape)
        assert computed[last] == values[-1]


@pytest.mark.parametrize("shape", [(1000,), (7, 1300), (3, 5, 700), ()])
def test_a_slice_takes_no_memory_and_a_block_asks_few_ranks(shape: Shape) -> None:
    """Of a thousand ranks, a block of a row is in a few; what is pickled of a tensor does not grow with ranks."""
    computed, listed = both(shape, 1024, 0)
    more = Tensor(shape, FLOAT, computed.fragments)
    assert len(pickle.dumps([computed, more])) - len(pickle.dumps([computed])) < 200
    box = Box((0,) * len(shape), (1,) * len(shape))
    assert len(list(computed.fragments.around(box))) <= 2 * max(len(shape), 1)  # type: ignore[attr-defined]
    assert len(computed.fragments) == len(listed.fragments)


@pytest.mark.parametrize("index", [slice(None, 1), slice(2, 9, 3), slice(-3, None), slice(5, 1, -1), -1, 0])
def test_slices_of_even_length_are_indexed_as_a_tuple(index: int | slice) -> None:
    computed, listed = both((3, 7), 6, 0)
    assert computed.fragments[index] == listed.fragments[index]
