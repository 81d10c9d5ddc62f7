"""How tensors are divided into chunks, for many tensors at once as for each of them."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_formats.core.chunking import Chunking, chunk_sizes

sizes = st.one_of(st.integers(0, 9), st.integers(2**14 - 2, 2**14 + 2), st.integers(2**18 - 2, 2**18 + 2))


@given(st.lists(st.lists(sizes, max_size=3)))
@example([[], [0], [5, 1], [4096, 256], [8, 14336, 4096], [64, 3, 3, 3], [1000], [3, 2**18], [3, 2**18 + 1], [2, 0, 3]])
def test_chunking_divides_many_tensors_as_each_alone(shapes: list[list[int]]) -> None:
    ranks = np.array([len(shape) for shape in shapes], np.uint8)
    dims = np.array([size for shape in shapes for size in shape], np.uint64)
    each = [Chunking.default(tuple(shape)) for shape in shapes]
    elements, counts = chunk_sizes(ranks, dims)
    assert elements.tolist() == [one.chunk_size for one in each]
    assert counts.tolist() == [one.count for one in each]
