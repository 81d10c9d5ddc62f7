"""Lazy tensors read what NumPy's indexing gives, say what is wrong with them, and never hold more than a slab."""

import tracemalloc
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_codecs import Rounded
from ckpt_formats.core.computed_blobs import DerivedBlob, MeanBlob
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError, NotFoundError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, slab
from ckpt_formats.core.tensor import (
    Array,
    ArrayBlob,
    FileBlob,
    FlatRangeBlob,
    Fragment,
    Tensor,
    ZeroBlob,
    c_strides,
    from_fragments,
    is_c_order,
    read,
)
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal.encode_state import flat
from held import FLOATS, SHAPES, STORABLE, array, arrays, bits, boxes, folder, lay, placements, scattered, tensor


@given(st.data())
def test_any_crop_of_any_crop_of_any_cut_reads_what_indexing_gives(data: st.DataObject) -> None:
    values = data.draw(arrays())
    with folder() as at:
        cut = data.draw(scattered(at, values))
        assert list(cut.problems()) == []
        assert bits(read(cut)) == bits(values)
        outer = data.draw(boxes(values.shape))
        inner = data.draw(boxes(outer.shape))
        cropped = cut.crop(outer).crop(inner)
        assert list(cropped.problems()) == []
        assert bits(read(cropped)) == bits(values[outer.index][inner.index])


@given(st.data())
def test_a_tensor_of_tensors_is_a_tensor(data: st.DataObject) -> None:
    """Fragments move: pieces of one tensor, placed in another, lie where they were put."""
    values = data.draw(arrays())
    with folder() as at:
        cut = data.draw(scattered(at, values))
        box = data.draw(boxes(values.shape))
        margin = tuple(data.draw(st.integers(0, 2)) for _ in values.shape)
        place = Box.whole(box.shape).shift(margin)
        around = Tensor(place.stop, values.dtype, tuple(cut.placed(box, place)))
        out = np.zeros(place.stop, values.dtype)
        with Reader() as reader:
            around.read_into(out, reader)
        expected = np.zeros(place.stop, values.dtype)
        expected[place.index] = values[box.index]
        assert bits(out) == bits(expected)


@given(st.data())
def test_slabs_of_any_budget_stream_the_tensor(data: st.DataObject) -> None:
    values = data.draw(arrays())
    with folder() as at, Reader() as reader:
        cut = data.draw(scattered(at, values))
        moved: list[int] = []
        transfer = Transfer(reader, data.draw(st.integers(1, 300)), moved.append)
        assert b"".join(map(bytes, transfer.chunks(cut))) == values.tobytes()
        assert sum(moved) == values.nbytes


def test_a_slab_is_as_large_as_its_budget_lets_it_be() -> None:
    with Reader() as reader:
        slabs = list(Transfer(reader, 400).boxes(tensor(np.zeros(1000, np.float32))))
    assert [box.size for box in slabs] == [100] * 10


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strides_of_every_type_and_shape_read_true(dtype: np.dtype, shape: Shape, tmp_path: Path) -> None:
    values = array(dtype, shape)
    backwards = c_strides(shape[::-1], dtype.itemsize)[::-1]
    raw = lay(tmp_path / "transposed", values, 3, backwards)
    assert bits(read(raw)) == bits(values)
    wide = tuple(stride * 3 for stride in c_strides(shape, dtype.itemsize))
    assert bits(read(lay(tmp_path / "holes", values, 0, wide))) == bits(values)


@given(st.data())
def test_any_strides_read_into_any_array(data: st.DataObject) -> None:
    """Neither the file's order nor that of the array that is filled matters."""
    values = data.draw(arrays())
    offset, strides = data.draw(placements(values.shape, values.dtype.itemsize))
    with folder() as at, Reader() as reader:
        raw = lay(at / "file", values, offset, strides)
        large = np.zeros(tuple(2 * n for n in values.shape), values.dtype, order=data.draw(st.sampled_from("CF")))
        out = large[(*(slice(None, None, 2) for _ in values.shape), ...)]
        raw.read_into(out, reader)
        assert bits(out) == bits(values)


def test_an_expanded_tensor_shows_one_element_in_many_places(tmp_path: Path) -> None:
    values = array(DTYPES["bfloat16"], (3, 1, 2))
    stored = lay(tmp_path / "file", values, 5, c_strides(values.shape, 2))
    raw = replace(stored, shape=(3, 1000, 2), strides=(4, 0, 2))
    assert bits(read(raw)) == bits(np.broadcast_to(values, (3, 1000, 2)))
    assert bits(read(replace(stored, shape=(4, 5), strides=(0, 0)))) == bits(np.broadcast_to(values[0, 0, 0], (4, 5)))


def test_a_strided_tensor_with_great_holes_is_read_without_them(tmp_path: Path) -> None:
    """Rows of 8 bytes, 1 MiB apart: what lies between is not read."""
    rows, apart = 50, 1 << 20
    path = tmp_path / "sparse"
    values = array(DTYPES["float32"], (rows, 2))
    with path.open("wb") as file:
        for i in range(rows):
            file.seek(i * apart)
            file.write(values[i].tobytes())
    raw = FileBlob(path, 0, (rows, 2), values.dtype, (apart, 4))
    tracemalloc.start()
    assert bits(read(raw)) == bits(values)
    assert tracemalloc.get_traced_memory()[1] < apart
    tracemalloc.stop()


@pytest.mark.parametrize("strides", [(4 << 12, 4), (4, 4 << 12)], ids=["rows", "transposed"])
@pytest.mark.parametrize("slab", [1 << 16, 1 << 20])
@pytest.mark.slow
def test_64_mib_pass_through_slabs_within_their_budget(strides: Shape, slab: int, tmp_path: Path) -> None:
    side = 1 << 12
    values = np.arange(side * side, dtype=np.float32).reshape(side, side)
    path = tmp_path / "big"
    path.write_bytes(values.tobytes())
    expected = values if strides[1] == 4 else values.T
    whole = Tensor.of(FileBlob(path, 0, (side, side), values.dtype, strides))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    with Reader() as reader:
        transfer = Transfer(reader, slab)
        # The transposed tensor is looked at in a few places only: reading all of it against its order is slow.
        looked = list(transfer.boxes(whole)) if strides[1] == 4 else list(transfer.boxes(whole))[:: side // 8]
        for box in looked:
            assert np.array_equal(transfer.fetch(whole, box), expected[box.index])
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 4 * slab + (4 << 20) + (1 << 19), "a window of 4 MiB, the slab, and a comparison's mask"
    assert peak < whole.nbytes // 5


def fragment(start: Shape, stop: Shape, shape: Shape | None = None, dtype: str = "float32") -> Fragment:
    box = Box(start, stop)
    return Fragment(box, ArrayBlob(np.zeros(box.shape if shape is None else shape, DTYPES[dtype])))


FLAWED = {
    "gap": ([fragment((0, 0), (2, 3))], "no file holds block [2:4, 0:3]"),
    "gap inside": ([fragment((0, 0), (1, 3)), fragment((2, 0), (4, 3))], "no file holds block [1:2, 0:3]"),
    "nothing": ([], "no file holds block [0:4, 0:3]"),
    "overlap": ([fragment((0, 0), (3, 3)), fragment((2, 0), (4, 3))], "overlap"),
    "twice": ([fragment((0, 0), (4, 3)), fragment((0, 0), (4, 3))], "overlap"),
    "outside": ([fragment((0, 0), (5, 3))], "outside the shape [4, 3]"),
    "before": ([fragment((-1, 0), (4, 3))], "outside the shape [4, 3]"),
    "type": ([fragment((0, 0), (4, 3), dtype="int32")], "holds int32, the tensor float32"),
    "shape": ([fragment((0, 0), (4, 3), shape=(3, 4))], "stored with the shape [3, 4]"),
}


@pytest.mark.parametrize("kind", FLAWED)
def test_every_kind_of_flaw_is_found_and_said(kind: str) -> None:
    fragments, message = FLAWED[kind]
    flaws = list(Tensor((4, 3), DTYPES["float32"], tuple(fragments)).problems())
    assert any(message in flaw for flaw in flaws), flaws


def test_a_flaw_shows_through_whatever_is_made_of_it() -> None:
    """A mean, a rounding, a range, a tensor of tensors: none may hide that part of its values is nowhere."""
    holed = Tensor((4, 3), DTYPES["float32"], (fragment((0, 0), (2, 3)),))
    good = tensor(np.zeros((4, 3), np.float32))
    for blob in (
        MeanBlob((good, holed)),
        DerivedBlob(Rounded(), holed, DTYPES["bfloat16"]),
        FlatRangeBlob(holed, 0, 12),
        Tensor((4, 3), holed.dtype, (Fragment(Box.whole((4, 3)), holed),)),
    ):
        assert any("no file holds block [2:4, 0:3]" in flaw for flaw in Tensor.of(blob).problems())
        assert list(Tensor.of(blob.crop(Box.whole(blob.shape))).problems())


def test_flaws_of_replicas_are_flaws() -> None:
    good = tensor(np.zeros((4, 3), np.float32))
    for bad in (
        tensor(np.zeros((4, 2), np.float32)),
        tensor(np.zeros((4, 3), np.int32)),
        Tensor((4, 3), good.dtype, (fragment((0, 0), (3, 3)),)),
    ):
        assert list(replace(good, replicas=(bad,)).problems())
    assert list(replace(good, replicas=(good, good)).problems()) == []


def test_scalars_and_empty_tensors_have_flaws_too() -> None:
    scalar = tensor(np.float32(1).reshape(()))
    assert list(scalar.problems()) == []
    assert list(replace(scalar, fragments=()).problems())
    assert list(replace(scalar, fragments=scalar.fragments * 2).problems())
    empty = Tensor((0, 3), DTYPES["float32"], ())
    assert list(empty.problems()) == []
    assert read(empty).shape == (0, 3)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
@pytest.mark.parametrize("shape", [(), (9,), (3, 4)], ids=str)
def test_a_held_scalar_or_array_can_be_cropped_and_read(dtype: np.dtype, shape: Shape) -> None:
    values = array(dtype, shape)
    assert bits(read(ArrayBlob(values).crop(Box.whole(shape)))) == bits(values)
    assert list(ArrayBlob(values).sources()) == []


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(data=st.data())
def test_decoding_commutes_with_cropping(dtype: np.dtype, data: st.DataObject) -> None:
    values = data.draw(arrays([DTYPES["float32"], DTYPES["float64"]]))
    blob = DerivedBlob(Rounded(), ArrayBlob(values), dtype)
    box = data.draw(boxes(values.shape))
    with np.errstate(all="ignore"):
        assert bits(read(blob.crop(box))) == bits(values.astype(dtype)[box.index])


@given(st.data())
def test_a_mean_of_equals_is_their_value_and_commutes_with_cropping(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    integers = [
        np.array(data.draw(st.lists(st.integers(-999, 999), min_size=prod(shape), max_size=prod(shape))))
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    values = [one.reshape(shape).astype(np.float64) for one in integers]
    mean = MeanBlob(tuple(map(ArrayBlob, values)))
    box = data.draw(boxes(shape))
    assert np.array_equal(read(mean.crop(box)), (sum(values) / len(values))[box.index])
    one = np.asarray(values[0], np.float32)
    assert bits(read(MeanBlob((ArrayBlob(one),) * 2))) == bits(one)


@given(st.data())
def test_a_range_is_the_flattened_tensor_and_commutes_with_cropping(data: st.DataObject) -> None:
    values = data.draw(arrays())
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, values.size)] * 2)))
    with folder() as at:
        flat = FlatRangeBlob(data.draw(scattered(at, values)), start, stop)
        expected = values.reshape(-1)[start:stop]
        assert bits(read(flat)) == bits(expected)
        box = data.draw(boxes(flat.shape))
        assert bits(read(flat.crop(box))) == bits(expected[box.index])
        out = np.zeros((stop - start, 2), values.dtype)[:, 0]
        with Reader() as reader:
            flat.read_into(out, reader)
        assert bits(out) == bits(expected)


@pytest.mark.parametrize("dtype", [d for d in STORABLE if d.name != "float8_e8m0fnu"], ids=str)
def test_zeros_are_zeros_without_a_sign(dtype: np.dtype) -> None:
    zeros = ZeroBlob((3, 2), dtype)
    assert read(zeros.crop(Box((1, 0), (3, 1)))).tobytes() == bytes(2 * dtype.itemsize)


def test_a_mean_knows_its_files(tmp_path: Path) -> None:
    raws = [lay(tmp_path / str(i), np.ones(3, np.float32), 0, (4,)) for i in range(3)]
    assert [raw.path for raw in MeanBlob(tuple(raws)).sources()] == [raw.path for raw in raws]
    assert [raw.path for raw in DerivedBlob(Rounded(), raws[0], DTYPES["bfloat16"]).sources()] == [raws[0].path]


def test_replicas_that_differ_are_an_error_that_names_both_files(tmp_path: Path) -> None:
    values = array(DTYPES["bfloat16"], (40, 3))
    other = values.copy()
    other[37, 1] = -other[37, 1]
    ours, theirs = (Tensor.of(lay(tmp_path / n, v, 7, (6, 2))) for n, v in (("ours", values), ("theirs", other)))
    both = replace(ours, replicas=(ours, theirs))
    with Reader() as reader, pytest.raises(CorruptError, match=r"ours against .*theirs"):
        list(Transfer(reader, 30).chunks(both))
    with Reader() as reader:
        assert b"".join(map(bytes, Transfer(reader, 30).chunks(replace(ours, replicas=(ours,))))) == values.tobytes()


def test_replicas_that_differ_are_an_error_of_the_flat_tensor_too(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    paths = tmp_path / "ours", tmp_path / "theirs"
    for number, path in enumerate(paths):
        path.write_bytes((values + number).tobytes())
    ours, theirs = (Tensor.of(FileBlob(path, 0, values.shape, values.dtype, (16, 4))) for path in paths)
    assert np.array_equal(read(flat(ours)), values.reshape(-1))
    with pytest.raises(CorruptError, match=r"ours against .*theirs"):
        read(flat(replace(ours, replicas=(theirs,))))


def test_replicas_are_compared_by_bits_not_by_value() -> None:
    zero, negative = (tensor(np.array([v], np.float32)) for v in (0.0, -0.0))
    nan = tensor(np.array([np.nan], np.float32))
    with Reader() as reader, pytest.raises(CorruptError):
        list(Transfer(reader).chunks(replace(zero, replicas=(negative,))))
    with Reader() as reader:
        assert list(Transfer(reader).chunks(replace(nan, replicas=(nan,))))


@given(st.data())
def test_packed_is_what_numpy_calls_contiguous(data: st.DataObject) -> None:
    values = data.draw(arrays([DTYPES["int16"]]).filter(lambda a: a.size))
    offset, strides = data.draw(placements(values.shape, 2))
    laid = np.ndarray(
        values.shape,
        values.dtype,
        bytes(offset + sum(n * s for n, s in zip(values.shape, strides, strict=True)) + 2),
        offset,
        strides,
    )
    assert is_c_order(values.shape, strides, 2) == laid.flags.c_contiguous
    assert FileBlob(Path(), offset, values.shape, values.dtype, strides).is_packed == laid.flags.c_contiguous
    assert is_c_order(values.shape, c_strides(values.shape, 2), 2)


def test_joining_leaves_out_what_is_empty() -> None:
    parts = [fragment((0, 0), (2, 3)), fragment((2, 0), (2, 3)), fragment((2, 0), (4, 3))]
    joined = from_fragments((4, 3), parts, DTYPES["float32"])
    assert len(joined.fragments) == 2
    assert list(joined.problems()) == []


def test_flat_and_shaped_name_elements_in_storage_order(tmp_path: Path) -> None:
    values: Array = array(DTYPES["float16"], (4, 6))
    raw = lay(tmp_path / "file", values, 11, c_strides(values.shape, 2))
    assert bits(read(raw.flat(5, 17))) == bits(values.ravel()[5:17])
    assert bits(read(raw.shaped((2, 12)))) == bits(values.reshape(2, 12))


def test_a_file_that_ends_too_early_or_is_not_there_is_said(tmp_path: Path) -> None:
    raw = lay(tmp_path / "file", array(DTYPES["float32"], (100,)), 0, (4,))
    (tmp_path / "file").write_bytes(b"short")
    with pytest.raises(CorruptError, match="file ends at byte 5, but a tensor reaches to byte 400"):
        read(raw)
    with pytest.raises(NotFoundError, match="absent"):
        read(replace(raw, path=tmp_path / "absent"))
    with pytest.raises(NotFoundError):
        read(replace(raw, path=tmp_path))


def test_a_row_of_a_slab_is_its_block() -> None:
    values = array(DTYPES["uint8"], (4, 5))
    assert bits(read(tensor(values).crop(slab((4, 5), 1, 2, 4)))) == bits(values[:, 2:4])


def test_a_tensor_without_elements_has_a_shape_that_an_array_can_have() -> None:
    most = (1 << 63) // 4 - 1
    assert Tensor((0, most), DTYPES["float32"], ()).nbytes == 0
    with pytest.raises(CorruptError, match="is none that can be"):
        Tensor((0, most + 1), DTYPES["float32"], ())
