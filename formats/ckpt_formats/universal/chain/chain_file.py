"""The index of a chain: `chain.json`, which names its members in the order of their steps.

A chain is one of three kinds: states of one run, a published chain, or a family of models, whose members have names,
and of which each delta names any earlier member as its parent.

The folder of a member that is not named is a leftover of a crash. The file may be hostile: every field is checked
before it is used.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ckpt_formats.containers import sealed_json
from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import ErrorFigures
from ckpt_formats.core.claims import MAX_LIST, MAX_PACKS, MAX_PATH
from ckpt_formats.core.errors import CkptError, NotFoundError, UnsupportedError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.identity import unrecorded
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.state_names import from_stored, to_stored
from ckpt_formats.core.values import is_natural
from ckpt_formats.core.version import WRITTEN_BY

NAME = "chain.json"
VERSION = 1
PUBLISHED_VERSION = 2
"""The version of the list of a published chain, which has no members: ckpt 1.0.0 refuses it."""
FAMILY_VERSION = 3
"""The version of the list of a family of models: ckpt 1.0.0 refuses it, because it takes the member before a delta for
the delta's parent."""
Kind = Literal["base", "delta"]
FOLDER = re.compile(r"step-\d{10,20}(\.\d{1,6})?")
"""The name of a member's folder: its step, and a number if it was written again."""
SEGMENT_FOLDER = re.compile(r"gradients-\d{10,20}(\.\d{1,6})?")
"""The name of a segment's folder: the step where it begins, and a number if that name existed already."""
TIP_FOLDER = re.compile(r"tip-\d{10,20}")
"""The name of the folder of a tip: the step of its state."""
PIECES_FOLDER = re.compile(r"pieces-\d{10,20}\.[0-9a-f]{8}")
"""The name of the folder of a base that a recorder copies: the step where it begins, and a part of the run's name."""
MODEL_NAME = re.compile(r"(?!last\Z)(?=.*[A-Za-z_])[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""The name of a model of a family: no path, and neither a step nor `last`."""
_CONTENT = re.compile(r"blake2b-256:[0-9a-f]{64}")
_KINDS: dict[str, Kind] = {"base": "base", "delta": "delta"}


@dataclass(frozen=True)
class SharedPacks:
    """Packs of an earlier member, in which states of a later one lie."""

    folder: str
    packs: tuple[tuple[int, int], ...]
    """The numbers of the packs, as runs: the first of each, and how many. They rise."""
    nbytes: int
    """The bytes of these states, as they are stored."""

    def has(self, number: int) -> bool:
        """Whether a pack is one of them."""
        return any(first <= number < first + count for first, count in self.packs)


@dataclass(frozen=True)
class Member:
    """One state of the run, or one model of a family."""

    folder: str
    kind: Kind
    step: int
    """The step of the run; in a family, the number of the model, counted from 1 in the order of appending."""
    content: str
    parent: str | None
    """Of a delta: the content id of the previous member, or, in a family, of any earlier one. None for a base."""
    codecs: tuple[str, ...]
    raw_nbytes: int
    """The bytes of all states, decoded."""
    stored_nbytes: int
    """The bytes of all files."""
    time: str
    """The time when it was appended: UTC, ISO 8601."""
    errors: Mapping[str, ErrorFigures] = field(default_factory=dict)
    """By name of the state, the worst figures of its tensors; empty if all bits are as they were saved."""
    shared: tuple["SharedPacks", ...] = ()
    """Where its states lie that did not change: packs of earlier members."""
    name: str | None = None
    """The name of a model of a family; None in other chains."""

    __repr__ = short_repr

    @property
    def label(self) -> str:
        """What messages call this member."""
        return f"step {self.step}" if self.name is None else self.name

    @property
    def exact(self) -> bool:
        return not self.errors

    @property
    def shared_nbytes(self) -> int:
        """The bytes of its states that lie in packs of earlier members."""
        return sum(one.nbytes for one in self.shared)


@dataclass(frozen=True)
class LoggedSteps:
    """A segment of the log of gradients: the steps after `first`."""

    folder: str
    run: str
    first: int
    step: int | None
    """The last step, once the segment has ended. None while it may grow: then its files state it."""
    parent: str | None
    """The content id of the member at `first`; None if the segment stores that state itself."""
    time: str
    """The time when it began: UTC, ISO 8601."""

    __repr__ = short_repr


@dataclass(frozen=True)
class AppendedFrom:
    """The checkpoint that the last member was appended from."""

    content: str
    """The content id of that member."""
    path: str
    """Relative to the folder of the chain."""


@dataclass(frozen=True)
class Tip:
    """The last member's state, stored once more without a parent: so it can be read alone."""

    folder: str
    content: str
    """The content id of that member."""
    stored_nbytes: int
    """The bytes of all files."""

    __repr__ = short_repr


@dataclass(frozen=True)
class ChainIndex:
    """All of `chain.json`."""

    members: tuple[Member, ...]
    segments: tuple[LoggedSteps, ...] = ()
    appended_from: AppendedFrom | None = None
    """Where the last member's values can be read without a replay, as long as they are there; None: not known."""
    tip: Tip | None = None
    is_published: bool = False
    """Whether a run publishes its weights here: what there is is said by the head, and there are no members."""
    is_family: bool = False
    """Whether the members are models of a family, not steps of a run."""

    __repr__ = short_repr

    def with_members(self, members: tuple[Member, ...], segments: tuple[LoggedSteps, ...]) -> "ChainIndex":
        """Other members and segments. What is known of the last member stays if it has the same content."""
        if self.is_family:
            return ChainIndex(members, is_family=True)
        if not members or not self.members or members[-1].content != self.members[-1].content:
            return ChainIndex(members, segments)
        return ChainIndex(members, segments, self.appended_from, self.tip)

    def shared_packs(self) -> Mapping[str, list[SharedPacks]]:
        """The packs in which states of other members lie, by folder. Their own member may have been removed."""
        result: dict[str, list[SharedPacks]] = {}
        for member in self.members:
            for one in member.shared:
                result.setdefault(one.folder, []).append(one)
        return result

    def folders_of(self, member: Member) -> set[str]:
        """The folders that a member needs: its own, those of its ancestors, and those in which states of these lie."""
        needed = self.upto(member.step)
        return {one.folder for one in needed} | {shared.folder for one in needed for shared in one.shared}

    def bases_of(self, logged: "LoggedSteps") -> list[Member]:
        """The members from which a segment can be followed, in the order of their steps."""
        last = float("inf") if logged.step is None else logged.step
        return [
            one
            for one in self.members
            if logged.first <= one.step <= last and (one.exact or one.content == logged.parent)
        ]

    def base_of(self, logged: "LoggedSteps") -> tuple[Member, ...]:
        """The last base from which a segment can be followed, after all that it needs; none if there is none."""
        bases = self.bases_of(logged)
        return self.upto(bases[-1].step) if bases else ()

    def upto(self, step: int) -> tuple[Member, ...]:
        """The members from its base to the one at this step. Empty if there is no such step."""
        at = next((i for i, member in enumerate(self.members) if member.step == step), None)
        if at is None:
            return ()
        if self.is_family:
            return self._line_of(self.members[at])
        begin = max(i for i in range(at + 1) if self.members[i].kind == "base")
        return self.members[begin : at + 1]

    def _line_of(self, member: Member) -> tuple[Member, ...]:
        """A model of a family and its ancestors, the base first."""
        line, by_content = [member], {one.content: one for one in self.members}
        while (parent := line[-1].parent) is not None:  # it ends: `parse` checks that each parent comes earlier
            line.append(by_content[parent])
        return tuple(line[::-1])

    def member_named(self, name: str) -> Member | None:
        """The model of a family by its name; None if there is none."""
        return next((member for member in self.members if member.name == name), None)

    def parent_of(self, member: Member) -> Member | None:
        """The member against which a delta is stored; None for a base."""
        return next((one for one in self.members if one.content == member.parent), None)


def step_of(folder: str) -> int | None:
    """The step in the name of a member's folder; None for another name.

    >>> step_of("step-0000001020.1")
    1020
    """
    is_member = folder.isascii() and FOLDER.fullmatch(folder) is not None
    return int(folder.removeprefix("step-").partition(".")[0]) if is_member else None


def dump(chain: ChainIndex) -> bytes:
    """The bytes of `chain.json`."""
    members = [
        {
            "folder": member.folder,
            "kind": member.kind,
            "step": member.step,
            "content": member.content,
            "parent": member.parent,
            "codecs": list(member.codecs),
            "raw_nbytes": member.raw_nbytes,
            "stored_nbytes": member.stored_nbytes,
            "time": member.time,
            "errors": {to_stored(state): encode(error) for state, error in member.errors.items()},
            **({"shared": [asdict(one) for one in member.shared]} if member.shared else {}),
            **({} if member.name is None else {"name": member.name}),
        }
        for member in chain.members
    ]
    fields: dict[str, Any] = {"format": "ckpt-chain", "version": VERSION, "written_by": WRITTEN_BY}
    if chain.is_published:
        return sealed_json.dump({**fields, "version": PUBLISHED_VERSION, "published": True})
    if chain.is_family:
        return sealed_json.dump({**fields, "version": FAMILY_VERSION, "family": True, "members": members})
    segments = {"segments": [asdict(segment) for segment in chain.segments]} if chain.segments else {}
    source = {} if chain.appended_from is None else {"appended_from": asdict(chain.appended_from)}
    tip = {} if chain.tip is None else {"tip": asdict(chain.tip)}
    return sealed_json.dump({**fields, "members": members, **segments, **source, **tip})


def load(path: Path) -> ChainIndex:
    """Read and check a `chain.json`.

    Raises `CorruptError`, or `UnsupportedError` for a version that this program does not know.
    """
    with unrecorded():  # a chain may grow while its states are read
        content = read_whole(path, MAX_LIST)
    return parse(content, path)


def parse(content: bytes, path: Path) -> ChainIndex:
    """The list in the bytes of a `chain.json`, which is at `path`. Raises as `load`."""
    fields = sealed_json.parse(content, path, "the list of a chain")
    check = FieldReader(path)
    check.true(fields.get("format") == "ckpt-chain", "format")
    version = fields.get("version")
    if not is_natural(version) or version not in (VERSION, PUBLISHED_VERSION, FAMILY_VERSION):
        raise UnsupportedError(
            f"chain version {version!r:.30}; this program reads versions {VERSION} to {FAMILY_VERSION}",
            where=path,
            hint="Upgrade ckpt.",
        )
    if version == PUBLISHED_VERSION:
        check.true(fields.get("published") is True and not fields.get("members"), "not a published chain")
        return ChainIndex((), is_published=True)
    if version == FAMILY_VERSION:
        return _family(fields, check)
    members = tuple(_member(member, check) for member in check.sequence(fields, "members"))
    rows = check.sequence(fields, "segments") if "segments" in fields else ()
    segments = tuple(_segment(row, check) for row in rows)
    check.true(bool(members or segments), "members: there are none")
    check.true(len({member.folder for member in members}) == len(members), "members: a folder twice")
    check.true(not members or members[0].kind == "base", "members: the first is not a base")
    for before, member in pairwise(members):
        check.true(before.step < member.step, f"members: step {member.step} after step {before.step}")
        fits = member.parent == (None if member.kind == "base" else before.content)
        check.true(fits, f"members: the parent of {member.folder} is not {before.folder}")
    _check_segments(members, segments, check)
    return ChainIndex(members, segments, _appended_from(fields, check), _tip(fields, check))


def _family(fields: Any, check: FieldReader) -> ChainIndex:
    """The list of a family of models."""
    check.true(fields.get("family") is True and not fields.get("segments"), "not a family of models")
    members, earlier = list[Member](), set[str]()
    for row in check.sequence(fields, "members"):
        member, name = _member(row, check), check.text(row, "name")
        check.true(MODEL_NAME.fullmatch(name) is not None, f"members: name {name!r:.150}")
        after = not members or members[-1].step < member.step
        check.true(after, f"members: number {member.step} after number {members[-1].step if members else 0}")
        fits = member.parent is None if member.kind == "base" else member.parent in earlier
        check.true(fits, f"members: the parent of {name} is not an earlier member")
        check.true(member.content not in earlier, f"members: the content of {name} twice")
        earlier.add(member.content)
        members.append(replace(member, name=name))
    check.true(bool(members), "members: there are none")
    check.true(len({member.name for member in members}) == len(members), "members: a name twice")
    check.true(len({member.folder for member in members}) == len(members), "members: a folder twice")
    return ChainIndex(tuple(members), is_family=True)


def is_empty(content: bytes, path: Path) -> bool:
    """Whether the bytes of a `chain.json` are those of a chain that is about to begin: there is nothing in it yet."""
    try:
        fields = sealed_json.parse(content, path, "the list of a chain")
    except CkptError:
        return False
    return fields.get("format") == "ckpt-chain" and fields.get("members") == [] and not fields.get("segments")


def _check_segments(members: tuple[Member, ...], segments: tuple[LoggedSteps, ...], check: FieldReader) -> None:
    check.true(len({one.folder for one in segments}) == len(segments), "segments: a folder twice")
    contents = {member.step: member.content for member in members}
    for before, segment in zip((None, *segments), segments, strict=False):
        if before is not None:
            after = before.step is not None and before.step <= segment.first
            check.true(after, f"segments: {segment.folder} begins before {before.folder} ends")
        at_first = segment.parent is None or contents.get(segment.first) == segment.parent
        check.true(at_first, f"segments: {segment.folder} does not begin at a member")
        check.true(segment.step is None or segment.first <= segment.step, f"segments: {segment.folder} ends too early")


def _appended_from(fields: Any, check: FieldReader) -> AppendedFrom | None:
    if fields.get("appended_from") is None:
        return None
    source = check.mapping(fields, "appended_from")
    content, path = check.text(source, "content"), check.text(source, "path")
    check.true(_CONTENT.fullmatch(content) is not None, "appended_from: a content id")
    check.true(0 < len(path) <= MAX_PATH and "\0" not in path, f"appended_from: path {path!r:.100}")
    return AppendedFrom(content, path)


def _tip(fields: Any, check: FieldReader) -> Tip | None:
    if fields.get("tip") is None:
        return None
    tip = check.mapping(fields, "tip")
    folder, content = check.text(tip, "folder"), check.text(tip, "content")
    check.true(TIP_FOLDER.fullmatch(folder) is not None, f"tip: folder {folder!r:.100}")
    check.true(_CONTENT.fullmatch(content) is not None, "tip: a content id")
    return Tip(folder, content, check.natural(tip, "stored_nbytes"))


def _segment(row: Any, check: FieldReader) -> LoggedSteps:
    folder, run = check.text(row, "folder"), check.text(row, "run")
    check.true(SEGMENT_FOLDER.fullmatch(folder) is not None, f"folder {folder!r:.100}")
    parent = check.get(row, "parent")
    check.true(parent is None or _CONTENT.fullmatch(str(parent)) is not None, "a content id")
    step = None if check.get(row, "step") is None else check.natural(row, "step")
    return LoggedSteps(folder, run, check.natural(row, "first"), step, parent, check.text(row, "time"))


def folders_by_content(run: Path) -> Mapping[str, Path]:
    """The folders of a chain's members by content id; empty if the folder is not a chain that can be read."""
    try:
        members = load(run / NAME).members
    except CkptError:
        return {}
    return {member.content: run / member.folder for member in reversed(members)}


def read(run: Path) -> ChainIndex:
    """The chain in a folder. Raises `NotFoundError` if the folder is not a chain, or is not there."""
    if not (run / NAME).is_file():
        what = "not a chain: it has no chain.json" if run.exists() else "there is nothing at this path"
        chain = run.with_name(run.name.partition("@")[0] or run.name)
        is_state = chain != run and (chain / NAME).is_file()
        hint = f"Name the whole chain: {chain}" if is_state else "`ckpt append CHAIN CKPT` begins a chain."
        raise NotFoundError("a state of a chain, not a chain" if is_state else what, where=run, hint=hint)
    return load(run / NAME)


def _member(fields: Any, check: FieldReader) -> Member:
    folder, kind, content = (check.text(fields, key) for key in ("folder", "kind", "content"))
    check.true(FOLDER.fullmatch(folder) is not None, f"folder {folder!r:.100}")
    check.true(kind in _KINDS, f"kind {kind!r:.30}")
    parent = check.get(fields, "parent")
    for id in (content, *([] if parent is None else [parent])):
        check.true(isinstance(id, str) and _CONTENT.fullmatch(id) is not None, "a content id")
    step, raw, stored = (check.natural(fields, key) for key in ("step", "raw_nbytes", "stored_nbytes"))
    codecs = check.texts(check.sequence(fields, "codecs"), "codecs")
    stated_errors = check.mapping(fields, "errors")
    errors = {from_stored(str(state)): check.values(stated_errors, state) for state in stated_errors}
    shared = tuple(_shared(row, step, check) for row in check.sequence(fields, "shared")) if "shared" in fields else ()
    check.true(len({one.folder for one in shared}) == len(shared), "shared: a folder twice")
    time = check.text(fields, "time")
    return Member(folder, _KINDS[kind], step, content, parent, codecs, raw, stored, time, errors, shared)


def _shared(fields: Any, step: int, check: FieldReader) -> SharedPacks:
    folder, packs = check.text(fields, "folder"), list[tuple[int, int]]()
    own = step_of(folder)
    check.true(own is not None and own < step, f"shared: {folder!r:.100} is not an earlier member")
    for run in check.sequence(fields, "packs"):
        valid = isinstance(run, list) and len(run) == 2 and all(map(is_natural, run))
        check.true(valid and run[1] > 0 and sum(run) <= MAX_PACKS, "shared: numbers of packs")
        check.true(not packs or run[0] > sum(packs[-1]), "shared: the numbers of packs do not rise")
        packs.append((run[0], run[1]))
    check.true(bool(packs), "shared: no packs")
    return SharedPacks(folder, tuple(packs), check.natural(fields, "nbytes"))
