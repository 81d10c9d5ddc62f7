"""Bytes are read once, in any order and by anybody, and no flipped bit passes."""

import os
import pickle
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt.pipeline import Execution
from ckpt.pipeline.folder_target import open_target
from ckpt.pipeline.job_note import JobNote
from ckpt.pipeline.receipts import from_lines, to_line
from ckpt_formats.core import files
from ckpt_formats.core.coverage import Piece
from ckpt_formats.core.errors import CorruptError, NotFoundError
from ckpt_formats.core.evidence import Evidence, evidence_of, seal_number
from ckpt_formats.core.files import Reader, write_sealed
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.joined_seals import JoinedSeals
from ckpt_formats.core.seal_checks import ListedSeals, SealChecks, seal_is_valid, verify_seals
from ckpt_formats.core.seals import Kind, LazySeals, Leaves, Seal, crc32, crc32_combine
from ckpt_formats.engines.torch_save import Torch
from held import flip, folder

Sealing = Literal["crc32", "xxh3-128", "chunks"]
KINDS: list[Sealing] = ["crc32", "xxh3-128", "chunks"]
CHUNK = 16


def sealed(path: Path, kind: Sealing, data: bytes, before: int = 0, after: int = 0) -> Seal:
    """A file with a sealed range in the middle: a checksum of all, or checksums of chunks and one of those."""
    path.write_bytes(os.urandom(before) + data + os.urandom(after))
    if kind == "chunks":
        chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        digests = b"".join(map(xxhash.xxh3_128_digest, chunks))
        leaves = Leaves(np.array([len(chunk) for chunk in chunks], np.int64), digests)
        digest = xxhash.xxh3_128_intdigest(digests)
        return Seal(path, before, len(data), "xxh3-128", digest, "the range", CHUNK, leaves)
    digest = zlib.crc32(data) if kind == "crc32" else xxhash.xxh3_128_intdigest(data)
    return Seal(path, before, len(data), kind, digest, "the range")


def see(seal: Seal, *ranges: tuple[int, int]) -> Evidence:
    """What one reader learns from these ranges, in this order."""
    with Reader() as reader:
        for start, stop in ranges:
            reader.read_into(seal.path, seal.offset + start, memoryview(bytearray(stop - start)), seal)
        return reader.evidence()


def with_digest(evidence: Evidence, digest: int) -> Evidence:
    """The same with another checksum of the first range."""
    table = evidence.table.copy()
    table["digest"][0] = digest
    return replace(evidence, ranges=table.tobytes())


def ranges(nbytes: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Any ranges: with gaps, with overlaps, in any order."""
    end = st.integers(0, nbytes)
    return st.lists(
        st.tuples(end, end).map(lambda pair: (min(pair), max(pair))).filter(lambda r: r[0] < r[1]), max_size=8
    )


@st.composite
def partitions(draw: st.DrawFn, nbytes: int) -> list[tuple[int, int]]:
    """Neighbouring ranges that cover everything, shuffled."""
    cuts = sorted({0, nbytes, *draw(st.lists(st.integers(0, nbytes), max_size=8))})
    return draw(st.permutations(list(pairwise(cuts))))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_seal_checks_decide_by_whatever_readers_read_in_any_order(kind: Sealing, data: st.DataObject) -> None:
    content = data.draw(st.binary(min_size=1, max_size=200))
    readers = data.draw(st.lists(st.one_of(ranges(len(content)), partitions(len(content))), min_size=1, max_size=4))
    with folder() as at:
        seal = sealed(at / "file", kind, content, data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9)))
        evidence = [see(seal, *one) for one in readers]
        assert list(verify_seals(data.draw(st.permutations(evidence)))) == []


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_flipped_bit_is_found_whatever_was_read(kind: Sealing, data: st.DataObject) -> None:
    content = data.draw(st.binary(min_size=1, max_size=200))
    wrong = data.draw(st.integers(0, 8 * len(content) - 1))
    readers = data.draw(st.lists(st.one_of(ranges(len(content)), partitions(len(content))), min_size=1, max_size=4))
    with folder() as at:
        seal = sealed(at / "file", kind, content, 3, 3)
        flip(seal.path, 3 + wrong // 8, wrong % 8)
        evidence = [see(seal, *one) for one in readers]
        assert list(verify_seals(evidence)) == ([seal] if any(evidence) else [])


@pytest.mark.parametrize("kind", KINDS)
def test_every_single_bit_of_a_small_range_counts_and_none_beside_it(kind: Sealing, tmp_path: Path) -> None:
    seal = sealed(tmp_path / "file", kind, os.urandom(40), 5, 5)
    for bit in range(8 * 50):
        flip(seal.path, bit // 8, bit % 8)
        inside = 5 <= bit // 8 < 45
        for read in ([(0, 40)], [(0, 13), (13, 40)], [(20, 40), (0, 10)]):
            assert list(verify_seals([see(seal, *read)])) == ([seal] if inside else [])
        with Reader() as reader:
            assert seal_is_valid(seal, reader) != inside
        flip(seal.path, bit // 8, bit % 8)


@pytest.mark.parametrize("kind", KINDS)
def test_seal_checks_name_only_damaged_seals_of_many(kind: Sealing, tmp_path: Path) -> None:
    seals = [sealed(tmp_path / str(i), kind, os.urandom(64)) for i in range(200)]  # more files than stay open
    broken = [seals[i] for i in (0, 77, 199)]
    for seal in broken:
        flip(seal.path, 63)
    with Reader() as reader:
        for start, stop in ((0, 20), (20, 64)):
            for seal in seals:
                reader.read_into(seal.path, start, memoryview(bytearray(stop - start)), seal)
        assert set(verify_seals([reader.evidence()])) == set(broken)


def test_a_range_read_in_full_is_not_read_again(tmp_path: Path) -> None:
    """The evidence suffices: it holds although the file is gone."""
    crc = sealed(tmp_path / "crc", "crc32", os.urandom(90))
    xxh = sealed(tmp_path / "xxh", "xxh3-128", os.urandom(90))
    evidence = [see(crc, part) for part in ((60, 90), (0, 30), (30, 60))]
    evidence.append(see(xxh, (0, 30), (30, 60), (60, 90)))
    crc.path.unlink()
    xxh.path.unlink()
    assert list(verify_seals(evidence)) == []
    with pytest.raises(NotFoundError):
        list(verify_seals(evidence[1:]))


def test_chunks_that_were_read_in_any_runs_are_not_read_again(tmp_path: Path) -> None:
    """Two readers have a half each, one of them out of order; only the chunk over which both go is read again."""
    seal = sealed(tmp_path / "file", "chunks", os.urandom(10 * CHUNK + 5))
    first = see(seal, (0, 40), (40, 5 * CHUNK + 3))
    second = see(seal, (8 * CHUNK, seal.nbytes), (5 * CHUNK + 3, 8 * CHUNK))
    with seal.path.open("r+b") as file:
        file.write(bytes(5 * CHUNK))
        file.seek(6 * CHUNK)
        file.write(bytes(seal.nbytes - 6 * CHUNK))
    assert list(verify_seals([first, second])) == []
    flip(seal.path, 5 * CHUNK)
    assert list(verify_seals([first, second])) == [seal]
    assert list(verify_seals([with_digest(first, 0), second])) == [seal]


def test_reads_that_overlap_are_put_together_backwards_too(tmp_path: Path) -> None:
    """Some read whole rows, others a part of them: what both have read is taken off again, not read a second time."""
    seal = sealed(tmp_path / "file", "crc32", os.urandom(90))
    evidence = [see(seal, part) for part in ((0, 60), (50, 60), (50, 90), (50, 60))]
    seal.path.unlink()
    assert list(verify_seals(evidence)) == []
    wrong = with_digest(evidence[1], int(evidence[1].table["digest"][0]) ^ 1)
    assert list(verify_seals([evidence[0], wrong, evidence[2]])) == [seal]


def test_thousands_of_scattered_reads_still_settle(tmp_path: Path) -> None:
    """Beyond some number of pieces nothing more is remembered, and what is forgotten is read again."""
    seal = sealed(tmp_path / "file", "crc32", os.urandom(10_000))
    single = [(i, i + 1) for i in range(0, 10_000, 2)]
    assert list(verify_seals([see(seal, *single)])) == []
    flip(seal.path, 9_999)
    assert list(verify_seals([see(seal, *single)])) == [seal]
    flip(seal.path, 9_999)
    flip(seal.path, 9_998)
    assert list(verify_seals([see(seal, *single)])) == [seal]


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_corrupt_not_a_wrong_checksum(kind: Sealing, tmp_path: Path) -> None:
    seal = sealed(tmp_path / "file", kind, os.urandom(40))
    seen = see(seal, (0, 20))
    os.truncate(seal.path, 30)
    with pytest.raises(CorruptError, match="ends at byte 30"):
        list(verify_seals([seen]))
    with pytest.raises(CorruptError, match="ends at byte 30"), Reader() as reader:
        seal_is_valid(seal, reader)


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_of_no_bytes_has_a_checksum_too(kind: Sealing, tmp_path: Path) -> None:
    seal = sealed(tmp_path / "file", kind, b"", 4)
    with Reader() as reader:
        assert seal_is_valid(seal, reader)
        assert not seal_is_valid(replace(seal, digest=seal.digest ^ 1), reader)


@given(st.binary(max_size=99), st.binary(max_size=99))
def test_checksums_of_neighbours_combine(first: bytes, second: bytes) -> None:
    assert crc32(first + second) == zlib.crc32(first + second)
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)
    assert crc32_combine(crc32(first), crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.lists(st.binary(max_size=50)))
def test_write_sealed_returns_the_checksum_of_the_file(pieces: list[bytes]) -> None:
    with folder() as at:
        seal = write_sealed(at, "file", pieces)
        assert (at / "file").read_bytes() == b"".join(pieces)
        assert seal == Seal(Path("file"), 0, sum(map(len, pieces)), "xxh3-128", seal.digest, "file")
        with Reader() as reader:
            assert seal_is_valid(replace(seal, path=at / "file"), reader)


@given(st.data())
def test_receipts_pass_unchanged_through_the_journal(data: st.DataObject) -> None:
    """Evidence of an interrupted run counts in the next: all numbers of 128 bits, all names."""
    names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=20)
    content = data.draw(st.binary(max_size=40))
    with folder() as at, open_target(at / "target", Execution(1), None) as stage:
        stage.begin(JobNote.of("job", Path("source"), at / "target", "torch", ["part"], None))
        written = write_sealed(stage.folder / "data", "part", [content])
        digests = st.integers(0, 2**128 - 1)
        seals = st.builds(
            Seal,
            names.map(Path),
            st.integers(0, 2**60),
            st.integers(0, 2**60),
            st.sampled_from(get_args(Kind)),
            digests,
            names,
        )
        pieces = st.builds(Piece, st.integers(0, 2**60), st.integers(0, 2**60), digests)
        read = data.draw(st.lists(st.tuples(seals, st.lists(pieces, max_size=3)), max_size=3, unique_by=lambda r: r[0]))
        evidence = evidence_of(read)
        entry = {"a": [1, None, "text"], "b": {"c": 0.5}}
        receipt = Receipt("part", len(content), (written,), entry, evidence)
        stage.note(receipt)
        stage.flush()
        (passed,) = stage.receipts(Torch()).values()
        assert np.array_equal(np.sort(passed.evidence.table), np.sort(evidence.table))
        assert replace(passed, evidence=replace(passed.evidence, ranges=evidence.ranges)) == receipt


def test_reading_without_checking_leaves_no_evidence(tmp_path: Path) -> None:
    seal = sealed(tmp_path / "file", "crc32", b"abc")
    with Reader(check=False) as reader:
        out = np.empty(3, np.uint8)
        reader.read_into(seal.path, 0, out.data, seal)
        assert out.tobytes() == b"abc"
        assert not reader.evidence()


def test_a_buffer_larger_than_the_cache_is_kept_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one large frame follow each other: it is decoded once for all of them."""
    monkeypatch.setattr(files, "_MAX_CACHED_BYTES", 8)
    filled: list[int] = []

    def of(reader: Reader, key: int) -> int:
        def fill(buffer: np.ndarray) -> None:
            filled.append(key)
            buffer[:] = key

        return int(reader.cached_or_filled(key, 100, fill)[99])

    with Reader() as reader:
        assert [of(reader, key) for key in (1, 1, 2, 2, 1)] == [1, 1, 2, 2, 1]
    assert filled == [1, 2, 1]


def test_a_reason_that_the_system_does_not_number_is_an_error_all_the_same() -> None:
    error = files.unreadable(OSError("told by a library, without a number"), Path("/a"))
    assert isinstance(error, NotFoundError)
    assert "cannot be read" in str(error)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_evidence_that_arrives_in_any_order_becomes_intervals(is_damaged: bool, tmp_path: Path) -> None:
    """Of neighbouring pieces from as many readers, no more are kept than have no neighbour yet."""
    content = os.urandom(5000)
    seal = sealed(tmp_path / "file", "crc32", content)
    seal.path.unlink()  # nothing is read again
    listed = ListedSeals([[seal]])
    order = np.random.default_rng(0).permutation(5000).tolist()
    parts = [evidence_of([(seal, [Piece(i, i + 1, zlib.crc32(content[i : i + 1]))])]) for i in order[:2500]]
    parts[0] = with_digest(parts[0], 7) if is_damaged else parts[0]
    parts += [evidence_of([(seal, [Piece(i, i + 1, zlib.crc32(content[i : i + 1]))])]) for i in sorted(order[2500:])]
    checks, counts = SealChecks(listed), list[int]()
    for part in parts:
        sent = part.without_seals(listed)
        assert not sent.seals
        assert checks.knows(sent)
        checks.add(sent)
        counts.append(checks.intervals)
    assert (list(checks.damaged()), len(checks)) == ([seal] * is_damaged, 1)
    assert max(counts) <= 2600, "as many intervals as pieces without a neighbour before them"
    assert counts[-1] == 0


def test_evidence_takes_32_bytes_a_range(tmp_path: Path) -> None:
    """In memory, pickled, and in the journal: the seals of a thousand files, of each of which ten parts were read."""
    random = np.random.default_rng(0)
    seals, read = [], []
    for number in range(1000):
        path = tmp_path / f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt"
        seals.append(Seal(path, 4096 * number, 1 << 30, "crc32", int(random.integers(1 << 32)), "archive/data/0"))
        starts = np.sort(random.integers(0, 1 << 28, 10)) * 4
        read.append((seals[-1], [Piece(int(at), int(at) + 4, int(random.integers(1 << 32))) for at in starts]))
    evidence = evidence_of(read).without_seals(ListedSeals([seals]))
    receipt = Receipt("part", 0, (), {}, evidence)
    small = Receipt("part", 0, (), {})
    assert len(evidence.ranges) == 32 * 10_000
    assert len(pickle.dumps(receipt)) - len(pickle.dumps(small)) <= 32 * 10_000 + 100
    assert len(to_line(receipt)) - len(to_line(small)) <= 32 * 10_000
    (read_receipt,) = from_lines([to_line(receipt)])
    checks = SealChecks(ListedSeals([seals]))
    assert checks.knows(read_receipt.evidence)
    assert not SealChecks().knows(read_receipt.evidence)


def test_seals_that_would_have_to_be_read_are_not_listed() -> None:
    class Unread(LazySeals):
        def listed(self) -> list[Seal]:
            return [known]

        def __len__(self) -> int:
            raise AssertionError("read")

        def __getitem__(self, index: object) -> Seal:
            raise AssertionError("read")

    known = Seal(Path("/a"), 0, 9, "crc32", 1, "a")
    assert dict(ListedSeals([JoinedSeals([Unread()])])) == {seal_number(known): known}
