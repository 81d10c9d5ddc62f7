"""The tip of a chain: its last state, without a parent, beside the members. So nobody needs to replay the chain for it.

It is written with a member, before the list names both; the tip before it is removed after that.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ckpt.job import Job
from ckpt.pipeline import Resources
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.encoding import AUTO
from ckpt_formats.core.errors import CkptError, Corrupt
from ckpt_formats.core.format import ReadOptions, identified
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chain.file import ChainIndex, Member, Tip
from ckpt_formats.universal.chain.members import open_member
from ckpt_formats.universal.stored import StoredParameters, StoredSeals, state_errors


def write_tip(run: Path, member: Member, source: Checkpoint, earlier: Checkpoint, resources: Resources) -> Tip:
    """Write the state of a member that was just written, and that is a delta against the state `earlier`.

    Of an exact member, the values are those of `source`; of an approximate one, they are what it decodes to.
    """
    state = source if member.exact else _decoded(run / member.folder, earlier)
    target = run / f"tip-{member.step:010d}"
    Job(state, target, Universal(codec=AUTO, content=member.content)).run(resources)
    return Tip(target.name, member.content, sum(path.stat().st_size for path in target.rglob("*") if path.is_file()))


def open_tip(run: Path, chain: ChainIndex, member: Member) -> Checkpoint | None:
    """The state of a member from the tip; None if that has another state or cannot be opened."""
    if chain.tip is None or member is not chain.members[-1] or chain.tip.content != member.content:
        return None
    folder = run / chain.tip.folder
    with suppress(CkptError):
        state = identified(lambda: Universal().read(folder, ReadOptions()))
        if isinstance(state.seals, StoredSeals) and state.seals.checkpoints[-1][1].content == member.content:
            return state
    return None


def open_state(run: Path, chain: ChainIndex, member: Member) -> Checkpoint:
    """The state of a member, from the tip if that has it. Raises as `open_member`."""
    return open_tip(run, chain, member) or open_member(run, chain, member)


def add_hint(run: Path, chain: ChainIndex, error: CkptError) -> None:
    """Add to an error about the tip that the state can be replayed without it."""
    folder = None if chain.tip is None else run / chain.tip.folder
    if folder is not None and isinstance(error, Corrupt) and error.where is not None:
        places = [Path(one) for one in error.where.split(", ")]
        if any(folder in place.parents for place in places):
            error.hint = f"Remove the folder {folder.name}: then the state is replayed from the chain's deltas."


def _decoded(folder: Path, earlier: Checkpoint) -> Checkpoint:
    """The member in a folder, whose deltas are decoded against `earlier`, wherever that is."""

    def read() -> Checkpoint:
        stated = manifest.load(folder / manifest.NAME)
        entries = stated.entries
        return Checkpoint(
            folder,
            stated.origin,
            StoredParameters(folder, entries, entries.numbers.keys(), earlier.parameters),
            stated.groups,
            stated.extras,
            stated.aliases,
            seals=StoredSeals(((folder, stated),)),
            errors=state_errors(entries),
            original=stated.original,
        )

    state = identified(read)
    return replace(state, identities={**earlier.identities, **state.identities})
