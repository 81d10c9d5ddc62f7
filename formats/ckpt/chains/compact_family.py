"""Remove models from a family. Deltas that lose their parent get the nearest ancestor that stays, or become bases."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ckpt.chains.change import ChainChange
from ckpt.chains.kept import CompactPlan, KeptMember, unused_folder
from ckpt.chains.write import AppendResult, DeltaPolicy, write_base, write_delta
from ckpt.job import AnyProgress
from ckpt.pipeline import Execution
from ckpt_formats.core.errors import NotFoundError, UnsupportedError
from ckpt_formats.core.text import list_names
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member
from ckpt_formats.universal.chain.members import check_place, open_member, open_one
from ckpt_formats.universal.lineage import LoadedFiles
from ckpt_formats.universal.unchanged import EarlierMember


def plan_family(run: Path, chain: ChainIndex, removed: Collection[str]) -> tuple[KeptMember, ...]:
    """The models that stay, and how each is stored afterwards.

    A model whose parent goes is stored against its nearest ancestor that stays. If none does, the first model that
    has lost the same base becomes a base, and the others are stored against that.
    Raises `NotFoundError` for a name that the family does not have, `UnsupportedError` if no model would stay.
    """
    names = {member.name or "" for member in chain.members}
    if unknown := sorted(set(removed) - names):
        raise NotFoundError(
            f"no model {unknown[0]} in this family", where=run, hint=f"It has {list_names(sorted(names))}."
        )
    if names == set(removed):
        raise UnsupportedError("no model would stay", where=run, hint="Remove the folder of the family instead.")
    heirs = dict[str, Member]()  # by the content of a base that goes: the model that becomes a base
    stays: list[KeptMember] = []
    for member in chain.members:
        if member.name in removed:
            continue
        line = chain.upto(member.step)
        parent = next((one for one in line[-2::-1] if one.name not in removed), None)
        if member.kind == "base" or (parent is not None and parent.content == member.parent):
            stays.append(KeptMember(member.step, member, "as it is"))
        elif parent is not None:
            stays.append(KeptMember(member.step, member, "delta", parent))
        elif (heir := heirs.get(line[0].content)) is not None:
            stays.append(KeptMember(member.step, member, "delta", heir))
        else:
            heirs[line[0].content] = member
            stays.append(KeptMember(member.step, member, "base"))
    return tuple(stays)


def write_family(
    place: ChainChange, chain: ChainIndex, planned: CompactPlan, policy: DeltaPolicy, progress: AnyProgress | None
) -> list[Member]:
    """The members that the family has afterwards, of which those are written that lose their parent."""
    written, loaded = list[Member](), LoadedFiles()
    for state in planned.states:
        assert state.member is not None  # a family has no log
        if state.how == "as it is":
            check_place(place.run, state.member, loaded)  # a list that is wrong about a parent must not remove it
            written.append(state.member)
            continue
        result = _rewritten(
            place.look(), chain, state.member, state.against, written, policy, place.resources, progress
        )
        before = state.member
        written.append(replace(result.member, time=before.time, errors=before.errors, name=before.name))
    return written


def _rewritten(
    run: Path,
    chain: ChainIndex,
    member: Member,
    against: Member | None,
    written: list[Member],
    policy: DeltaPolicy,
    resources: Execution,
    progress: AnyProgress | None,
) -> AppendResult:
    """Write the same model, bit for bit, to a new folder: as a base, or as a delta of a model that stays."""
    source, target = open_member(run, chain, member), unused_folder(run, member.step, member)
    # What it shares with packs of others stays there, once for all members.
    unchanged = EarlierMember(open_one(run, member), only_shared=True) if member.shared else None
    if against is None:
        return write_base(
            source, target, member.step, policy, resources, progress, content=member.content, unchanged=unchanged
        )
    folder = next(one.folder for one in written if one.content == against.content)
    return write_delta(
        source,
        target,
        member.step,
        open_member(run, chain, against),
        run / folder,
        policy,
        resources,
        progress,
        content=member.content,
        parent_content=against.content,
        unchanged=unchanged,
    )
