"""The state that the next member is stored against, read from where that is cheapest.

Replaying the chain costs more with each delta. So the state is read from a checkpoint that still has it, if there is
one: the checkpoint that the caller gives, or the one that the last member was appended from, or the chain's tip. Each
chunk is compared with its checksum in the index of the last member, as it is read. So the result does not depend on
where it was read.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckpt.chains.tip import open_tip
from ckpt_formats.core.checkpoint import Checkpoint, Opened, Parameter, SourceFile
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, OutputError, UnsupportedError
from ckpt_formats.core.folders import entries_of
from ckpt_formats.core.format import ReadOptions, identified
from ckpt_formats.core.identity import joined
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.store_path import is_remote, is_same_path, relative_path
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.stores.location import listed_again
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain.chain_file import AppendedFrom, ChainIndex, Member, step_of
from ckpt_formats.universal.chain.folder import PACKS
from ckpt_formats.universal.chain.members import open_member
from ckpt_formats.universal.checked import KnownBlob, KnownTensor, StateDiffers
from ckpt_formats.universal.entry import ParameterEntry
from ckpt_formats.universal.manifest import Manifest

How = Literal["given", "source", "tip", "replayed"]
_COUNT = "step"
"""What torch calls the state that counts the optimizer's steps."""


@dataclass(frozen=True)
class StateBefore:
    """The state of a chain's last member, as it can be read."""

    checkpoint: Checkpoint
    how: How
    """From the checkpoint that the caller gave, from the one that was appended last, from the tip, or by replay."""
    read_from: Path
    notes: tuple[Notice, ...] = ()

    def allows_other(self, error: CkptError) -> bool:
        """Whether the state may be read in another way after an error: the caller did not choose this one, and the
        error is about it."""
        if self.how not in ("source", "tip") or isinstance(error, OutputError):
            return False
        places = [] if error.where is None else [Path(one) for one in error.where.split(", ")]
        inside = any(place == self.read_from or self.read_from in place.parents for place in places)
        return isinstance(error, StateDiffers) or inside


def states_before(
    run: Path, chain: ChainIndex, source: Checkpoint, given: Checkpoint | None = None
) -> Iterator[StateBefore]:
    """The ways to read the state of the last member, the cheapest first; of a given checkpoint there is only that one.

    Raises `CorruptError` or `IncompleteError` if the last member is not what the chain states, and `UnsupportedError`
    if the given checkpoint has none of its states.
    """
    last = chain.members[-1]
    if given is not None:
        yield _read_from(given, "given", run, chain, source)
        return
    saved = None if chain.appended_from is None else _appended_from(run, chain.appended_from, last, source)
    if saved is not None:
        with suppress(UnsupportedError):  # its parameters have other names
            yield _read_from(saved, "source", run, chain, source)
    tip = open_tip(run, chain, last)
    if tip is not None:
        _check_members(run, chain)
        folder = run / last.folder
        member = identified(lambda: Checkpoint(path=folder, origin=tip.origin, parameters={}, files=_files(folder)))
        checkpoint = replace(tip, path=folder, identities=joined(tip.identities, member.identities))
        yield StateBefore(checkpoint, "tip", tip.path)
    yield StateBefore(open_member(run, chain, last), "replayed", run)


def appended_from(run: Path, source: Checkpoint, member: Member) -> AppendedFrom | None:
    """What the chain notes of the source of a member; None if its values cannot be read from a path again."""
    if not member.exact or len(source.history) != 1 or not isinstance(source.history[0], Opened):
        return None
    path = source.path  # not that of a folder with several checkpoints, of which another may be the last one soon
    seen_from_run = relative_path(path.resolve(), run.resolve())
    if seen_from_run is None or not path.exists() or is_same_path(path, run):
        return None
    return AppendedFrom(member.content, seen_from_run)


def _appended_from(run: Path, noted: AppendedFrom, last: Member, source: Checkpoint) -> Checkpoint | None:
    """The checkpoint that the last member was appended from; None if it is not there any more."""
    path, options = run / noted.path, _options(source)
    try:
        path = listed_again(path.resolve()) if is_remote(path) else path
    except CkptError:
        return None
    if noted.content != last.content or options is None or not path.exists():
        return None
    if is_same_path(path, source.path):
        return None  # it was written again: the new state is there
    try:
        checkpoint = open_checkpoint(path, options)
    except CkptError:
        return None
    return checkpoint if checkpoint.step in (None, last.step) else None


def _options(source: Checkpoint) -> ReadOptions | None:
    """The options with which a checkpoint was opened; None if it was not, or with the shapes of another one."""
    opened = next((edit for edit in source.history if isinstance(edit, Opened)), None)
    if opened is None or not isinstance(opened.options, tuple) or opened.options[3] is not None:
        return None
    return ReadOptions(*opened.options[:3])


def _read_from(parent: Checkpoint, how: How, run: Path, chain: ChainIndex, source: Checkpoint) -> StateBefore:
    """The state of the last member with the values of another checkpoint. States that it lacks are replayed."""
    last = chain.members[-1]
    stated: list[Manifest] = []
    _check_members(run, chain)
    known = identified(lambda: _known(run, last, stated))
    if stated[0].boxes is not None:
        raise UnsupportedError(
            "the chain's last state is stored as boxes, so ckpt cannot compare it with a parent",
            where=run / last.folder,
            hint="Leave out `parent` (--parent): then the chain is replayed.",
        )
    where = printable(str(parent.path))
    replayed: list[Checkpoint] = []

    def replay() -> Checkpoint:
        if not replayed:
            replayed.append(open_member(run, chain, last))
        return replayed[0]

    parameters, read, missing = dict[str, Parameter](), 0, 0
    for name, parameter in source.parameters.items():
        number = stated[0].entries.numbers.get(name)
        if number is None or parameter.role == "extra":
            continue
        entry = stated[0].entries[number]
        own = parent.parameters.get(name)
        states, lacking = _states(entry, parameter, {} if own is None else own.states, where)
        read, missing = read + len(states), missing + len(lacking)
        states |= {state: replay().parameters[name].states[state] for state in lacking}
        parameters[name] = Parameter(name, entry.role, states, entry.values)
    if missing and not read:
        raise UnsupportedError(
            "the parent has none of the states of the chain's last member",
            where=parent.path,
            hint="Name the checkpoint that was appended last; or leave out `parent` (--parent).",
        )
    identities = joined(known.identities, parent.identities, *(one.identities for one in replayed))
    checkpoint = replace(known, parameters=parameters, identities=identities)
    notes = (Notice(f"{missing} of {read + missing} states are not in {where}: they are replayed"),) if missing else ()
    return StateBefore(checkpoint, how, parent.path, notes)


def _known(run: Path, last: Member, stated: list[Manifest]) -> Checkpoint:
    """The last member without parameters. Its manifest is added to `stated`."""
    folder = run / last.folder
    stored = manifest.load(folder / manifest.NAME)
    if stored.content != last.content:
        raise CorruptError(
            f"another checkpoint is in the place of step {last.step}: {stored.content[:24]}…, not {last.content[:24]}…",
            where=folder,
        )
    files = stored.files(folder)
    for number, pack in enumerate(stored.packs):
        path = files.path(number)
        if not path.is_file():
            raise IncompleteError("a pack of the checkpoint is missing", where=path)
        if path.stat().st_size != pack.nbytes:
            raise CorruptError(f"the pack has {path.stat().st_size} bytes, the manifest says {pack.nbytes}", where=path)
    stated.append(stored)
    packs = (files.path(number) for number in range(len(stored.packs)))
    return Checkpoint(
        path=folder, origin=stored.origin, parameters={}, groups=stored.groups, files=_source_files(packs)
    )


def _files(folder: Path) -> tuple[SourceFile, ...]:
    """The packs of a member. They are not read, but must not change while the next member is written against it."""
    return _source_files(sorted((folder / PACKS).glob("*")))


def _source_files(paths: Iterable[Path]) -> tuple[SourceFile, ...]:
    return tuple(SourceFile(path, path.stat().st_size, "all") for path in paths)


def _check_members(run: Path, chain: ChainIndex) -> None:
    """Raise `IncompleteError` if the folder of a member is missing that the last one needs. Nothing is read of them."""
    there = {entry.name for entry in entries_of(run) if entry.is_dir()}
    for name in sorted(chain.folders_of(chain.members[-1]) - there):
        raise IncompleteError(f"the folder of step {step_of(name)} is missing", where=run / name)


def _states(
    entry: ParameterEntry, wanted: Parameter, own: Mapping[str, Tensor], where: str
) -> tuple[dict[str, Tensor], list[str]]:
    """The states of a parameter that a delta may need: those that can be read, and the names of the others."""
    states, lacking = dict[str, Tensor](), list[str]()
    for state, stated in entry.states.items():
        dtype, new = DTYPES[stated.dtype], wanted.states.get(state)
        fits = new is not None and (new.shape, new.dtype) == (stated.shape, dtype)
        if not fits and state != _COUNT:
            continue
        tensor = own.get(state)
        if tensor is not None and (tensor.shape, tensor.dtype) == (stated.shape, dtype):
            states[state] = Tensor.of(KnownBlob.whole(KnownTensor(tensor, stated.digests, entry.name, state, where)))
        else:
            lacking.append(state)
    return states, lacking
