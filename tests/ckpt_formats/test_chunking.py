"""How tensors are divided into chunks, for many tensors at once as for each of them, and which chunk is whose."""

from pathlib import Path

import numpy as np
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt.job import save
from ckpt.pipeline import Resources
from ckpt_formats.core.chunking import Chunking, chunk_counts, chunk_sizes
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import read
from ckpt_formats.universal import Universal
from ckpt_formats.universal.index import CODED
from forged import Forged, forge
from held import bits, checkpoint, parameter

sizes = st.one_of(st.integers(0, 9), st.integers(2**14 - 2, 2**14 + 2), st.integers(2**18 - 2, 2**18 + 2))


@given(st.lists(st.lists(sizes, max_size=3)))
@example([[], [0], [5, 1], [4096, 256], [8, 14336, 4096], [64, 3, 3, 3], [1000], [3, 2**18], [3, 2**18 + 1], [2, 0, 3]])
def test_many_tensors_are_divided_as_each_of_them(shapes: list[list[int]]) -> None:
    ranks = np.array([len(shape) for shape in shapes], np.uint8)
    dims = np.array([size for shape in shapes for size in shape], np.uint64)
    each = [Chunking.default(tuple(shape)) for shape in shapes]
    elements, full = chunk_sizes(ranks, dims)
    assert elements.tolist() == [one.size for one in each]
    assert full.tolist() == [one.chunk_size for one in each]
    assert chunk_counts(ranks, dims).tolist() == [one.count for one in each]


def test_encoded_states_without_bytes_are_at_one_place_and_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """A codec with a base may need no byte. Such states of several parameters have the same offset."""
    master = np.linspace(1, 2, 300, dtype=np.float32)
    copies = {"a": master.astype(DTYPES["bfloat16"]), "b": master.astype(np.float16)}
    source = checkpoint([parameter(name, {"fp32": master, "param": copy}) for name, copy in copies.items()])
    save(source, tmp_path / "target", Universal(), Resources(1))

    def without_bytes(forged: Forged) -> None:
        for name in copies:
            row = forged.row(name, "param")
            forged.columns["state.storage"][row] = CODED
            forged.columns["state.offset"][row] = forged.fields["packs"][0][1]
        forged.columns["coded.nbytes"] = np.zeros(2, np.uint32)
        forged.columns["coded.stored"] = np.full(2, xxhash.xxh3_64_intdigest(b""), np.uint64)

    forge(tmp_path / "target", without_bytes)
    made = Universal().read(tmp_path / "target", ReadOptions())
    with Reader() as reader:
        for name, copy in copies.items():
            part = made.parameters[name].states["param"].crop(Box((1,), (300,)))  # a part of a chunk is cached
            assert bits(read(part, reader)) == bits(copy[1:])
