"""Readers that share a band: each gets its own columns, every row is read once, and nobody waits for ever."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_formats.core.bands import Band
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.evidence import Evidence, seal_number
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import slab
from ckpt_formats.core.seal_checks import verify_seals
from ckpt_formats.core.seals import Seal, crc32
from ckpt_formats.core.tensor import Array, FileBlob, read
from held import flip, folder

SECONDS = 120
"""What reading may take; then somebody waits for ever."""


class Counted(Reader):
    """A reader that notes how often each byte of its only file was read."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.times = np.zeros(path.stat().st_size, int)

    def read_into(self, path: Path, offset: int, out: memoryview, seal: Seal | None = None) -> None:
        super().read_into(path, offset, out, seal)
        self.times[offset : offset + len(out)] += 1


def matrix(path: Path, rows: int, columns: int, before: int = 5) -> tuple[Array, FileBlob]:
    """Numbers in a file of noise, and where they lie, under a checksum."""
    values = np.arange(rows * columns, dtype="<u4").reshape(rows, columns)
    path.write_bytes(b"\xaa" * before + values.tobytes() + b"\xbb" * 9)
    seal = Seal(path, before, values.nbytes, "crc32", crc32(values.tobytes()), "the matrix")
    return values, FileBlob.packed(path, before, values.shape, values.dtype, seal)


def in_step(band: Band, blobs: list[list[FileBlob]]) -> list[tuple[list[Array], Evidence]]:
    """What each of the readers reads, blob after blob, and its evidence."""

    def work(own: list[FileBlob]) -> tuple[list[Array], Evidence]:
        try:
            with Reader(band=band) as reader:
                return [read(blob, reader) for blob in own], reader.evidence()
        finally:
            band.leave()

    with ThreadPoolExecutor(len(blobs)) as pool:
        return [one.result(SECONDS) for one in [pool.submit(work, own) for own in blobs]]


def pieces(blob: FileBlob, rows: int) -> list[FileBlob]:
    """The blob in blocks of so many rows."""
    return [
        blob.crop(slab(blob.shape, 0, low, min(low + rows, blob.shape[0]))) for low in range(0, blob.shape[0], rows)
    ]


@given(st.data())
def test_band_reads_every_byte_once_for_the_reader_that_needs_it(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 60)), data.draw(st.integers(2, 40))
    cuts = sorted(data.draw(st.sets(st.integers(1, columns - 1), min_size=1, max_size=5)))
    ends = [*zip([0, *cuts], [*cuts, columns], strict=True)]
    heights = [data.draw(st.integers(1, rows)) for _ in ends]
    with folder() as at:
        values, blob = matrix(at / "file", rows, columns)
        parts = [blob.crop(slab(blob.shape, 1, low, high)) for low, high in ends]
        with Counted(at / "file") as reader:
            band = Band(reader, len(parts), data.draw(st.integers(1, 3000)))
            order = data.draw(st.permutations(range(len(parts))))
            results = in_step(band, [pieces(parts[i], heights[i]) for i in order])
            for i, (blocks, _) in zip(order, results, strict=True):
                low, high = ends[i]
                assert np.array_equal(np.concatenate(blocks), values[:, low:high])
            if len(set(heights)) == 1:
                assert reader.times.max() <= 1


def test_band_gives_every_reader_the_evidence_of_its_bytes(tmp_path: Path) -> None:
    _, blob = matrix(tmp_path / "file", 64, 64)
    parts = [pieces(blob.crop(slab(blob.shape, 1, low, low + 16)), 10) for low in range(0, 64, 16)]
    assert blob.seal is not None
    for broken in (False, True):
        if broken:
            flip(tmp_path / "file", 5 + 4 * 63)  # of the first row, in the last reader's columns
        with Reader() as reader:
            results = in_step(Band(reader, 4, 2000), parts)
        for _, evidence in results:
            whole = [(seal_number(blob.seal), 0, blob.seal.nbytes)] if broken else []
            assert evidence.table[["seal", "start", "stop"]].tolist() == whole
            assert evidence.numbers.tolist() == ([] if broken else [seal_number(blob.seal)])
            assert list(verify_seals([evidence])) == ([blob.seal] if broken else [])


@given(st.data())
def test_band_lets_no_reader_wait_for_ever(data: st.DataObject) -> None:
    """Also if they go through two files in different orders, or read nothing at all."""
    with folder() as at:
        matrices = [matrix(at / str(i), 30, 20) for i in range(2)]
        wanted: list[list[tuple[Array, FileBlob]]] = []
        for _ in range(data.draw(st.integers(1, 4))):
            own = []
            for values, blob in data.draw(st.permutations(matrices))[: data.draw(st.integers(0, 2))]:
                low = data.draw(st.integers(0, 18))
                box = slab(blob.shape, 1, low, data.draw(st.integers(low + 1, 19)))
                own.append((values[box.index], blob.crop(box)))
            wanted.append(own)
        with Reader() as reader:
            band = Band(reader, len(wanted), data.draw(st.integers(1, 3000)))
            results = in_step(band, [[blob for _, blob in own] for own in wanted])
        for own, (blocks, _) in zip(wanted, results, strict=True):
            assert all(np.array_equal(values, block) for (values, _), block in zip(own, blocks, strict=True))


def test_band_fails_every_reader_of_a_truncated_file(tmp_path: Path) -> None:
    _, blob = matrix(tmp_path / "file", 64, 64)
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(5000)
    errors: list[Any] = []

    def work(low: int) -> None:
        try:
            with Reader(band=band) as own:
                read(blob.crop(slab(blob.shape, 1, low, low + 16)), own)
        except CorruptError as error:
            errors.append(error)
        finally:
            band.leave()

    with Reader() as reader, ThreadPoolExecutor(4) as pool:
        band = Band(reader, 4, 2000)
        for one in [pool.submit(work, low) for low in range(0, 64, 16)]:
            one.result(SECONDS)
    assert len(errors) == 4


@pytest.mark.parametrize("nbytes", [1, 300, 4000, 1 << 20])
def test_band_of_one_reader_reads_no_more_than_lies_between_its_columns(nbytes: int, tmp_path: Path) -> None:
    """A group of which all others have left, after a run that was killed."""
    values, blob = matrix(tmp_path / "file", 64, 64)
    part = blob.crop(slab(blob.shape, 1, 32, 64))
    with Counted(tmp_path / "file") as reader:
        band = Band(reader, 2, nbytes)
        band.leave()
        ((blocks, _),) = in_step(band, [[part]])
        assert np.array_equal(blocks[0], values[:, 32:])
        assert reader.times.max() == 1
        assert not reader.times[: 5 + 4 * 32].any()
        assert not reader.times[5 + values.nbytes :].any()
