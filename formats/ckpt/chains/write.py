"""Writing one state as a member of a chain, or as a delta on its own."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path

from ckpt import pipeline
from ckpt.chains.trials import AcceptedStep, Evaluation, search_step
from ckpt.pipeline import Resources, Result
from ckpt_cli import notes, work
from ckpt_codecs import CodecError
from ckpt_codecs.delta import DeltaCodec
from ckpt_codecs.lossy import Subspace
from ckpt_codecs.registry import DEFAULT_DELTA, parse_delta
from ckpt_formats.core.checkpoint import Checkpoint, ErrorFigures, Goal, Parameter, WritableFormat
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.files import Reader, read_whole
from ckpt_formats.core.rules import safe_pattern
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chain.file import Member
from ckpt_formats.universal.delta_format import Delta, fitted_to_checkpoint
from ckpt_formats.universal.error_figures import worst
from ckpt_formats.universal.manifest import Manifest, Parent

AUTO = "auto"


@dataclass(frozen=True)
class DeltaPolicy:
    """How states are to be coded."""

    codec: DeltaCodec
    exact: tuple[str, ...] = ()
    """Patterns of the names of parameters in which nothing may be lost."""
    check: bool = True
    evaluation: Evaluation | None = None
    """What is to say how much may be lost."""

    @classmethod
    def of(cls, codec: str = AUTO, exact: Sequence[str] = (), check: bool = True) -> "DeltaPolicy":
        """As the user typed it. Raises `Unsupported` for a codec that is not there."""
        try:
            for pattern in exact:
                safe_pattern(pattern, "--exact")
            return cls(parse_delta(DEFAULT_DELTA if codec == AUTO else codec), tuple(exact), check)
        except CodecError as error:
            raise Unsupported(f"--codec: {error}", hint="Leave it out, and nothing is lost.") from None

    @property
    def coding(self) -> EncodingOptions:
        """Of what is stored alone."""
        return EncodingOptions(check=self.check)

    def codecs(self, source: Checkpoint) -> dict[str, DeltaCodec]:
        """The codec of each parameter. What is not trained, and all that the user names, stays exact."""
        lossless, own = parse_delta(DEFAULT_DELTA), self.own(source)
        names = (parameter.name for parameter in source.parameters.values() if parameter.role != "extra")
        return {name: self.codec if name in own else lossless for name in names}

    def own(self, source: Checkpoint) -> dict[str, Parameter]:
        """The parameters that get the manner's own codec."""

        def gets(parameter: Parameter) -> bool:
            named = any(re.search(pattern, parameter.name) for pattern in self.exact)
            return parameter.role != "extra" and (self.codec.lossless or (parameter.role == "parameter" and not named))

        return {name: parameter for name, parameter in source.parameters.items() if gets(parameter)}

    def choices(self) -> list[object]:
        """What tells this manner from another."""
        return [self.codec.config(), self.exact, self.check]


@dataclass(frozen=True)
class AppendResult:
    """What became of a state."""

    member: Member
    outcome: Result
    seconds: float
    accepted: AcceptedStep | None = None
    """What the user's evaluation said, if it was asked."""


def write_base(
    source: Checkpoint,
    target: Path,
    step: int,
    coded: bool,
    manner: DeltaPolicy,
    effort: Resources,
    content: str | None = None,
) -> AppendResult:
    """A state that stands alone: exact, or coded by the manner's own codec. `content` is what is to come out."""
    if coded:
        return _write_coded(source, target, step, None, None, manner, effort, ["base", coded])
    if manner.evaluation is not None:
        notes.note("this state is stored whole and exact, so there is nothing to evaluate")
    exact = Universal() if content is None else Universal.again(content)
    return _write(source, exact, target, step, manner, effort, ["base", coded])


def write_delta(
    source: Checkpoint,
    target: Path,
    step: int,
    earlier: Checkpoint,
    parent: Path,
    manner: DeltaPolicy,
    effort: Resources,
    content: str | None = None,
) -> AppendResult:
    """A state against an earlier one, of which `parent` is the folder. `content` is what is to come out."""
    stands_on = _parent(parent, target)
    choices: list[object] = ["delta", stands_on.content, stands_on.path]
    return _write_coded(source, target, step, earlier, parent, manner, effort, choices, content)


def _write_coded(
    source: Checkpoint,
    target: Path,
    step: int,
    earlier: Checkpoint | None,
    parent: Path | None,
    manner: DeltaPolicy,
    effort: Resources,
    choices: list[object],
    content: str | None = None,
) -> AppendResult:
    """By the manner's codec, once it knows what it must know of the state, and how much it may lose."""

    def write(manner: DeltaPolicy, folder: Path, said: list[object]) -> AppendResult:
        of = None if parent is None else _parent(parent, folder)
        return _write(source, Delta(earlier, of, manner.codecs(source), content), folder, step, manner, effort, said)

    if manner.codec.lossless:
        return write(manner, target, choices)
    pipeline.plan(source, Universal(), Goal(target))  # refuses what cannot be done, before anything is read
    with Reader(most_files=effort.files) as reader:
        known = fitted_to_checkpoint(manner.codec, manner.own(source), source, earlier, Transfer(reader, effort.slab))
    manner = replace(manner, codec=known)
    if manner.evaluation is None or not isinstance(known, Subspace):
        return write(manner, target, choices)
    codec, accepted = search_step(
        known,
        manner.evaluation,
        source,
        lambda codec, folder: write(replace(manner, codec=codec), folder, ["trial"]),
        effort,
    )
    return replace(write(replace(manner, codec=codec), target, choices), accepted=accepted)


def _parent(folder: Path, target: Path) -> Parent:
    where = os.path.relpath(folder.resolve(), target.parent.resolve() / target.name)
    return Parent(manifest.load(folder / manifest.NAME).content, where)


def _write(
    source: Checkpoint,
    format: WritableFormat,
    target: Path,
    step: int,
    manner: DeltaPolicy,
    effort: Resources,
    choices: list[object],
) -> AppendResult:
    goal = Goal(target, coding=manner.coding)
    outcome, seconds = work.write(
        source, format, goal, (choices, step, manner.choices()), effort, f"writing step {step}"
    )
    said = manifest.load(target / manifest.NAME)
    return AppendResult(_member(target, said, step), outcome, seconds)


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


def _losses(said: Manifest) -> Mapping[str, ErrorFigures]:
    found: dict[str, list[ErrorFigures]] = {}
    for entry in said.entries:
        for name, state in entry.states.items():
            if state.loss is not None:
                found.setdefault(name, []).append(state.loss)
    return {name: worst(losses) for name, losses in found.items()}
