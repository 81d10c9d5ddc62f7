"""The tip of a chain: its last state, without a parent, beside the members. So nobody needs to replay the chain for it.

It is written with a member, before the list names both; the tip before it is removed after that.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.job import Job
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.encoding import AUTO
from ckpt_formats.core.errors import CkptError, CorruptError
from ckpt_formats.core.format import ReadOptions, identified
from ckpt_formats.core.identity import joined
from ckpt_formats.stores.location import listed_again
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member, Tip
from ckpt_formats.universal.chain.members import open_member
from ckpt_formats.universal.stored import StoredParameters, StoredSeals, state_errors

if TYPE_CHECKING:
    from ckpt.findings.report import Finding


def write_tip(run: Path, member: Member, source: Checkpoint, earlier: Checkpoint, resources: Execution) -> Tip:
    """Write the state of a member that was just written, and that is a delta against the state `earlier`.

    Of an exact member, the values are those of `source`; of an approximate one, they are what it decodes to.
    """
    state = source if member.exact else _decoded(listed_again(run / member.folder), earlier)
    target = run / f"tip-{member.step:010d}"
    Job(state, target, Universal(codec=AUTO, content=member.content)).run(resources=resources)
    files = [path for path in listed_again(target).rglob("*") if path.is_file()]
    return Tip(target.name, member.content, sum(path.stat().st_size for path in files))


def open_tip(run: Path, chain: ChainIndex, member: Member) -> Checkpoint | None:
    """The state of a member from the tip; None if that has another state or cannot be opened."""
    if chain.tip is None or member != chain.members[-1] or chain.tip.content != member.content:
        return None
    folder = run / chain.tip.folder
    with suppress(CkptError):
        state = identified(lambda: Universal().read(folder, ReadOptions()))
        return state if _content(state) == member.content else None
    return None


def open_state(run: Path, chain: ChainIndex, member: Member) -> Checkpoint:
    """The state of a member, from the tip if that has it. Raises as `open_member`."""
    return open_tip(run, chain, member) or open_member(run, chain, member)


def opened(run: Path, chain: ChainIndex) -> "tuple[list[Checkpoint], list[Finding]]":
    """What `verify` checks of the tip, like members: its state, or a finding if that cannot be opened."""
    from ckpt.findings.report import Finding  # no append needs it

    if chain.tip is None:
        return [], []
    folder = run / chain.tip.folder
    try:
        state = identified(lambda: Universal().read(folder, ReadOptions()))
    except CkptError as error:
        return [], [Finding("unreadable", f"the tip: {error.what}", error.where or str(folder))]
    if _content(state) != chain.tip.content:
        return [], [Finding("unreadable", "the tip: another checkpoint is in its place", str(folder))]
    return [state], []


def add_hint(run: Path, chain: ChainIndex, error: CkptError) -> None:
    """Add to an error about the tip that the state can be replayed without it."""
    folder = None if chain.tip is None else run / chain.tip.folder
    if folder is not None and isinstance(error, CorruptError) and error.where is not None:
        places = [Path(one) for one in error.where.split(", ")]
        if any(folder in place.parents for place in places):
            error.hint = f"Remove the folder {folder.name}: then the state is replayed from the chain's deltas."


def _decoded(folder: Path, earlier: Checkpoint) -> Checkpoint:
    """The member in a folder, whose deltas are decoded against `earlier`, wherever that is."""

    def read() -> Checkpoint:
        stated = manifest.load(folder / manifest.NAME)
        entries = stated.entries
        return Checkpoint(
            path=folder,
            origin=stated.origin,
            parameters=StoredParameters(stated.files(folder), entries, entries.numbers.keys(), earlier.parameters),
            groups=stated.groups,
            extras=stated.extras,
            aliases=stated.aliases,
            seals=StoredSeals(((folder, stated),)),
            errors=state_errors(entries),
            original=stated.original,
        )

    state = identified(read)
    return replace(state, identities=joined(earlier.identities, state.identities))


def _content(state: Checkpoint) -> str | None:
    """The content id of a checkpoint that was read from a folder in the universal format."""
    return state.seals.checkpoints[-1][1].content if isinstance(state.seals, StoredSeals) else None
