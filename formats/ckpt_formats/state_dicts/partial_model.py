"""Signs that a tree is a part of a model, of one rank or one pipeline stage."""

import re
from collections.abc import Iterable, Iterator, Mapping

from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.values import Record, Value, is_natural

_LAYER = re.compile(r"((?:.*\.)?(?:layers?|blocks?|h))\.(\d{1,6})\.(.+)")
_PARALLEL_KEY = re.compile(
    r"(?:tp|pp|ep|mp|tensor|pipeline|expert|model)(?:_model)?(?:_parallel)?(?:_world)?_(size|rank|degree)|"
    r"(?:pipeline_)?stage(?:_id)?|shard_id|partition_id"
)


def signs_of_part(root: Mapping[str, Value], names: Iterable[str]) -> Iterator[Notice]:
    """Notices for a tree that looks like a part of a model, by its arguments and by the numbers of its layers."""
    stated = [f"{key} {value}" for key, value in _stated(root) if _states_part(key, value)]
    if stated:
        text = "the file states that the model was split over ranks or stages, and may contain only a part of it"
        yield Notice(text, tuple(stated), Weight.UNSURE)
    layers: dict[str, dict[int, set[str]]] = {}
    for name in names:
        if match := _LAYER.fullmatch(name):
            layers.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    first_layers = tuple(f"{stack}.{min(numbers)}" for stack, numbers in layers.items() if _begins_after_zero(numbers))
    if first_layers:
        text = "layers do not begin with number 0: is this a part of the model, such as a pipeline stage? The first are"
        yield Notice(text, first_layers, Weight.UNSURE)


def _stated(root: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    """The entries of the top level, and the arguments that a script saved."""
    yield from root.items()
    arguments = root.get("args", root.get("config"))
    inside = arguments.state if isinstance(arguments, Record) else arguments
    for key, value in inside.items() if isinstance(inside, dict) else ():
        if isinstance(key, str):
            yield key, value


def _states_part(key: str, value: Value) -> bool:
    match = _PARALLEL_KEY.fullmatch(key)
    return match is not None and is_natural(value) and value > (1 if match[1] in ("size", "degree") else 0)


def _begins_after_zero(layers: Mapping[int, set[str]]) -> bool:
    """Whether they begin after 0, have no gaps, and all have the same tensors. Else they are no stack of layers."""
    numbers = sorted(layers)
    all_equal = all(layers[number] == layers[numbers[0]] for number in numbers)
    return numbers[0] > 0 and all_equal and len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
