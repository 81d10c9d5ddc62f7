"""What says which steps are published: a record for each step and each fold, and the head. All may be hostile."""

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import xxhash

from ckpt_formats.containers import sealed_json
from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.core.claims import MAX_RANKS
from ckpt_formats.core.errors import CorruptError, InvalidArgumentError, UnsupportedError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.values import is_natural
from ckpt_formats.core.version import WRITTEN_BY

FOLDER = "published"
HEAD = f"{FOLDER}/head.json"
VERSION = 1
MAX_HEAD = 1 << 12
"""Bytes of a head."""
MAX_RECORD = 1 << 28
"""Bytes of a record: about 250 for each rank."""
MAX_FOLDS = 64
"""Folds that a head names."""
MAX_EPOCH = 10**8 - 1
MAX_STEP = 10**18 - 1
_STEP = re.compile(r"steps/e(\d{4,8})-(\d{10,18})")
_FOLD = re.compile(r"folds/e(\d{4,8})-(\d{10,18})-(\d{10,18})")
_HASH = re.compile(r"[0-9a-f]{32}")
OBJECT_KEY = re.compile(rf"{FOLDER}/objects/([0-9a-f]{{32}})")
"""The key of an object, whose name is the hash of its bytes."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(rb"hmac-sha256:([0-9a-f]{64})\n")
_MIN_KEY, _MAX_KEY = 16, 1 << 10
"""Bytes of a key."""
_SIGNATURE_NBYTES = len("hmac-sha256:\n") + 64


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """The XXH3-128 of bytes as 32 hexadecimal digits: the name of an object, and how a record names another."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, order=True)
class StepName:
    """A published step. Steps rise within an epoch; a run that goes back begins another epoch."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"e{self.epoch:04d}-{self.step:010d}"

    @property
    def key(self) -> str:
        """The key of its record in the chain."""
        return f"{FOLDER}/steps/{self}.json"

    def fold_key(self, first: int) -> str:
        """The key of the fold from the step `first` of the same epoch to this one."""
        return f"{FOLDER}/folds/e{self.epoch:04d}-{first:010d}-{self.step:010d}.json"


def object_key(digest: str) -> str:
    """The key of an object by the hash of its bytes."""
    return f"{FOLDER}/objects/{digest}"


@dataclass(frozen=True)
class RecordRef:
    """A step's record as another one names it."""

    name: StepName
    hash: str
    """The XXH3-128 of the record's bytes."""


@dataclass(frozen=True)
class ObjectRef:
    """An object as a record names it."""

    hash: str
    nbytes: int
    sha256: str | None = None
    """Of the same bytes, if the record is signed: an XXH3 finds accidents, and no forgeries."""

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview, is_signed: bool = False) -> "ObjectRef":
        """The reference to an object with these bytes."""
        return cls(hash_bytes(data), len(data), sha256(data).hexdigest() if is_signed else None)

    @property
    def key(self) -> str:
        return object_key(self.hash)

    def check(self, data: bytes | bytearray | memoryview, where: str) -> None:
        """Raise `CorruptError` unless these are the bytes of the object."""
        if len(data) != self.nbytes or hash_bytes(data) != self.hash:
            raise CorruptError("the object does not have the bytes that its name states: it was damaged", where=where)
        if self.sha256 is not None and sha256(data).hexdigest() != self.sha256:
            raise CorruptError("the object is not the one that was signed", where=where)

    def to_json(self) -> list[Any]:
        return [self.hash, self.nbytes, *([] if self.sha256 is None else [self.sha256])]

    @classmethod
    def from_json(cls, row: Any, check: FieldReader) -> "ObjectRef":
        valid = isinstance(row, list) and len(row) in (2, 3) and is_natural(row[1]) and _matches(_HASH, row[0])
        check.true(valid and (len(row) == 2 or _matches(_SHA256, row[2])), "an object's hash and size")
        return cls(*row)


@dataclass(frozen=True)
class RankShare:
    """What one rank has stored of a step."""

    object: ObjectRef
    state: str
    """The XXH3-128 of the digests of all chunks of the rank, after the step."""


def state_of_ranks(states: Iterable[str]) -> str:
    """The hash of a state by those of all ranks, in their order: 32 hexadecimal digits each."""
    return hash_bytes(b"".join(bytes.fromhex(one) for one in states))


@dataclass(frozen=True)
class StepRecord:
    """A published step: a base, or deltas against an earlier step. A fold is several steps as one delta."""

    name: StepName
    parent: RecordRef | None
    """The step before the deltas. None: the step is a base, whose chunks are coded alone."""
    model: ObjectRef
    shares: tuple[RankShare, ...]
    """By rank."""
    time: str
    """When it was published: UTC, ISO 8601. Only ages are computed from it."""
    continues: RecordRef | None = None
    """Of the first step of an epoch: the last step of the epoch before that the run continued from, if it is known."""
    same_as: RecordRef | None = None
    """Of a fold: the step itself, which has the same state."""

    @property
    def state(self) -> str:
        """The XXH3-128 of the ranks' states: by it, two states are known to be equal."""
        return state_of_ranks(one.state for one in self.shares)

    @property
    def is_base(self) -> bool:
        return self.parent is None

    @property
    def nbytes(self) -> int:
        """The bytes of its objects."""
        return sum(one.object.nbytes for one in self.shares)

    @property
    def key(self) -> str:
        """The key of the record."""
        if self.same_as is None or self.parent is None:
            return self.name.key
        return self.name.fold_key(self.parent.name.step)

    def to_bytes(self, signing_key: bytes | None = None) -> bytes:
        """The record as bytes, signed if there is a key."""
        fields: dict[str, Any] = {
            "format": "ckpt-published-step",
            "version": VERSION,
            "written_by": WRITTEN_BY,
            "epoch": self.name.epoch,
            "step": self.name.step,
            "time": self.time,
            "parent": _ref_to_json(self.parent),
            "model": self.model.to_json(),
            "state": self.state,
        }
        for key, ref in (("continues", self.continues), ("same_as", self.same_as)):
            if ref is not None:
                fields[key] = _ref_to_json(ref)
        return sign(sealed_json.dump({**fields, "ranks": [_share_to_json(one) for one in self.shares]}), signing_key)

    @classmethod
    def from_bytes(cls, data: bytes, where: Path, signing_key: bytes | None = None) -> "StepRecord":
        """The record in bytes that came from `where`.

        Raises `CorruptError` if they are damaged, or not signed with the key if there is one; `UnsupportedError` for
        another version.
        """
        fields, check = _parse(data, where, signing_key, "ckpt-published-step", "the record of a published step")
        name = _name(check.natural(fields, "epoch"), check.natural(fields, "step"), check)
        rows = check.sequence(fields, "ranks")
        check.true(0 < len(rows) <= MAX_RANKS, "ranks: their number")
        record = cls(
            name,
            _ref_of_json(check.get(fields, "parent"), check),
            ObjectRef.from_json(check.get(fields, "model"), check),
            tuple(_share_of_json(row, check) for row in rows),
            check.text(fields, "time"),
            _ref_of_json(fields.get("continues"), check),
            _ref_of_json(fields.get("same_as"), check),
        )
        check.true(_is_time(record.time), "time: not a time in ISO 8601 with its zone")
        parent, same = record.parent, record.same_as
        if parent is not None:
            check.true(parent.name.epoch == name.epoch and parent.name.step < name.step, "parent: not an earlier step")
        check.true(same is None or (same.name == name and parent is not None), "same_as: not the step of the fold")
        check.true(record.state == check.text(fields, "state"), "state: not that of the ranks")
        if signing_key is not None:
            objects = [record.model, *(one.object for one in record.shares)]
            check.true(all(one.sha256 is not None for one in objects), "an object without its SHA-256")
        return record


@dataclass(frozen=True)
class Head:
    """The last published step. The only object of a published chain that is replaced."""

    record: RecordRef
    base: StepName
    """The base of the epoch from which the last step is reached."""
    folds: tuple[tuple[int, int], ...] = ()
    """The folds of the epoch: the steps before and after each. They rise by the second."""
    base_nbytes: int = 0
    """The bytes of the base's objects."""
    delta_nbytes: int = 0
    """The bytes of the objects of all steps after the base."""

    def to_bytes(self, signing_key: bytes | None = None) -> bytes:
        """The head as bytes, signed if there is a key."""
        name = self.record.name
        fields = {
            "format": "ckpt-published-head",
            "version": VERSION,
            "written_by": WRITTEN_BY,
            "epoch": name.epoch,
            "step": name.step,
            "record": self.record.hash,
            "base": self.base.step,
            "base_nbytes": self.base_nbytes,
            "delta_nbytes": self.delta_nbytes,
        }
        return sign(sealed_json.dump({**fields, "folds": [list(one) for one in self.folds[-MAX_FOLDS:]]}), signing_key)

    @classmethod
    def from_bytes(cls, data: bytes, where: Path, signing_key: bytes | None = None) -> "Head":
        """The head in bytes that came from `where`. Raises as `StepRecord.from_bytes`."""
        fields, check = _parse(data, where, signing_key, "ckpt-published-head", "the head of a published chain")
        name = _name(check.natural(fields, "epoch"), check.natural(fields, "step"), check)
        base = _name(name.epoch, check.natural(fields, "base"), check)
        check.true(base.step <= name.step, "base: after the last step")
        check.true(_matches(_HASH, check.get(fields, "record")), "record: not a hash")
        folds = check.sequence(fields, "folds")
        check.true(len(folds) <= MAX_FOLDS, "folds: their number")
        for one in folds:
            valid = isinstance(one, list) and len(one) == 2 and all(map(is_natural, one))
            check.true(valid and one[0] < one[1] <= name.step, "folds: not the steps before and after one")
        nbytes = (check.natural(fields, key) for key in ("base_nbytes", "delta_nbytes"))
        return cls(RecordRef(name, fields["record"]), base, tuple((one[0], one[1]) for one in folds), *nbytes)


def read_signing_key(path: Path) -> bytes:
    """The key in a file: all its bytes, but for line ends after them.

    Raises `InvalidArgumentError` unless they are 16 to 1,024 bytes, `NotFoundError` if there is no such file.
    """
    key = read_whole(path, _MAX_KEY).rstrip(b"\r\n")
    if len(key) < _MIN_KEY:
        raise InvalidArgumentError(
            f"a key of {len(key)} bytes is too short: it has at least {_MIN_KEY}",
            where=path,
            hint="Make one: openssl rand -hex 32 > FILE",
        )
    return key


def sign(data: bytes, signing_key: bytes | None) -> bytes:
    """Append the HMAC-SHA256 of the bytes, if there is a key."""
    if signing_key is None:
        return data
    return data + b"hmac-sha256:%s\n" % hmac.new(signing_key, data, sha256).hexdigest().encode()


def unsigned(data: bytes, where: Path | str, signing_key: bytes | None) -> bytes:
    """The bytes without their signature, which is checked if there is a key. Raises `CorruptError`."""
    signature = _SIGNATURE.fullmatch(data[-_SIGNATURE_NBYTES:])
    content = data if signature is None else data[:-_SIGNATURE_NBYTES]
    if signing_key is not None:
        right = hmac.new(signing_key, content, sha256).hexdigest().encode()
        if signature is None or not hmac.compare_digest(signature[1], right):
            raise CorruptError(
                "not signed with this key",
                where=where,
                hint="Give the key with which the run publishes. If it is that key, somebody else has written here.",
            )
    return content


def parse_name(name: str) -> StepName | None:
    """The step in the name of a record in the folder of steps, such as `e0003-0000001234`; None for another name."""
    match = _STEP.fullmatch(f"steps/{name}")
    return None if match is None else StepName(int(match[1]), int(match[2]))


def parse_fold_name(name: str) -> tuple[StepName, int] | None:
    """The step after a fold, and the number of the step before it, by the name of its record; None for another name."""
    match = _FOLD.fullmatch(f"folds/{name}")
    return None if match is None else (StepName(int(match[1]), int(match[3])), int(match[2]))


def _parse(
    data: bytes, where: Path, signing_key: bytes | None, format: str, kind: str
) -> tuple[dict[str, Any], FieldReader]:
    fields, check = sealed_json.parse(unsigned(data, where, signing_key), where, kind), FieldReader(where)
    check.true(fields.get("format") == format, "format")
    version = fields.get("version")
    if not is_natural(version) or version != VERSION:
        raise UnsupportedError(
            f"{kind}: version {version!r:.30}; this program reads version {VERSION}", where=where, hint="Upgrade ckpt."
        )
    return fields, check


def _name(epoch: int, step: int, check: FieldReader) -> StepName:
    check.true(epoch <= MAX_EPOCH and step <= MAX_STEP, "epoch or step: too large")
    return StepName(epoch, step)


def _ref_to_json(ref: RecordRef | None) -> list[Any] | None:
    return None if ref is None else [ref.name.epoch, ref.name.step, ref.hash]


def _ref_of_json(row: Any, check: FieldReader) -> RecordRef | None:
    if row is None:
        return None
    valid = isinstance(row, list) and len(row) == 3 and all(map(is_natural, row[:2])) and _matches(_HASH, row[2])
    check.true(valid, "not the epoch, step and hash of a record")
    return RecordRef(_name(row[0], row[1], check), row[2])


def _share_to_json(share: RankShare) -> dict[str, Any]:
    return {"object": share.object.to_json(), "state": share.state}


def _share_of_json(row: Any, check: FieldReader) -> RankShare:
    check.true(isinstance(row, Mapping), "ranks: not an object")
    check.true(_matches(_HASH, check.get(row, "state")), "ranks: a state's hash")
    return RankShare(ObjectRef.from_json(check.get(row, "object"), check), row["state"])


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
