"""At which step a tree was saved. Trainers state it in several places, which should say the same."""

from collections.abc import Iterator, Mapping

from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.values import Value

_STEP_KEYS = ("step", "global_step", "iteration", "global_steps")
_STEP_PLACES = ("train_state", "trainer_state", "trainer", "state", "app")
_COUNTS = ("epoch",)
"""What else counts the run, and is stated as often."""


def step_of(root: Mapping[str, Value]) -> int | None:
    """The step: what the top level says, else what is said in the dicts that trainers have for it."""
    return next((step for _, step in _stated(root, _STEP_KEYS)), None)


def contradictions(root: Mapping[str, Value]) -> tuple[Notice, ...]:
    """Where a tree says two things of its step, or of its epoch."""
    found = []
    for what, keys in (("step", _STEP_KEYS), ("epoch", _COUNTS)):
        stated = dict(_stated(root, keys))
        if len(set(stated.values())) > 1:
            first = next(iter(stated))
            text = f"the file states more than one {what}; what `{first}` says is taken for it"
            said = tuple(f"{place} {count}" for place, count in stated.items())
            found.append(Notice(text, said, Weight.UNSURE))
    return tuple(found)


def _stated(root: Mapping[str, Value], keys: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for place in ("", *_STEP_PLACES):
        inside = root if not place else root.get(place)
        if isinstance(inside, dict):
            for key in keys:
                if is_natural(inside.get(key)):
                    yield f"{place}.{key}" if place else key, inside[key]
