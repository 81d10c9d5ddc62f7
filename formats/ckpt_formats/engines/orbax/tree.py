"""The parts of a tree of JAX: the model's parameters, the moments of optax's Adam, and everything else.

A `TrainState` of Flax is `step`, `params` and `opt_state`. What optax keeps for each parameter is a tree of the same
form as `params`, so its leaves are known by their paths below it: `opt_state/0/mu/decoder/kernel` is the state `mu` of
`decoder/kernel`. Those of Adam get torch's names, `exp_avg` and `exp_avg_sq`; its count becomes `step`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.orbax.metadata import SEQUENCE, Leaf

Path = tuple[str, ...]
MODEL_KEYS = ("params", "model", "weights")
"""The keys under which scripts save parameters."""
_NOT_MODEL = ("opt_state", "optimizer", "opt", "step", "rng", "rngs", "key")
PARAMETERS = "params"
BIASES = "MoEBiasVar"
"""A collection beside `params` where MaxText's converter saves the balance biases of routers."""
_AUXILIARY = ("nnx_aux", "model")
"""Where MaxText saves all variables of a training that are no parameters, these biases among them."""
_BIAS = ("MoeBlock_0", "gate", "bias")
TORCH_NAMES = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}
"""What optax calls states, and what torch calls the same."""
COUNT = "count"


@dataclass(frozen=True)
class ModelPart:
    """Which leaves are parameters: those below a path, whose names are the rest of their paths."""

    prefix: Path
    names: dict[Path, str]
    """The name of each parameter by its path below the prefix."""
    separator: str
    has_collections: bool = False
    """Whether the paths begin with a collection, which the names of those in `params` leave out."""


@dataclass(frozen=True)
class OptimizerPart:
    """The states of optax that belong to parameters, by their places in the tree."""

    place: Path
    """The path of the optimizer's state that has them."""
    states: dict[str, dict[Path, Path]]
    """By optax's name of a state: the path of each leaf, by the path of its parameter."""
    count: Path | None
    """The leaf that counts the steps."""


def find_model(leaves: Mapping[Path, Leaf], arrays: Mapping[Path, Tensor]) -> ModelPart | None:
    """The parameters among the leaves; None if there are none.

    They are below `params`, or a key that means the same, at the top or one level down; else all arrays that are not
    named like the state of an optimizer. A collection of MaxText beside `params` is part of the names.

    Raises: UnsupportedError for keys that make names ambiguous.
    """
    prefix = _prefix(arrays)
    inside = [path for path in arrays if path[: len(prefix)] == prefix and (prefix or path[0] not in _NOT_MODEL)]
    if not inside:
        return None
    while all(len(path) > len(prefix) + 1 and path[len(prefix)] == "params" for path in inside):
        prefix = (*prefix, "params")
    below = [path[len(prefix) :] for path in inside]
    separator = _separator(below)
    # Where names would not tell the collection, it is part of all of them.
    is_stated = all(len(path) > 1 and path[:2] != (PARAMETERS, BIASES) for path in below)
    if is_stated and {path[0] for path in below} == {PARAMETERS, BIASES}:
        return ModelPart(
            prefix, {path: separator.join(path[path[0] == PARAMETERS :]) for path in below}, separator, True
        )
    return ModelPart(prefix, {path: separator.join(path) for path in below}, separator)


def path_of(name: str, separator: str, has_collections: bool) -> Path:
    """The path of a parameter below the prefix, by its name: the reverse of `ModelPart.names`."""
    path = tuple(name.split(separator))
    return (PARAMETERS, *path) if has_collections and path[0] != BIASES else path


def in_collection(path: Path) -> Path:
    """The path of a leaf as MaxText's converter has it, by that which a training has."""
    is_bias = path[: len(_AUXILIARY)] == _AUXILIARY and path[-len(_BIAS) :] == _BIAS
    return (PARAMETERS, BIASES, *path[len(_AUXILIARY) :]) if is_bias else path


def in_training(path: Path) -> Path:
    """The reverse of `in_collection`."""
    return (*_AUXILIARY, *path[2:]) if path[:2] == (PARAMETERS, BIASES) else path


def _prefix(arrays: Mapping[Path, Tensor]) -> Path:
    for depth in (0, 1):
        heads = dict.fromkeys(path[: depth + 1] for path in arrays if len(path) > depth + 1)
        for key in MODEL_KEYS:
            if prefix := next((head for head in heads if head[-1] == key), None):
                return prefix
    return ()


def _separator(paths: Sequence[Path]) -> str:
    keys = {key for path in paths for key in path}
    for separator in (".", "/"):
        if not any(separator in key for key in keys):
            return separator
    raise UnsupportedError("keys of parameters contain both `.` and `/`, so names would not be unique")


def find_optimizer(model: ModelPart, arrays: Mapping[Path, Tensor]) -> list[OptimizerPart]:
    """The states that have the form of the model, in the order of the tree.

    A state belongs to a parameter if its path ends with the parameter's, and it has the parameter's shape.
    """
    weights = {path: arrays[(*model.prefix, *path)].shape for path in model.names}
    last_keys = {path[-1] for path in weights}
    states_by_place: dict[Path, dict[str, dict[Path, Path]]] = {}
    inner = _inner_prefixes(model.prefix)
    for path, tensor in arrays.items():
        if path[: len(model.prefix)] == model.prefix and path[len(model.prefix) :] in weights:
            continue
        if path[-1] not in last_keys:
            continue
        for at in range(1, len(path)):
            own = _without(path[at:], inner)
            if path[at - 1] in TORCH_NAMES and weights.get(own) == tensor.shape:
                states_by_place.setdefault(path[: at - 1], {}).setdefault(path[at - 1], {})[own] = path
                break
    counts = (path for path, tensor in arrays.items() if path[-1] == COUNT and tensor.size == 1)
    count_of = {path[:-1]: path for path in counts}
    return [OptimizerPart(place, states, count_of.get(place)) for place, states in states_by_place.items()]


def _inner_prefixes(prefix: Path) -> Path:
    """The keys that a tree of states repeats: of `params/params`, all after the first, which the trainer made."""
    at = next((i for i, key in enumerate(prefix) if key in MODEL_KEYS), len(prefix))
    return prefix[at + 1 :]


def _without(path: Path, prefix: Path) -> Path:
    return path[len(prefix) :] if prefix and path[: len(prefix)] == prefix else path


def nested(leaves: Mapping[Path, Leaf], values: Mapping[Path, Value]) -> tuple[dict[str, Value], list[str]]:
    """The values in dicts and lists, as the kinds of their keys state; and the paths of lists of which items are
    missing, so that they are dicts by number."""
    root: dict[str, Value] = {}
    lists: set[Path] = set()
    for path, value in values.items():
        node = root
        kinds = leaves[path].kinds
        for depth, key in enumerate(path[:-1]):
            inside = node.setdefault(key, {})
            if not isinstance(inside, dict):
                raise UnsupportedError(f"`{printable('.'.join(path))}` is inside a value")
            if kinds[depth + 1] == SEQUENCE:
                lists.add(path[: depth + 1])
            node = inside
        node[path[-1]] = value
    broken: list[str] = []
    return {key: _listed(value, (key,), lists, broken) for key, value in root.items()}, broken


def _listed(value: Value, path: Path, lists: set[Path], broken: list[str]) -> Value:
    if not isinstance(value, dict):
        return value
    inside = {key: _listed(item, (*path, key), lists, broken) for key, item in value.items()}
    if path in lists:
        if list(inside) == [str(i) for i in range(len(inside))]:
            return list(inside.values())
        broken.append(".".join(path))
    return inside
