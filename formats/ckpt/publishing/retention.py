"""Remove what the last steps of a published chain do not need, once no follower reads it any more.

Nothing is noted for that: what is no longer needed follows from the times of objects, so any publisher can go on. The
steps that stay are counted from the last step that was published at least ten minutes ago.
"""

import re
import time
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
    superseded = [name for name in names if steps[name] in old]
    if not superseded:
        return 0
    of_epoch = [name for name in superseded if name.epoch == superseded[-1].epoch]
    stays = of_epoch[0] == names[0] and len(of_epoch) <= int(keep.partition(":")[2])
    if stays and not _has_leftovers(publication, old):
        return 0  # nothing is read of the records while all steps stay
    first = _base_of(publication, of_epoch, of_epoch[-int(keep.partition(":")[2]) :][0])
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


def _base_of(publication: Publication, names: list[StepName], name: StepName) -> StepName:
    """The last base up to a step; `names` are those of its epoch, in their order."""
    earlier = [other for other in names if other <= name]
    while earlier:
        some, earlier = earlier[-_AT_ONCE:], earlier[:-_AT_ONCE]
        publication.load_records([one.key for one in some])
        base = next((one for one in reversed(some) if publication.record_at(one.key).is_base), None)
        if base is not None:
            return base
    return names[0]
