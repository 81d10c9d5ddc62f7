"""What a chain holds: `chain.json`, which names its members in the order of their steps.

A member's folder that is not named is what a crash left behind. What we read is
hostile: every field is checked before it is believed.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ckpt_formats.containers import sealed_json
from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import ErrorFigures
from ckpt_formats.core.errors import CkptError, NotFound, Unsupported
from ckpt_formats.core.identity import unrecorded
from ckpt_formats.core.version import WRITTEN_BY

NAME = "chain.json"
VERSION = 2
"""Of a chain with segments; one without them is written as version 1."""
Kind = Literal["base", "delta"]
FOLDER = re.compile(r"step-\d{10,20}(\.\d{1,6})?")
"""What the folder of a member is called: its step, and a number if it was written again."""
SEGMENT_FOLDER = re.compile(r"gradients-\d{10,20}(\.\d{1,6})?")
"""What the folder of a segment is called: the step where it begins, and a number if that was taken."""
_MOST_BYTES = 1 << 28
_CONTENT = re.compile(r"blake2b-256:[0-9a-f]{64}")
_KINDS: dict[str, Kind] = {"base": "base", "delta": "delta"}


@dataclass(frozen=True)
class Member:
    """One state of the run."""

    folder: str
    kind: Kind
    step: int
    content: str
    parent: str | None
    """The content id of the member before, for a delta."""
    codecs: tuple[str, ...]
    raw_nbytes: int
    """Of all states, decoded."""
    stored_nbytes: int
    """Of all files."""
    time: str
    """When it was appended: UTC, ISO 8601."""
    losses: Mapping[str, ErrorFigures] = field(default_factory=dict)
    """By state, the worst of its tensors; empty if every bit is as it was saved."""

    @property
    def exact(self) -> bool:
        return not self.losses


@dataclass(frozen=True)
class LoggedSteps:
    """A segment of the log of gradients: the steps after `first`."""

    folder: str
    run: str
    first: int
    step: int | None
    """The last step, once the segment has ended; None while it may grow: the files tell it then."""
    parent: str | None
    """The content id of the member at `first`; None if the segment holds that state itself."""
    time: str
    """When it began: UTC, ISO 8601."""


@dataclass(frozen=True)
class ChainIndex:
    """All of `chain.json`."""

    members: tuple[Member, ...]
    segments: tuple[LoggedSteps, ...] = ()

    def upto(self, step: int) -> tuple[Member, ...]:
        """The members that the state at a step is made of: from its base to it. Empty if there is no such step."""
        at = next((i for i, member in enumerate(self.members) if member.step == step), None)
        if at is None:
            return ()
        begin = max(i for i in range(at + 1) if self.members[i].kind == "base")
        return self.members[begin : at + 1]


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
            "losses": {state: encode(loss) for state, loss in member.losses.items()},
        }
        for member in chain.members
    ]
    fields = {"format": "ckpt-chain", "version": VERSION if chain.segments else 1, "written_by": WRITTEN_BY}
    segments = {"segments": [asdict(segment) for segment in chain.segments]} if chain.segments else {}
    return sealed_json.dump({**fields, "members": members, **segments})


def load(path: Path) -> ChainIndex:
    """Read and check a `chain.json`. Raises `Corrupt`, or `Unsupported` for a version from the future."""
    with unrecorded():  # it grows while its states are read
        said = sealed_json.load(path, _MOST_BYTES, "the list of a chain")
    check = FieldReader(path)
    check.true(said.get("format") == "ckpt-chain", "format")
    if not is_natural(said.get("version")) or not 1 <= said["version"] <= VERSION:
        raise Unsupported(
            f"chain version {said.get('version')!r:.30}; this program reads {VERSION}", where=path, hint="Upgrade ckpt."
        )
    members = tuple(_member(member, check) for member in check.sequence(said, "members"))
    segments = tuple(_segment(row, check) for row in (check.sequence(said, "segments") if "segments" in said else ()))
    check.true(bool(members or segments), "members: there is none")
    check.true(len({member.folder for member in members}) == len(members), "members: a folder twice")
    check.true(not members or members[0].kind == "base", "members: the first is no base")
    for before, member in pairwise(members):
        check.true(before.step < member.step, f"members: step {member.step} after step {before.step}")
        fits = member.parent == (None if member.kind == "base" else before.content)
        check.true(fits, f"members: {member.folder} does not stand on {before.folder}")
    _check_segments(members, segments, check)
    return ChainIndex(members, segments)


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


def _segment(row: Any, check: FieldReader) -> LoggedSteps:
    folder, run = check.text(row, "folder"), check.text(row, "run")
    check.true(SEGMENT_FOLDER.fullmatch(folder) is not None, f"folder {folder!r:.100}")
    parent = check.get(row, "parent")
    check.true(parent is None or _CONTENT.fullmatch(str(parent)) is not None, "a content id")
    step = None if check.get(row, "step") is None else check.natural(row, "step")
    return LoggedSteps(folder, run, check.natural(row, "first"), step, parent, check.text(row, "time"))


def folders_by_content(run: Path) -> Mapping[str, Path]:
    """Where a chain has which content; nothing if the folder is no chain that can be read."""
    try:
        members = load(run / NAME).members
    except CkptError:
        return {}
    return {member.content: run / member.folder for member in reversed(members)}


def read(run: Path) -> ChainIndex:
    """The chain in a folder. Raises `NotFound` if it is none."""
    if not (run / NAME).is_file():
        raise NotFound("not a chain: it has no chain.json", where=run, hint="`ckpt append CHAIN CKPT` begins one.")
    return load(run / NAME)


def _member(said: Any, check: FieldReader) -> Member:
    folder, kind, content = (check.text(said, key) for key in ("folder", "kind", "content"))
    check.true(FOLDER.fullmatch(folder) is not None, f"folder {folder!r:.100}")
    check.true(kind in _KINDS, f"kind {kind!r:.30}")
    parent = check.get(said, "parent")
    for id in (content, *([] if parent is None else [parent])):
        check.true(isinstance(id, str) and _CONTENT.fullmatch(id) is not None, "a content id")
    step, raw, stored = (check.natural(said, key) for key in ("step", "raw_nbytes", "stored_nbytes"))
    codecs = check.texts(check.sequence(said, "codecs"), "codecs")
    losses = {str(state): check.values(check.mapping(said, "losses"), state) for state in check.mapping(said, "losses")}
    return Member(folder, _KINDS[kind], step, content, parent, codecs, raw, stored, check.text(said, "time"), losses)
