"""Signs that a tree is a part of a model: what one rank, or one pipeline stage, had of it."""

import re
from collections.abc import Iterable, Iterator, Mapping

from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.values import Record, Value

_LAYER = re.compile(r"((?:.*\.)?(?:layers?|blocks?|h))\.(\d{1,6})\.(.+)")
_CUT = re.compile(
    r"(?:tp|pp|ep|mp|tensor|pipeline|expert|model)(?:_model)?(?:_parallel)?(?:_world)?_(size|rank|degree)|"
    r"(?:pipeline_)?stage(?:_id)?|shard_id|partition_id"
)


def signs_of_part(root: Mapping[str, Value], names: Iterable[str]) -> Iterator[Notice]:
    """What to tell of a tree that looks like a part of a model, by what it states and by its layers' numbers."""
    stated = [f"{key} {value}" for key, value in _stated(root) if _says_part(key, value)]
    if stated:
        text = "the file states that the model was cut over ranks or stages, and may hold a part of it"
        yield Notice(text, tuple(stated), Weight.UNSURE)
    layers: dict[str, dict[int, set[str]]] = {}
    for name in names:
        if match := _LAYER.fullmatch(name):
            layers.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    begin = tuple(f"{stack}.{min(found)}" for stack, found in layers.items() if _begins_late(found))
    if begin:
        text = "layers do not begin with number 0: is this a part of the model, such as a pipeline stage? The first are"
        yield Notice(text, begin, Weight.UNSURE)


def _stated(root: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    """The entries of the top level, and of the arguments that a script saved."""
    yield from root.items()
    arguments = root.get("args", root.get("config"))
    inside = arguments.state if isinstance(arguments, Record) else arguments
    for key, value in inside.items() if isinstance(inside, dict) else ():
        if isinstance(key, str):
            yield key, value


def _says_part(key: str, value: Value) -> bool:
    match = _CUT.fullmatch(key)
    return match is not None and is_natural(value) and value > (1 if match[1] in ("size", "degree") else 0)


def _begins_late(layers: Mapping[int, set[str]]) -> bool:
    """Do they begin after 0, without gaps, and have the same tensors each? Others are no stack of layers."""
    numbers = sorted(layers)
    alike = all(layers[number] == layers[numbers[0]] for number in numbers)
    return numbers[0] > 0 and alike and len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
