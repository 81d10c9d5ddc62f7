"""Writing one state as a member of a chain, or as a delta on its own."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path

from ckpt_cli import work
from ckpt_cli.pipeline import Effort, Outcome
from ckpt_codecs import CodecError
from ckpt_codecs.delta import DeltaCodec
from ckpt_codecs.registry import DEFAULT_DELTA, parse_delta
from ckpt_formats.base import Checkpoint, Goal, Loss, Parameter, WritableFormat
from ckpt_formats.chain.index import Member
from ckpt_formats.coding import Coding
from ckpt_formats.dtypes import DTYPES
from ckpt_formats.errors import Unsupported
from ckpt_formats.files import read_whole
from ckpt_formats.rules import safe_pattern
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.delta import Delta
from ckpt_formats.universal.loss import worst
from ckpt_formats.universal.manifest import Manifest, Parent

AUTO = "auto"


@dataclass(frozen=True)
class Manner:
    """How states are to be coded."""

    codec: DeltaCodec
    exact: tuple[str, ...] = ()
    """Patterns of the names of parameters in which nothing may be lost."""
    check: bool = True

    @classmethod
    def of(cls, codec: str = AUTO, exact: Sequence[str] = (), check: bool = True) -> "Manner":
        """As the user typed it. Raises `Unsupported` for a codec that is not there."""
        try:
            for pattern in exact:
                safe_pattern(pattern, "--exact")
            return cls(parse_delta(DEFAULT_DELTA if codec == AUTO else codec), tuple(exact), check)
        except CodecError as error:
            raise Unsupported(f"--codec: {error}", hint="Leave it out, and nothing is lost.") from None

    @property
    def coding(self) -> Coding:
        """Of what is stored alone."""
        return Coding(check=self.check)

    def codecs(self, source: Checkpoint) -> dict[str, DeltaCodec]:
        """The codec of each parameter. What is not trained, and all that the user names, stays exact."""
        lossless = parse_delta(DEFAULT_DELTA)

        def codec(parameter: Parameter) -> DeltaCodec:
            named = any(re.search(pattern, parameter.name) for pattern in self.exact)
            may_lose = parameter.role == "parameter" and not named
            return self.codec if self.codec.lossless or may_lose else lossless

        return {p.name: codec(p) for p in source.parameters.values() if p.role != "extra"}

    def choices(self) -> list[object]:
        """What tells this manner from another."""
        return [self.codec.config(), self.exact, self.check]


@dataclass(frozen=True)
class Written:
    """What became of a state."""

    member: Member
    outcome: Outcome
    seconds: float


def write_base(
    source: Checkpoint,
    target: Path,
    step: int,
    coded: bool,
    manner: Manner,
    effort: Effort,
    content: str | None = None,
) -> Written:
    """A state that stands alone: exact, or coded by the manner's own codec. `content` is what is to come out."""
    exact = Universal() if content is None else Universal.again(content)
    format: WritableFormat = Delta(None, None, manner.codecs(source)) if coded else exact
    return _write(source, format, target, step, manner, effort, ["base", coded])


def write_delta(
    source: Checkpoint,
    target: Path,
    step: int,
    earlier: Checkpoint,
    parent: Path,
    manner: Manner,
    effort: Effort,
    content: str | None = None,
) -> Written:
    """A state against an earlier one, of which `parent` is the folder. `content` is what is to come out."""
    stands_on = manifest.load(parent / manifest.NAME).content
    where = os.path.relpath(parent.resolve(), target.parent.resolve() / target.name)
    format = Delta(earlier, Parent(stands_on, where), manner.codecs(source), content)
    return _write(source, format, target, step, manner, effort, ["delta", stands_on, where])


def _write(
    source: Checkpoint,
    format: WritableFormat,
    target: Path,
    step: int,
    manner: Manner,
    effort: Effort,
    choices: list[object],
) -> Written:
    goal = Goal(target, coding=manner.coding)
    told = json.dumps([*choices, step, *manner.choices()], default=str)
    outcome, seconds = work.write(source, format, goal, told, effort, f"writing step {step}")
    said = manifest.load(target / manifest.NAME)
    return Written(_member(target, said, step), outcome, seconds)


def _member(folder: Path, said: Manifest, step: int) -> Member:
    codecs: dict[str, None] = {}
    for entry in said.entries:
        if entry.delta is not None:
            codecs[str(entry.delta.codec["name"])] = None
        for state in entry.states.values():
            if state.codec is not None and state.offset is not None:
                codecs[str(state.codec["name"])] = None
    stored = sum(entry.nbytes for entry in said.entries) + len(read_whole(folder / manifest.NAME, 4 << 30))
    return Member(
        folder.name,
        "base" if said.parent is None else "delta",
        step,
        said.content,
        None if said.parent is None else said.parent.content,
        tuple(codecs),
        sum(DTYPES[t.dtype].itemsize * prod(t.shape) for entry in said.entries for t in entry.states.values()),
        stored,
        datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        _losses(said),
    )


def _losses(said: Manifest) -> Mapping[str, Loss]:
    found: dict[str, list[Loss]] = {}
    for entry in said.entries:
        for name, state in entry.states.items():
            if state.loss is not None:
                found.setdefault(name, []).append(state.loss)
    return {name: worst(losses) for name, losses in found.items()}
