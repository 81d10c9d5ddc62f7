"""Zip archives that attack their reader, and damaged ones: each is refused with a typed error, or says the truth."""

import io
import os
import random
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from ckpt_formats.containers.torchfile import TensorRef, open_file, tensor_of
from ckpt_formats.core.errors import CkptError, CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.seal_checks import seal_is_valid
from ckpt_formats.core.seals import crc32
from ckpt_formats.core.tensor import read

Typed = (CorruptError, UnsafeError, UnsupportedError)


@dataclass(frozen=True)
class Entry:
    """One member, with every field of both of its headers to be lied about."""

    name: str
    data: bytes
    method: int = 0
    flags: int = 0
    crc: int | None = None
    size: int | None = None
    packed: int | None = None
    header: int | None = None
    disk: int = 0
    extra: bytes = b""
    local_name: str | None = None
    local_extra: bytes = b""
    local_size: int | None = None
    local_flags: int | None = None
    local_method: int | None = None
    local_magic: bytes = b"PK\3\4"
    behind: bytes = b""
    raw_name: bytes | None = None


@dataclass(frozen=True)
class Ends:
    """The end records, likewise."""

    count: int | None = None
    here: int | None = None
    disk: int = 0
    size: int | None = None
    start: int | None = None
    comment: bytes = b""
    comment_length: int | None = None
    wide: bool = False
    wide_count: int | None = None
    wide_start: int | None = None
    wide_size: int | None = None
    wide_where: int | None = None
    wide_record: int = 44
    wide_disks: int = 1
    before: bytes = b""
    between: bytes = b""
    after: bytes = b""


def build(entries: list[Entry], ends: Ends = Ends()) -> bytes:
    out, directory = bytearray(ends.before), bytearray()
    for entry in entries:
        at = len(out) if entry.header is None else entry.header
        crc = crc32(entry.data) if entry.crc is None else entry.crc
        size = len(entry.data) if entry.size is None else entry.size
        packed = size if entry.packed is None else entry.packed
        name = entry.raw_name if entry.raw_name is not None else entry.name.encode()
        local = name if entry.local_name is None else entry.local_name.encode()
        local_size = size if entry.local_size is None else entry.local_size
        flags = entry.flags if entry.local_flags is None else entry.local_flags
        method = entry.method if entry.local_method is None else entry.local_method
        out += entry.local_magic + struct.pack(
            "<HHHHHIIIHH", 0, flags, method, 0, 0, crc, local_size, local_size, len(local), len(entry.local_extra)
        )
        out += local + entry.local_extra + entry.data + entry.behind
        directory += struct.pack(
            "<4sHHHHHHIIIHHHHHII", b"PK\1\2", 0, 0, entry.flags, entry.method, 0, 0, crc, packed, size,
            len(name), len(entry.extra), 0, entry.disk, 0, 0, at,
        )  # fmt: skip
        directory += name + entry.extra
    out += ends.between
    start, size = len(out), len(directory)
    out += directory
    if ends.wide:
        where = len(out) if ends.wide_where is None else ends.wide_where
        count = len(entries) if ends.wide_count is None else ends.wide_count
        out += struct.pack(
            "<4sQHHIIQQQQ", b"PK\6\6", ends.wide_record, 0, 0, 0, 0, count, count,
            size if ends.wide_size is None else ends.wide_size, start if ends.wide_start is None else ends.wide_start,
        )  # fmt: skip
        out += struct.pack("<4sIQI", b"PK\6\7", 0, where, ends.wide_disks)
    count = len(entries) if ends.count is None else ends.count
    here = count if ends.here is None else ends.here
    length = len(ends.comment) if ends.comment_length is None else ends.comment_length
    size = size if ends.size is None else ends.size
    start = start if ends.start is None else ends.start
    out += struct.pack("<4sHHHHIIH", b"PK\5\6", ends.disk, 0, here, count, size, start, length)
    return bytes(out) + ends.comment + ends.after


def pickle_of_a_tensor(key: bytes = b"0") -> bytes:
    storage = b"(X\x07\0\0\0storagectorch\nByteStorage\nX" + struct.pack("<I", len(key)) + key
    storage += b"X\x03\0\0\0cpuK\x04tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0K\x04\x85K\x01\x85\x89" + hooks + b"tR."


PKL = Entry("a/data.pkl", pickle_of_a_tensor())
DATA = Entry("a/data/0", b"\1\2\3\4")
VERSION = Entry("a/version", b"3\n")
GOOD = [PKL, DATA, VERSION]
EVIL = Entry("a/data.pkl", b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R.")


def zip64(*values: int) -> bytes:
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


FULL = 0xFFFFFFFF

ATTACKS: dict[str, bytes] = {
    "no members": build([]),
    "no data.pkl": build([DATA, VERSION]),
    "two data.pkl of one name": build([PKL, replace(PKL, data=b"\x80\x02N."), DATA]),
    "an evil data.pkl behind the good one": build([PKL, DATA, EVIL]),
    "an evil data.pkl in front of the good one": build([EVIL, PKL, DATA]),
    "two folders with a data.pkl": build([PKL, DATA, replace(EVIL, name="b/data.pkl")]),
    "a data.pkl at the top": build([replace(PKL, name="data.pkl"), replace(DATA, name="data/0")]),
    "a data.pkl too deep": build([replace(PKL, name="a/b/data.pkl"), DATA]),
    "two storages of one name": build([PKL, DATA, replace(DATA, data=b"\5\6\7\x08")]),
    "a member in another folder": build([*GOOD, Entry("b/data/0", b"x")]),
    "a member at the top": build([*GOOD, Entry("README", b"x")]),
    "a path upwards": build([*GOOD, Entry("a/../../etc/passwd", b"x")]),
    "an absolute path": build([*GOOD, Entry("/etc/passwd", b"x")]),
    "a path of another system": build([*GOOD, Entry("a\\..\\x", b"x")]),
    "a path with a dot": build([*GOOD, Entry("a/./x", b"x")]),
    "a path with an empty part": build([*GOOD, Entry("a//x", b"x")]),
    "a name with a nul": build([*GOOD, Entry("a/x\0.txt", b"x")]),
    "an empty name": build([*GOOD, Entry("", b"x")]),
    "a name that is not a text": build([*GOOD, Entry("", b"x", raw_name=b"a/\xff\xfe")]),
    "a name that differs in its two places": build([PKL, replace(DATA, local_name="a/data/1"), VERSION]),
    "a shorter local name": build([replace(PKL, local_name="a/data"), DATA]),
    "a missing storage": build([PKL, VERSION]),
    "a storage that is too short": build([PKL, replace(DATA, data=b"\1\2\3")]),
    "a storage that is too long": build([PKL, replace(DATA, data=b"\1\2\3\4\5")]),
    "an encrypted pickle": build([replace(PKL, flags=1), DATA]),
    "an encrypted storage": build([PKL, replace(DATA, flags=1)]),
    "strong encryption": build([PKL, replace(DATA, flags=1 << 6)]),
    "masked headers": build([PKL, replace(DATA, flags=1 << 13)]),
    "patched data": build([PKL, replace(DATA, flags=1 << 5)]),
    "a compressed pickle": build([replace(PKL, method=8), DATA]),
    "a compressed storage": build([PKL, replace(DATA, method=8)]),
    "an unknown compression": build([PKL, replace(DATA, method=99)]),
    "a compressed pickle that says so only locally": build([replace(PKL, local_method=8), DATA]),
    "an encrypted pickle that says so only locally": build([replace(PKL, local_flags=1), DATA]),
    "a bomb of a claimed terabyte": build([replace(PKL, size=FULL, packed=FULL, extra=zip64(1 << 40, 1 << 40)), DATA]),
    "a bomb of claimed 2**64 bytes": build(
        [replace(PKL, size=FULL, packed=FULL, extra=zip64(2**64 - 1, 2**64 - 1)), DATA]
    ),
    "a pickle larger than the file": build([replace(PKL, size=1 << 20, packed=1 << 20), DATA]),
    "two sizes": build([PKL, replace(DATA, packed=3), VERSION]),
    "another size locally": build([replace(PKL, local_size=9), DATA]),
    "a wrong checksum of the pickle": build([replace(PKL, crc=7), DATA]),
    "a local header that is none": build([replace(PKL, local_magic=b"PK\3\5"), DATA]),
    "a member behind the directory": build([PKL, replace(DATA, header=10_000)]),
    "a member inside another": build([PKL, DATA, replace(VERSION, header=4)]),
    "two members in one place": build([PKL, DATA, Entry("a/data/1", b"\1\2\3\4", header=0)]),
    "members that overlap by a byte": build([PKL, replace(DATA, size=5, packed=5), VERSION]),
    "bytes behind a member": build([replace(PKL, behind=b"hidden"), DATA]),
    "many bytes behind a member": build([replace(PKL, behind=bytes(100_000)), DATA]),
    "bytes in front": build(GOOD, Ends(before=b"#!/bin/sh\n")),
    "a zip in front": build(GOOD, Ends(before=build([EVIL]))),
    "bytes in front of the directory": build(GOOD, Ends(between=b"hidden bytes")),
    "bytes behind the end": build(GOOD, Ends(after=b"x")),
    "a zip behind the end": build(GOOD, Ends(after=build([EVIL]))),
    "a comment": build(GOOD, Ends(comment=b"hello")),
    "a comment that hides an end": build(GOOD, Ends(comment=build([]))),
    "a comment that is not there": build(GOOD, Ends(comment_length=5)),
    "more members than entries": build(GOOD, Ends(count=4)),
    "fewer members than entries": build(GOOD, Ends(count=2)),
    "65535 members": build(GOOD, Ends(count=0xFFFF)),
    "another count on this disk": build(GOOD, Ends(here=1)),
    "a second disk": build(GOOD, Ends(disk=1)),
    "a member on a second disk": build([PKL, replace(DATA, disk=1)]),
    "a directory that begins too late": build(GOOD, Ends(start=FULL - 1)),
    "a directory that begins too early": build(GOOD, Ends(start=0)),
    "a directory of no bytes": build(GOOD, Ends(size=0)),
    "a directory of 4 GB": build(GOOD, Ends(size=FULL - 1)),
    "a directory that needs a 64-bit record": build(GOOD, Ends(start=FULL)),
    "64-bit record of another count": build(GOOD, Ends(wide=True, wide_count=2)),
    "64-bit record of huge count": build(GOOD, Ends(wide=True, count=0xFFFF, wide_count=1 << 60)),
    "64-bit record of another start": build(GOOD, Ends(wide=True, start=FULL, wide_start=1 << 60)),
    "64-bit record of another size": build(GOOD, Ends(wide=True, size=FULL, wide_size=(1 << 64) - 1)),
    "64-bit record elsewhere": build(GOOD, Ends(wide=True, wide_where=0)),
    "64-bit record far away": build(GOOD, Ends(wide=True, wide_where=1 << 62)),
    "64-bit record of odd length": build(GOOD, Ends(wide=True, wide_record=45)),
    "64-bit record of two disks": build(GOOD, Ends(wide=True, wide_disks=2)),
    "64-bit size without a value": build([PKL, replace(DATA, size=FULL, packed=FULL)]),
    "64-bit size with half a value": build([PKL, replace(DATA, size=FULL, packed=FULL, extra=b"\1\0\4\0abcd")]),
    "64-bit size with too few values": build([PKL, replace(DATA, size=FULL, packed=FULL, extra=zip64(4))]),
    "64-bit size whose field is cut": build([PKL, replace(DATA, size=FULL, packed=FULL, extra=b"\1\0\x10\0ab")]),
    "64-bit header far away": build([PKL, replace(DATA, header=FULL, extra=zip64(1 << 62))]),
    "a program": build([*GOOD, Entry("a/code/__torch__.py", b"x")]),
    "a program's constants": build([*GOOD, Entry("a/constants.pkl", b"\x80\x02N.")]),
    "a big-endian machine": build([*GOOD, Entry("a/byteorder", b"big")]),
    "no machine's byte order": build([*GOOD, Entry("a/byteorder", b"middle")]),
    "a byte order that is a novel": build([*GOOD, Entry("a/byteorder", b"little" * 100)]),
    "bytes behind the pickle": build([replace(PKL, data=PKL.data + b"N."), DATA]),
    "an empty pickle": build([replace(PKL, data=b""), DATA]),
    "a storage's key that leads elsewhere": build([replace(PKL, data=pickle_of_a_tensor(b"../data.pkl")), DATA]),
    "only an end": build([])[-22:],
    "only a beginning": b"PK\3\4",
    "only zeros behind a beginning": b"PK\3\4" + bytes(1000),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_archive_that_lies_is_let_in(tmp_path: Path, attack: str) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(ATTACKS[attack])
    with pytest.raises(Typed, match=r"x\.pt"):
        tensor_of(open_file(path).root)


def test_the_archive_that_the_attacks_vary_is_itself_good(tmp_path: Path) -> None:
    for ends in (Ends(), Ends(wide=True), Ends(wide=True, start=FULL, size=FULL, count=0xFFFF)):
        path = tmp_path / "x.pt"
        path.write_bytes(build(GOOD, ends))
        opened = open_file(path)
        assert read(tensor_of(opened.root)).tolist() == [1, 2, 3, 4]
        assert len(opened.seals()) == 3
    path.write_bytes(build([PKL, replace(DATA, size=FULL, packed=FULL, extra=zip64(4, 4)), VERSION]))
    assert read(tensor_of(open_file(path).root)).tolist() == [1, 2, 3, 4]


def test_a_storage_whose_local_header_lies_is_refused_when_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for lie in (
        replace(DATA, local_name="a/data/9"),
        replace(DATA, local_name="a/data/00"),
        replace(DATA, local_magic=b"nope"),
        replace(DATA, local_method=8),
        replace(DATA, behind=b"hidden"),
        replace(DATA, local_extra=b"FB\2\0ZZ", behind=b"x"),
    ):
        path.write_bytes(build([PKL, lie, VERSION]))
        opened = open_file(path)
        with pytest.raises(CorruptError, match="a/data/0"):
            tensor_of(opened.root)
        with pytest.raises(CorruptError, match="a/data/0"):
            opened.seals()


@pytest.mark.parametrize(
    "name", ["a/../../etc/passwd", "/etc/passwd", "a\\..\\x", "a/./x", "a//x", "a/x\0.txt", "a/\x1b[2J", ""]
)
def test_names_that_lead_elsewhere_are_called_so(name: str, tmp_path: Path) -> None:
    (tmp_path / "named.pt").write_bytes(build([*GOOD, Entry(name, b"x")]))
    with pytest.raises(UnsafeError, match="leads elsewhere"):
        open_file(tmp_path / "named.pt")


def test_data_that_patch_others_are_called_compressed(tmp_path: Path) -> None:
    (tmp_path / "patched.pt").write_bytes(build([PKL, replace(DATA, flags=1 << 5)]))
    with pytest.raises(UnsupportedError, match="compressed"):
        open_file(tmp_path / "patched.pt")


@pytest.mark.slow
def test_compressed_members_are_never_inflated(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", bytes(200 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UnsupportedError, match="compressed"):
        open_file(path)


def test_a_sparse_file_cannot_claim_a_huge_directory(tmp_path: Path) -> None:
    path = tmp_path / "sparse.pt"
    size = 1 << 40
    with open(path, "wb") as file:
        file.write(b"PK\3\4")
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("this file system has no files of a terabyte")
        file.seek(size)
        file.write(struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 0, 0, 0, 0, 1 << 33, 1 << 33, size - 64, 64))
        file.write(struct.pack("<4sIQI", b"PK\6\7", 0, size, 1))
        file.write(struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, FULL, FULL, 0))
    with pytest.raises(UnsafeError, match="would exhaust memory"):
        open_file(path)


def test_a_sparse_legacy_file_cannot_claim_a_huge_pickle(tmp_path: Path) -> None:
    path = tmp_path / "sparse.pt"
    for claim, kind in ((1 << 39, UnsafeError), (1 << 45, CorruptError)):
        with open(path, "wb") as file:
            file.write(b"\x80\x04\x8e" + struct.pack("<Q", claim))
            try:
                file.truncate(1 << 40)
            except OSError:
                pytest.skip("this file system has no files of a terabyte")
        with pytest.raises(kind):
            open_file(path)


# Damage to what torch wrote


def saved(legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(3), "n": 5}, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def outcome(path: Path, data: bytes) -> str:
    """Read everything there is to read."""
    path.write_bytes(data)
    try:
        opened = open_file(path)
        with Reader() as reader:
            if not all(seal_is_valid(seal, reader) for seal in opened.seals()):
                return "broken seal"
        value = opened.root
        if type(value) is not dict or list(value) != ["w", "n"] or value["n"] != 5:
            return "changed"
        if type(value["w"]) is not TensorRef:
            return "changed"
        return "same" if read(tensor_of(value["w"])).tolist() == [0, 1, 2] else "changed"
    except Typed as error:
        return next(kind.__name__ for kind in Typed if isinstance(error, kind))
    except CkptError as error:
        return f"unexpected {type(error).__name__}"


@pytest.mark.parametrize("legacy", [False, True])
def test_every_truncation_of_a_file_is_corrupt(tmp_path: Path, legacy: bool) -> None:
    data, path = saved(legacy), tmp_path / "x.pt"
    assert outcome(path, data) == "same"
    assert {outcome(path, data[:stop]) for stop in range(len(data))} == {"CorruptError"}


def test_a_flipped_bit_of_any_byte_of_an_archive_is_found_or_changes_nothing(tmp_path: Path) -> None:
    data, path = saved(), tmp_path / "x.pt"
    seen = set()
    for i in range(len(data)):
        bad = bytearray(data)
        bad[i] ^= 1 << i % 8
        seen.add(outcome(path, bytes(bad)))
    # "same": dates, padding and other fields that mean nothing to anybody.
    assert seen <= {"same", "CorruptError", "UnsafeError", "UnsupportedError", "broken seal"}
    assert {"same", "CorruptError", "broken seal"} <= seen


def test_a_flipped_bit_of_any_byte_of_a_legacy_file_gives_a_value_or_a_typed_error(tmp_path: Path) -> None:
    data, path = saved(legacy=True), tmp_path / "x.pt"
    seen = set()
    for i in range(len(data)):
        bad = bytearray(data)
        bad[i] ^= 1 << i % 8
        seen.add(outcome(path, bytes(bad)))
    assert seen <= {"same", "changed", "CorruptError", "UnsafeError", "UnsupportedError"}


MUTATIONS: dict[str, Callable[[random.Random, bytearray], None]] = {
    "a byte": lambda rng, data: data.__setitem__(rng.randrange(len(data)), rng.randrange(256)),
    "a field of ones": lambda rng, data: _overwrite(rng, data, b"\xff" * rng.choice([2, 4, 8])),
    "a field of zeros": lambda rng, data: _overwrite(rng, data, bytes(rng.choice([2, 4, 8]))),
    "a piece of itself": lambda rng, data: _overwrite(
        rng, data, bytes(data[(at := rng.randrange(len(data))) : at + 30])
    ),
    "a piece less": lambda rng, data: data.__delitem__(slice(at := rng.randrange(len(data)), at + rng.randint(1, 60))),
    "a piece more": lambda rng, data: data.__setitem__(slice(at := rng.randrange(len(data)), at), data[at - 40 : at]),
}


def _overwrite(rng: random.Random, data: bytearray, piece: bytes) -> None:
    at = rng.randrange(len(data))
    data[at : at + len(piece)] = piece


def test_archives_mutated_at_random_say_the_truth_or_are_refused(tmp_path: Path) -> None:
    rng, path = random.Random(11), tmp_path / "x.pt"
    seeds = [saved(), build(GOOD), *ATTACKS.values()]
    seen: dict[str, int] = {}
    for _ in range(4000):
        data = bytearray(seeds[0] if rng.random() < 0.7 else rng.choice(seeds))
        for _ in range(rng.randint(1, 3)):
            if data:
                rng.choice(list(MUTATIONS.values()))(rng, data)
        result = outcome(path, bytes(data))
        seen[result] = seen.get(result, 0) + 1
    assert not [kind for kind in seen if kind.startswith("unexpected")]
    assert {"CorruptError", "same"} <= set(seen)


def test_hostile_archive_opens_and_writes_no_other_file(tmp_path: Path) -> None:
    """A folder of attacks looks after reading as it looked before."""
    for i, data in enumerate(ATTACKS.values()):
        (tmp_path / f"{i}.pt").write_bytes(data)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        for name in before:
            with pytest.raises(Typed):
                tensor_of(open_file(name).root)
    finally:
        os.chdir(here)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
