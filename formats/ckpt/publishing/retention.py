"""Remove what the last steps of a published chain do not need, once no follower reads it any more.

Nothing is noted for that: what is no longer needed follows from the times of objects, so any publisher can go on. The
steps that stay are counted from the last step that was published at least ten minutes ago, through all epochs.
"""

import re
import time
from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Annotated

from ckpt.publishing.publication import Publication
from ckpt_formats.core.arguments import Admits
from ckpt_formats.universal.published.records import (
    FOLDER,
    StepName,
    parse_fold_name,
    parse_name,
)

KeepSteps = Annotated[str, Admits("last:N", re.compile(r"last:[1-9][0-9]{0,8}").fullmatch)]
"""How many steps stay, as a text."""
_EVERY = 0.1
"""From one look at all objects to the next, as a share of the grace."""
_AT_ONCE = 16
"""Records that are read at once to find a base."""
GRACE_SECONDS = 600.0
"""A follower may read what it needs for so long after a later step was published."""


def remove_unneeded(publication: Publication, keep: KeepSteps, grace: float = GRACE_SECONDS) -> int:
    """Remove the records, folds and objects that the last steps do not need; returns how many objects of any kind.

    Every step that stays can be reached from a base that stays. Objects of steps that were never published are removed,
    too, once there are more objects than all steps can need. The chain is listed once a minute at most, so this may be
    called after each step. `grace`: seconds for which followers may still read what is no longer needed.

    Raises `OSError`, `LockedError`.
    """
    now = time.monotonic()
    if publication.cleaned is not None and now - publication.cleaned < _EVERY * grace:
        return 0
    publication.cleaned = now
    place = publication.place.within(FOLDER)
    entries = place.list()
    latest = max((one.modified for one in entries.values()), default=0.0)
    old = {key for key, one in entries.items() if one.modified <= latest - grace}
    stems = {key: key.rpartition("/")[2].removesuffix(".json") for key in entries}
    steps = {name: key for key in entries if key.startswith("steps/") and (name := parse_name(stems[key]))}
    names = sorted(steps)
    head = publication.head
    superseded = [name for name in names if steps[name] in old and head is not None and name <= head.record.name]
    if not superseded:
        return 0
    number = int(keep.partition(":")[2])
    stays = superseded[0] == names[0] and len(superseded) <= number
    if stays and not _has_leftovers(publication, old):
        return 0  # nothing is read of the records while all steps stay
    first = _first_needed(publication, names, superseded, number, entries)
    if first is None:
        return 0
    needed = {steps[name] for name in names if name >= first}
    for key in entries:
        fold = parse_fold_name(stems[key]) if key.startswith("folds/") else None
        if fold is not None and StepName(fold[0].epoch, fold[1]) >= first:
            needed.add(key)
    publication.load_records([f"{FOLDER}/{key}" for key in needed])
    for key in list(needed):
        needed |= {one.removeprefix(f"{FOLDER}/") for one in publication.objects_of(f"{FOLDER}/{key}")}
    publication.first = first
    removable = sorted(
        key for key in old - needed if key.partition("/")[0] in ("steps", "folds", "objects", "receipts")
    )
    if not removable:
        return 0
    publication.confirm()
    records = [key for key in removable if not key.startswith("objects/")]
    objects = [key for key in removable if key.startswith("objects/")]
    place.delete(records)  # first, so that no record names an object that is not there
    publication.forget_records(f"{FOLDER}/{key}" for key in records)
    publication.removed.update(f"{FOLDER}/{key}" for key in objects)
    place.delete(objects)
    return len(removable)


def _has_leftovers(publication: Publication, old: set[str]) -> bool:
    """Whether there is more than published steps can need: killed processes have left it."""
    if any(key.startswith("receipts/") for key in old):
        return True
    records = sum(key.startswith(("steps/", "folds/")) for key in old)
    objects = sum(key.startswith("objects/") for key in old)
    model = publication.model
    return objects > records * len(model.pieces) + 1 + len(model.files)


def _first_needed(
    publication: Publication,
    names: Sequence[StepName],
    superseded: Sequence[StepName],
    number: int,
    keys: Collection[str],
) -> StepName | None:
    """The first base that the later steps need, and the last `number` of the superseded ones.

    None if none of these can be restored. `superseded`: none after the head. Steps are counted as readers list them: of
    several epochs with the same step, the last one. One that cannot be restored counts for nothing, such as a record
    that a killed process has left after steps that are gone.
    """
    bases: dict[StepName, StepName | None] = {}
    counted: dict[int, StepName] = {}
    # They may begin at an earlier base than a superseded one: a base may be there that was never published.
    later = [_base_of(publication, names, name, keys, bases) for name in sorted({*names} - {*superseded}, reverse=True)]
    for name in reversed(superseded):
        if len(counted) == number:
            break
        base = _base_of(publication, names, name, keys, bases)
        if base is not None:
            counted.setdefault(name.step, base)
    return min([*counted.values(), *(base for base in later if base is not None)]) if counted else None


def _base_of(
    publication: Publication,
    names: Sequence[StepName],
    name: StepName,
    keys: Collection[str],
    bases: dict[StepName, StepName | None],
) -> StepName | None:
    """The base with which the way to a step begins; None if a record or an object on the way is missing.

    `names`: all steps, in their order; `keys`: of all objects of the chain, without its folder; `bases`: what is known
    of steps, to which this adds.
    """
    way, at = list[StepName](), name
    while at not in bases:
        end = bisect_right(names, at)
        if end == 0 or names[end - 1] != at:
            bases[at] = None
            break
        publication.load_records([one.key for one in names[max(0, end - _AT_ONCE) : end] if one not in bases])
        way.append(at)
        record = publication.record_at(at.key)
        if not all(key.removeprefix(f"{FOLDER}/") in keys for key in publication.objects_of(at.key)):
            bases[at] = None
        elif record.parent is None:
            bases[at] = at
        else:
            at = record.parent.name
    bases.update(dict.fromkeys(way, bases[at]))
    return bases[at]
