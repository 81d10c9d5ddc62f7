"""Write one state as a member of a chain, or as a delta on its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from math import prod
from pathlib import Path
from typing import Literal

from ckpt import pipeline
from ckpt.chains.trials import AcceptedStep, Evaluation, search_step
from ckpt.job import AnyProgress, Job
from ckpt.pipeline import Execution, Result
from ckpt_codecs import CodecError
from ckpt_codecs.delta import DeltaCodec
from ckpt_codecs.registry import DEFAULT_DELTA, parse_delta
from ckpt_formats.core.arguments import Checked, Positive, Share
from ckpt_formats.core.checkpoint import Checkpoint, ErrorFigures, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.encoding import AUTO
from ckpt_formats.core.errors import CorruptError, InvalidArgumentError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.name_patterns import search
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.quantised.weights import parts_of, quantised_weights
from ckpt_formats.core.rules import Pattern
from ckpt_formats.core.store_path import is_remote, relative_path
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.stores.location import listed_again
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member
from ckpt_formats.universal.delta_format import Delta, fitted_to_checkpoint, warnings_for
from ckpt_formats.universal.error_figures import worst
from ckpt_formats.universal.manifest import Manifest, Parent
from ckpt_formats.universal.member_format import ChainMember
from ckpt_formats.universal.shared_packs import shared_packs
from ckpt_formats.universal.stored import StoredSeals
from ckpt_formats.universal.unchanged import EarlierMember

# The quotient of both, measured with `benchmarks/appending.py`, differs little between machines and codecs.
REPLAY_NS = 0.31
"""Nanoseconds for each byte of the values of a delta that is replayed."""
WRITE_NS = 1.7
"""Nanoseconds for each byte of the values of a state that is written without a parent."""
_MAX_RATIO = 4
"""Replaying may take so many times as long as writing a state."""


@dataclass(frozen=True)
class DeltaPolicy(Checked):
    """How states are appended to a chain: with which codec, and which of them are bases."""

    codec: DeltaCodec | str = AUTO
    """A delta codec, or its text, such as `subspace:step_size=0.5`; `auto` is the best lossless one."""
    exact: tuple[Pattern, ...] = ()
    """Patterns of the names of parameters in which nothing may be lost."""
    base_every: Positive | None = None
    """A base after so many members; None: only the first state is one."""
    base_by_cost: bool = False
    """A base also where replaying the deltas since the last one would take longer than 4 times writing a state."""
    base: Literal["exact", "coded"] = "exact"
    """Whether bases are stored without loss (`exact`), or with the codec (`coded`)."""
    check: bool = True
    """Decode what was encoded and compare, before the state is listed."""
    evaluation: Evaluation | None = None
    """A command that decides how much may be lost."""
    tip: bool = False
    """Store the last state also without a parent, so that the next append and `restore` replay nothing. Of a chain
    whose last state is approximate this is always so."""
    partial: Share | None = None
    """Of deltas, save only the blocks that moved most since they were saved, up to this share of all bytes; the others
    stay as they are in the last state (`ckpt.partial.changes`). Bases have all blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec != AUTO:
            self.delta_codec  # noqa: B018  # raises if the codec does not exist

    @property
    def delta_codec(self) -> DeltaCodec:
        """The codec of deltas. Raises `InvalidArgumentError` if it does not exist."""
        if isinstance(self.codec, DeltaCodec):
            return self.codec
        try:
            return parse_delta(DEFAULT_DELTA if self.codec == AUTO else self.codec)
        except CodecError as error:
            raise InvalidArgumentError(
                f"codec {self.codec!r:.80}: {error}", hint="Without `codec` (--codec), nothing is lost."
            ) from None

    def needs_base(self, chain: ChainIndex | None, raw_nbytes: int) -> bool:
        """Is the next member, with values of so many bytes, a base?"""
        if chain is None or not chain.members:
            return True
        since = chain.upto(chain.members[-1].step)  # the last base, and the deltas after it
        by_number = self.base_every is not None and len(since) >= self.base_every
        return by_number or (self.base_by_cost and _needs_base(since[1:], raw_nbytes))

    def codecs(self, source: Checkpoint) -> dict[str, DeltaCodec]:
        """The codec of each parameter. Parameters that are not trained, or that `exact` names, stay exact."""
        lossless, chosen = parse_delta(DEFAULT_DELTA), self.lossy_parameters(source)
        names = (parameter.name for parameter in source.parameters.values() if parameter.role != "extra")
        return {name: self.delta_codec if name in chosen else lossless for name in names}

    def lossy_parameters(self, source: Checkpoint) -> dict[str, Parameter]:
        """The parameters that get the policy's own codec, by name."""
        lossless = self.delta_codec.lossless
        codes = {} if lossless else parts_of(quantised_weights(source))  # scales that are nearly right spoil all codes

        def gets_codec(parameter: Parameter) -> bool:
            named = parameter.name in codes or any(search(pattern, parameter.name) for pattern in self.exact)
            return parameter.role != "extra" and (lossless or (parameter.role == "parameter" and not named))

        return {name: parameter for name, parameter in source.parameters.items() if gets_codec(parameter)}

    def warnings(self, source: Checkpoint) -> tuple[Notice, ...]:
        """What the user of the codec should know about this run."""
        if self.codec == AUTO:
            return ()  # nothing is lost, and no codec is imported
        return tuple(Notice(text, weight=Weight.LOST) for text in warnings_for(self.delta_codec, source))


@dataclass(frozen=True)
class AppendResult(Checked):
    """A state that was written, as the chain lists it."""

    member: Member
    result: Result
    accepted: AcceptedStep | None = None
    """The outcome of the evaluation, if there was one."""
    notes: tuple[Notice, ...] = ()


def parent_folder(checkpoint: Checkpoint) -> Path:
    """The folder that a delta can name as its parent: of a state of a chain, that of its member.

    Raises `UnsupportedError` if the checkpoint has no content id.
    """
    path = checkpoint.path
    if (path / chain_file.NAME).is_file():
        if isinstance(checkpoint.seals, StoredSeals):
            folder, stated = checkpoint.seals.checkpoints[-1]
            if stated.origin.step == checkpoint.origin.step:  # else it is computed from this one
                return folder
        raise UnsupportedError(
            "a delta's parent is a stored state of a chain, and this one is computed from a log, or published",
            where=path,
            hint="Name a stored state, which `ckpt log` lists; or write this one first: `ckpt restore`.",
        )
    if not (path / manifest.NAME).is_file():
        raise UnsupportedError(
            "a delta's parent is a universal checkpoint or a chain, and this is neither",
            where=path,
            hint=f"Write it as one: `ckpt compress {printable(str(path))} BASE`; or begin a chain: `ckpt append`.",
        )
    return path


def write_base(
    source: Checkpoint,
    target: Path,
    step: int,
    policy: DeltaPolicy,
    resources: Execution,
    progress: AnyProgress | None = None,
    content: str | None = None,
    unchanged: EarlierMember | None = None,
) -> AppendResult:
    """Write a state without a parent: exact, or with the policy's codec. `content` is the content id it must get.

    States that the earlier member `unchanged` has, too, are not stored again.
    """
    if policy.base == "coded":
        return _write_coded(source, target, step, None, None, policy, resources, progress, unchanged=unchanged)
    notes: tuple[Notice, ...] = ()
    if policy.evaluation is not None:
        notes = (Notice("this state is stored as an exact base, so there is nothing to evaluate"),)
    exact = ChainMember(codec=AUTO, check=policy.check, content=content, unchanged=unchanged)
    written = _write(source, exact, target, step, resources, progress)
    return replace(written, notes=(*notes, *written.notes))


def write_delta(
    source: Checkpoint,
    target: Path,
    step: int,
    earlier: Checkpoint,
    parent: Path,
    policy: DeltaPolicy,
    resources: Execution,
    progress: AnyProgress | None = None,
    content: str | None = None,
    parent_content: str | None = None,
    unchanged: EarlierMember | None = None,
) -> AppendResult:
    """Write a state as a delta against an earlier one, in the folder `parent`.

    `content` is the id that it must get, `parent_content` that of the parent, if it is known already. Parameters
    that the earlier member `unchanged` has, too, are not stored again.
    """
    known = parent_content or manifest.load(parent / manifest.NAME).content
    return _write_coded(source, target, step, earlier, (parent, known), policy, resources, progress, content, unchanged)


def _write_coded(
    source: Checkpoint,
    target: Path,
    step: int,
    earlier: Checkpoint | None,
    parent: tuple[Path, str] | None,
    policy: DeltaPolicy,
    resources: Execution,
    progress: AnyProgress | None,
    content: str | None = None,
    unchanged: EarlierMember | None = None,
) -> AppendResult:
    """Write with the policy's codec, fitted to the checkpoint; the evaluation, if any, chooses its step size.

    `parent`: its folder and content id.
    """

    def write(codec: DeltaCodec, folder: Path) -> AppendResult:
        stored_against = None if parent is None else _parent(*parent, folder)
        codecs = replace(policy, codec=codec).codecs(source)
        format = Delta(
            earlier=earlier,
            stored_against=stored_against,
            delta_codecs=codecs,
            check=policy.check,
            content=content,
            unchanged=unchanged if folder == target else None,  # a trial is not next to the members
        )
        return _write(source, format, folder, step, resources, progress)

    codec = policy.delta_codec
    if codec.lossless:
        return write(codec, target)
    pipeline.plan(source, target, Universal())  # raises for jobs that cannot succeed, before anything is read
    with Reader(max_files=resources.files) as reader:
        transfer = Transfer(reader, resources.slab)
        fitted = fitted_to_checkpoint(codec, policy.lossy_parameters(source), source, earlier, transfer)
    from ckpt_codecs.lossy import Subspace  # only what is lossy needs it

    if policy.evaluation is None or not isinstance(fitted, Subspace):
        return write(fitted, target)
    if is_remote(target):
        raise UnsupportedError(
            "states are evaluated beside a chain in the file system, not in a store",
            where=target.parent,
            hint="Give another bound than `max_increase` (--max-loss-increase), or append to a local chain.",
        )
    chosen, accepted = search_step(fitted, policy.evaluation, target, source, write, resources)
    return replace(write(chosen, target), accepted=accepted)


def _parent(folder: Path, content: str, target: Path) -> Parent:
    """The parent as the manifest names it, by a relative path. Raises `UnsupportedError` if there is none."""
    path = relative_path(folder.resolve(), target.parent.resolve() / target.name)
    if path is None:
        raise UnsupportedError(
            "a delta and its parent are in one file system, or in one bucket",
            where=folder,
            hint="Copy the parent first (`ckpt copy`), or convert it.",
        )
    return Parent(content, path)


def _write(
    source: Checkpoint, format: Universal, target: Path, step: int, resources: Execution, progress: AnyProgress | None
) -> AppendResult:
    result = Job(source, target, format).run(resources=resources, progress=progress)
    written = listed_again(target)
    return AppendResult(member_of(written, manifest.load(written / manifest.NAME), step), result, notes=result.notes)


def member_of(folder: Path, written: Manifest, step: int) -> Member:
    """Return the row of a chain for a checkpoint in its folder. Raises `CorruptError` if a pack is not there."""
    files = written.files(folder)
    for number, pack in enumerate(written.packs):  # a member that cannot be read is not listed
        path = files.path(number)
        if not path.is_file() or path.stat().st_size != pack.nbytes:
            raise CorruptError("the pack is not as it was written", where=path)
    codecs: dict[str, None] = {}
    for entry in written.entries:
        if entry.delta is not None:
            codecs[str(entry.delta.codec["name"])] = None
        for state in entry.states.values():
            if state.chunks is not None and state.codec is not None:
                codecs[str(state.codec["name"])] = None
    stored = written.nbytes + sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return Member(
        folder.name,
        "base" if written.parent is None else "delta",
        step,
        written.content,
        None if written.parent is None else written.parent.content,
        tuple(codecs),
        sum(DTYPES[t.dtype].itemsize * prod(t.shape) for entry in written.entries for t in entry.states.values()),
        stored,
        datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        _errors(written),
        shared_packs(written),
    )


def _errors(written: Manifest) -> Mapping[str, ErrorFigures]:
    figures: dict[str, list[ErrorFigures]] = {}
    for entry in written.entries:
        for name, state in entry.states.items():
            if state.error is not None:
                figures.setdefault(name, []).append(state.error)
    return {name: worst(of_state) for name, of_state in figures.items()}


def _needs_base(deltas: Sequence[Member], raw_nbytes: int) -> bool:
    """Whether the next state, of `raw_nbytes`, is better a base: estimated from the deltas since the last one."""
    replayed = sum(member.raw_nbytes for member in deltas) + raw_nbytes
    return replayed * REPLAY_NS > _MAX_RATIO * raw_nbytes * WRITE_NS
