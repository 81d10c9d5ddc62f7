"""Open the stored states of a chain as checkpoints."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError
from ckpt_formats.core.format import ReadOptions, identified
from ckpt_formats.core.identity import Identities, Identity, recording
from ckpt_formats.core.text import list_names
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member
from ckpt_formats.universal.format import read_lineage
from ckpt_formats.universal.lineage import Ancestor, LoadedFiles, lineage, lineage_of_parent


def member_at(run: Path, chain: ChainIndex, step: int | None) -> Member:
    """The member of a step; None: the last one. Raises `NotFoundError`, and the message names the nearest steps."""
    if step is None:
        return chain.members[-1]
    for member in chain.members:
        if member.step == step:
            return member
    steps = [member.step for member in chain.members]
    nearest = sorted(sorted(steps, key=lambda s: abs(s - step))[:5])
    verb = "is" if len(nearest) == 1 else "are"
    raise NotFoundError(
        f"no step {step} in this chain of {len(steps)}, from {steps[0]} to {steps[-1]}",
        where=run,
        hint=f"The nearest {verb} {', '.join(map(str, nearest))}; `ckpt log` lists all.",
    )


def open_member(run: Path, chain: ChainIndex, member: Member) -> Checkpoint:
    """The index of one state.

    Raises `IncompleteError` if a folder is missing, `CorruptError` if another checkpoint is in its place. The hint
    names the last earlier step that can be restored, if there is one.
    """
    try:
        return open_one(run, member)
    except CkptError as error:
        add_hint(run, chain, member, error)
        raise


@dataclass(frozen=True)
class OpenedMembers:
    """The members of a chain, the last first. Each manifest was loaded once, and ancestors are shared."""

    states: Mapping[str, Checkpoint | CkptError]
    """By folder: the checkpoint, or why it cannot be opened."""
    identities: Identities
    """Those of all files, when they were first opened."""

    def open(self, member: Member) -> Checkpoint:
        """The checkpoint of a member. Raises as `open_member`, without a hint."""
        state = self.states[member.folder]
        if isinstance(state, CkptError):
            raise state
        return state


def open_members(run: Path, chain: ChainIndex) -> OpenedMembers:
    """Open all members of a chain."""
    loaded, states = LoadedFiles(), dict[str, Checkpoint | CkptError]()
    ancestors: tuple[Ancestor, ...] = ()
    with recording() as identities:
        for member in reversed(chain.members):
            folder = run / member.folder
            try:
                check_place(run, member, loaded)
                known = lineage_of_parent(ancestors)
                is_parent = known is not None and known[-1].folder == folder
                ancestors = known if known is not None and is_parent else lineage(folder, loaded)
                checkpoint = read_lineage(ancestors, loaded)
            except CkptError as error:
                states[member.folder], ancestors = error, ()
                continue
            for file in checkpoint.files:
                if file.path not in identities:
                    with suppress(OSError):  # a missing file is reported when it is read
                        identities[file.path] = Identity.of(file.path.stat())
            states[member.folder] = replace(checkpoint, identities=identities)
    return OpenedMembers(states, identities)


def add_hint(run: Path, chain: ChainIndex, member: Member, error: CkptError) -> None:
    """Add the last earlier step that does not need the damaged folder to the hint of an error."""
    if not isinstance(error, (CorruptError, IncompleteError, NotFoundError)) or error.where is None:
        return
    if chain.is_family:
        whole = [one.name or "" for one in _without(run, chain, member, error.where)]
        error.hint = f"These models do not need it: {list_names(whole)}." if whole else error.hint
        return
    good = last_without(run, chain, member, error.where)
    if good is not None:
        error.hint = f"Step {good.step} does not need it: `ckpt restore CHAIN DST --step {good.step}`."


def last_without(run: Path, chain: ChainIndex, member: Member, where: str) -> Member | None:
    """The last earlier member that can be opened and does not need the folder in which `where` is, if any."""
    unharmed = (one for one in reversed(_without(run, chain, member, where)) if one.step < member.step)
    return next((one for one in unharmed if _opens(run, one)), None)


def _without(run: Path, chain: ChainIndex, member: Member, where: str) -> list[Member]:
    """The members that do not need the folder of a member in which `where` is; none if it is in no such folder."""
    damaged = {name for name in chain.folders_of(member) if _is_inside(where, run / name)}
    return [one for one in chain.members if damaged and not damaged & chain.folders_of(one)]


def open_last(run: Path, chain: ChainIndex) -> Checkpoint:
    """The last state, with the path of the chain."""
    return replace(open_member(run, chain, chain.members[-1]), path=run)


def _opens(run: Path, member: Member) -> bool:
    try:
        open_one(run, member)
    except CkptError:
        return False
    return True


def open_one(run: Path, member: Member) -> Checkpoint:
    """The index of one state. Raises as `open_member`, without a hint."""
    check_place(run, member, LoadedFiles())
    return identified(lambda: Universal().read(run / member.folder, ReadOptions()))


def check_place(run: Path, member: Member, loaded: LoadedFiles) -> None:
    """Raise `IncompleteError` if the folder of a member is missing, `CorruptError` if another checkpoint is in its
    place, or if a model of a family has another parent than the list says."""
    folder = run / member.folder
    if not folder.is_dir():
        raise IncompleteError(f"the folder of {member.label} is missing", where=folder)
    stated = loaded.manifest(folder / manifest.NAME)
    content = stated.content
    if content != member.content:
        raise CorruptError(
            f"another checkpoint is in the place of {member.label}: {content[:24]}…, not {member.content[:24]}…",
            where=folder,
        )
    parent = None if stated.parent is None else stated.parent.content
    if member.name is not None and parent != member.parent:
        raise CorruptError(f"{member.label} is stored against another model than the list says", where=folder)


def _is_inside(where: str, folder: Path) -> bool:
    paths = [Path(one) for one in where.split(", ")]
    return any(path == folder or folder in path.parents for path in paths)
