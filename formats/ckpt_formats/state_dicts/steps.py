"""The step at which a tree was saved. Trainers state it in several places, which should agree."""

from collections.abc import Iterator, Mapping

from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.values import Value, is_natural

_STEP_KEYS = ("step", "global_step", "iteration", "global_steps")
_STEP_PLACES = ("train_state", "trainer_state", "trainer", "state", "app")
_COUNTS = ("epoch",)
"""Further counters that a tree may state several times."""


def step_of(root: Mapping[str, Value]) -> int | None:
    """The step that the top level states, else the step in one of the dicts in which trainers store it."""
    return next((step for _, step in _stated(root, _STEP_KEYS)), None)


def contradictions(root: Mapping[str, Value]) -> tuple[Notice, ...]:
    """Notices if a tree states two different steps or epochs."""
    notices = []
    for counter, keys in (("step", _STEP_KEYS), ("epoch", _COUNTS)):
        stated = dict(_stated(root, keys))
        if len(set(stated.values())) > 1:
            first = next(iter(stated))
            text = f"the file states more than one {counter}; the value of `{first}` is used"
            values = tuple(f"{place} {count}" for place, count in stated.items())
            notices.append(Notice(text, values, Weight.UNSURE))
    return tuple(notices)


def _stated(root: Mapping[str, Value], keys: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for place in ("", *_STEP_PLACES):
        inside = root if not place else root.get(place)
        if isinstance(inside, dict):
            for key in keys:
                if is_natural(inside.get(key)):
                    yield f"{place}.{key}" if place else key, inside[key]
