"""A family of models: a chain whose members are fine-tunes, each a delta of the model that it is most like.

`chain.json` has names for them, and each delta may have any earlier member as its parent. Everything else is as in a
chain of states: the folders of members, their files, the lock, the order of writing.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.chains.append import folder_name
from ckpt.chains.change import change
from ckpt.chains.nearest import Nearest, find_nearest, naming_hint
from ckpt.chains.write import AppendResult, DeltaPolicy, write_base, write_delta
from ckpt.job import AnyProgress
from ckpt.pipeline import Execution, check_complete, check_not_suspicious
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.text import list_names
from ckpt_formats.universal.chain import folder
from ckpt_formats.universal.chain.chain_file import MODEL_NAME, ChainIndex, Member
from ckpt_formats.universal.chain.members import open_member, open_one
from ckpt_formats.universal.unchanged import EarlierMember

AUTO, NONE = "auto", "none"
"""The parents that no model can be called: the nearest model, and none."""
_ENDING = re.compile(r"\.(safetensors|pt|pth|bin|ckpt|ucp|gguf|npz)\Z", re.IGNORECASE)


@dataclass(frozen=True)
class PlannedModel:
    """How a model would be added to a family."""

    name: str
    parent: Member | None
    """None: in full."""
    earlier: Checkpoint | None
    """The parent as it can be read."""
    nearest: Nearest | None
    """What was compared; None if the caller named the parent, or if it is the first model."""
    notes: tuple[Notice, ...] = ()

    __repr__ = short_repr


def is_family(run: Path) -> bool:
    """Whether the chain at a path is a family of models; False if there is none. Raises as `folder.peek`."""
    chain = folder.peek(run)
    return chain is not None and chain.is_family


def append_model(
    run: Path,
    source: Checkpoint,
    name: str | None,
    parent: str,
    policy: DeltaPolicy,
    resources: Execution,
    progress: AnyProgress | None = None,
) -> AppendResult:
    """Add a model to a family, or begin a family with it. If this fails, the family is unchanged.

    `name` None: that of the source's file or folder. `parent`: the name of a model, `auto` for the one against which
    the new one takes the fewest bytes, `none` to store it in full. Raises `UnsupportedError` for a model that has
    nothing in common with the named parent, or that the family has already.
    """
    check_complete(source)
    check_not_suspicious(source)
    _check_policy(policy)
    with change(run, resources, create=True, families=True) as place:
        chain, resources = listed(place.run, place.chain), place.resources
        number = 1 + (chain.members[-1].step if chain.members else 0)
        notes = place.remove_leftovers(folder_name(number))
        planned = plan_model(place.run, chain, source, name, parent, policy, resources)
        written = _write(planned, place.run, chain, number, source, policy, resources, progress)
        member = replace(written.member, name=planned.name)
        same = next((one for one in chain.members if one.content == member.content), None)
        if same is not None:
            place.look()
            place.remove([place.run / member.folder])
            raise UnsupportedError(
                f"the family has this model already, as {same.name}: every value is the same", where=source.path
            )
        place.replace(ChainIndex((*chain.members, member), is_family=True))
    notes += planned.notes
    if planned.parent is not None and member.kind == "base":
        text = f"a delta of {planned.parent.name} would not be smaller: the model is stored in full"
        notes += (Notice(text),)
    return replace(written, member=member, notes=(*notes, *written.notes))


def plan_model(
    run: Path,
    chain: ChainIndex,
    source: Checkpoint,
    name: str | None,
    parent: str,
    policy: DeltaPolicy,
    resources: Execution,
) -> PlannedModel:
    """The name and the parent that a model gets, with notes about what does not fit. Nothing is written.

    Raises `NotFoundError` if there is no such parent, and `UnsupportedError` for a name that is taken, or a named
    parent that has nothing in common with the model.
    """
    name = _new_name(chain, source, name)
    if not chain.members or parent == NONE:
        return PlannedModel(name, None, None, None)
    if parent != AUTO:
        member = _member(run, chain, parent)
        earlier = open_member(run, chain, member)
        differing = _differences(source, earlier)
        if differing.fitting == 0:
            naming = _sentence(naming_hint(source, earlier))
            raise UnsupportedError(
                f"no tensor has the same name, shape and type as in {member.name}",
                where=source.path,
                hint=f"{naming}Leave out `parent` (--parent) to choose the nearest model.",
            )
        return PlannedModel(name, member, earlier, None, differing.notes(member, source, earlier))
    nearest = find_nearest(run, chain, source, policy, resources)
    notes = tuple(
        Notice(f"{one} was not compared: {why}", weight=Weight.UNSURE) for one, why in nearest.unopened.items()
    )
    if nearest.chosen is not None and nearest.parent is not None:
        member = nearest.chosen.member
        notes += (Notice(f"the parent is {member.name}: {nearest.reason}"),)
        notes += _differences(source, nearest.parent).notes(member, source, nearest.parent)
        return PlannedModel(name, member, nearest.parent, nearest, notes)
    notes += (Notice(f"the model is stored in full: {nearest.reason}", weight=Weight.UNSURE),)
    if not nearest.candidates:
        first = chain.members[0]
        earlier = open_member(run, chain, first)
        notes += _differences(source, earlier).notes(first, source, earlier)
    return PlannedModel(name, None, None, nearest, notes)


def model_name(source: Checkpoint) -> str:
    """The name that a model gets from its file or folder, without its ending. Raises `InvalidArgumentError`."""
    name = _ENDING.sub("", source.path.name or source.path.resolve().name)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    if MODEL_NAME.fullmatch(name) is None:
        raise InvalidArgumentError(
            f"{name!r:.80} cannot be the name of a model of a family", where=source.path, hint=_NAME_HINT
        )
    return name


_NAME_HINT = (
    "State one with `name` (--name): letters, digits, `.`, `_` and `-`, up to 128, not only digits, and not `last`."
)


def listed(run: Path, chain: ChainIndex | None) -> ChainIndex:
    """The list of a family; an empty one if there is none yet. Raises `UnsupportedError` for any other chain."""
    if chain is not None and not chain.is_family:
        raise UnsupportedError(
            "the chain has states of one run, and no models with names",
            where=run,
            hint="Leave out `name` (--name, --family), or name another chain.",
        )
    return chain or ChainIndex((), is_family=True)


def _check_policy(policy: DeltaPolicy) -> None:
    """Raise `InvalidArgumentError` for what is about the steps of a run."""
    given = {
        "base_every (--base-every)": policy.base_every is not None or policy.base_by_cost,
        "base coded (--base coded, --preset standalone)": policy.base == "coded",
        "tip (--tip)": policy.tip,
        "partial (--partial)": policy.partial is not None,
    }
    for option, is_given in given.items():
        if is_given:
            raise InvalidArgumentError(f"{option} is about the steps of a run, and this is a family of models")


def _write(
    planned: PlannedModel,
    run: Path,
    chain: ChainIndex,
    number: int,
    source: Checkpoint,
    policy: DeltaPolicy,
    resources: Execution,
    progress: AnyProgress | None,
) -> AppendResult:
    target = run / folder_name(number)
    if planned.parent is None or planned.earlier is None:
        return write_base(source, target, number, policy, resources, progress)
    against, base = run / planned.parent.folder, chain.upto(planned.parent.step)[0]
    return write_delta(
        source,
        target,
        number,
        planned.earlier,
        against,
        policy,
        resources,
        progress,
        parent_content=planned.parent.content,
        unchanged=EarlierMember(open_one(run, base)),
    )


def _new_name(chain: ChainIndex, source: Checkpoint, name: str | None) -> str:
    if name is not None and (MODEL_NAME.fullmatch(name) is None or name in (AUTO, NONE)):
        raise InvalidArgumentError(f"{name!r:.80} cannot be the name of a model of a family", hint=_NAME_HINT)
    chosen = model_name(source) if name is None else name
    if chain.member_named(chosen) is not None:
        raise UnsupportedError(
            f"the family has a model called {chosen} already", where=source.path, hint="Give another `name` (--name)."
        )
    return chosen


def _member(run: Path, chain: ChainIndex, name: str) -> Member:
    member = chain.member_named(name)
    if member is None:
        names = [one.name or "" for one in chain.members]
        raise NotFoundError(f"no model {name} in this family", where=run, hint=f"It has {list_names(names)}.")
    return member


@dataclass(frozen=True)
class _Differences:
    """How the tensors of a model fit those of its parent: the names of those that are stored in full."""

    fitting: int
    new: tuple[str, ...]
    reshaped: tuple[str, ...]
    retyped: tuple[str, ...]

    def notes(self, member: Member, source: Checkpoint, earlier: Checkpoint) -> tuple[Notice, ...]:
        """A note for each kind of tensor that cannot be a delta."""
        texts: tuple[tuple[str, Collection[str]], ...] = (
            (f"not in {member.name}, so stored in full", self.new),
            (f"of another shape than in {member.name}, so stored in full", self.reshaped),
            (f"of another type than in {member.name}, so stored in full", self.retyped),
        )
        notes = tuple(
            Notice(f"{len(names):,} tensor{'s' * (len(names) > 1)} {text}", tuple(names))
            for text, names in texts
            if names
        )
        hint = naming_hint(source, earlier) if self.new else None
        return notes if hint is None else (*notes, Notice(hint))


def _differences(source: Checkpoint, earlier: Checkpoint) -> _Differences:
    fitting, new, reshaped, retyped = 0, list[str](), list[str](), list[str]()
    for parameter in source.parameters.values():
        if parameter.role == "extra":
            continue
        before = earlier.parameters.get(parameter.name)
        if before is None:
            new.append(parameter.name)
        elif before.weight.shape != parameter.weight.shape:
            reshaped.append(parameter.name)
        elif before.weight.dtype != parameter.weight.dtype:
            retyped.append(parameter.name)
        else:
            fitting += 1
    return _Differences(fitting, tuple(new), tuple(reshaped), tuple(retyped))


def _sentence(text: str | None) -> str:
    return "" if text is None else f"{text[0].upper()}{text[1:]}. "
