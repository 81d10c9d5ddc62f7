"""Where in a tree the model is. Its optimizers have been taken out of it before.

Trainers call the model as they like. A key that says what it is decides; else the model is what has weights: floats
with axes. Of several such, all are the model, by names that begin with their keys; averages of weights beside
them, random states and the like are not.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.leaves import Leaf, has_tensor
from ckpt_formats.state_dicts.optimizer_form import CALLED, Place, title

MODEL_KEYS = (
    *("model", "state_dict", "model_state_dict", "module", "net", "network", "params"),
    *("model_state", "model_states", "net_state_dict", "network_state_dict", "weights", "model_weights"),
)
_PLAIN_KEYS = ("model", "state_dict", "model_state_dict", "model_state")
"""Those that no submodule is likely to be called by."""
_WRAPPERS = 3
"""Dicts around dicts in which such a key is looked for."""
_AVERAGES = re.compile(r"(?:^|[^a-z])(?:ema|swa|shadow|averaged?|avg)(?:$|[^a-z])|(?:_|^)ema|ema$", re.IGNORECASE)
_BESIDE = re.compile(
    r"rng|random|seed|loader|sampler|sched|scaler|callback|loops?$|metric|history|meter|loss|queue|stats|dataset|"
    r"^(?:args|amp|epoch|config|cfg|hyper_?parameters|trainer|train_state|extra.*|meta)$",
    re.IGNORECASE,
)
"""Finds keys of what scripts save beside a model."""


@dataclass(frozen=True)
class ModelTree:
    """The model's dict."""

    place: Place | None
    """Where it is; None: its tensors and dicts are themselves entries of the top level."""
    tree: Mapping[Value, Value]
    notices: tuple[Notice, ...] = field(default=())

    def holds(self, place: Place) -> bool:
        """Does something at this place lie within the model's dict, or within what is joined to be it?"""
        if self.place is None:
            return bool(place) and place[0] in self.tree
        return place[: len(self.place)] == self.place


def without_model(root: Mapping[Value, Value], model: ModelTree) -> dict[Value, Value]:
    """The top level without the model."""
    if model.place is None:
        return {key: value for key, value in root.items() if key not in model.tree}
    return _rest(root, model.place)


def find_model(root: Mapping[Value, Value], *, beside_optimizer: bool) -> ModelTree:
    """The model in a tree without optimizers. Its dict is empty if there is none."""
    if (place := _known(root)) is not None:
        model = root
        for key in place:
            model = _as_dict(model[key])
        rest = _rest(root, place)
        others = [key for key, value in rest.items() if _is_another(key, value)]
        return ModelTree(place, model, _others(title(place), others))
    return _top_level(root, beside_optimizer)


def _is_another(key: Value, value: Value) -> bool:
    """Could it be a model's, too: by its key, or having weights?"""
    count = sum(map(_is_weight, _leaves(value))) if _is_tree(value) and not CALLED.search(str(key)) else 0
    return count > (0 if key in MODEL_KEYS or _AVERAGES.search(str(key)) else 1)


def has_weights(value: Value) -> bool:
    """Are there floats with axes in it?"""
    return any(_is_weight(leaf) for leaf in _leaves(value))


def _known(root: Mapping[Value, Value]) -> Place | None:
    """The place of a dict of tensors under a key that says model, maybe in the one dict that has tensors."""
    place: Place = ()
    for _ in range(_WRAPPERS):
        keys = _PLAIN_KEYS if place else MODEL_KEYS
        if (key := next((key for key in keys if _is_tree(root.get(key))), None)) is not None:
            return (*place, key)
        inside = [key for key, value in root.items() if has_tensor(value)]
        if len(inside) != 1 or not isinstance(root[inside[0]], dict):
            return None
        place, root = (*place, inside[0]), root[inside[0]]
    return None


def _is_tree(value: Value) -> bool:
    inner = _as_dict(value)
    return isinstance(inner, dict) and has_tensor(inner)


def _top_level(root: Mapping[Value, Value], beside_optimizer: bool) -> ModelTree:
    """The model whose tensors have no dict of a known name."""
    bare = {key: value for key, value in root.items() if isinstance(value, Leaf)}
    dicts = {key: _as_dict(value) for key, value in root.items() if _is_tree(value)}
    able = {key: value for key, value in dicts.items() if has_weights(value) and not CALLED.search(str(key))}
    likely = {key: value for key, value in able.items() if not _BESIDE.search(str(key))} or able
    averages = [key for key in likely if _AVERAGES.search(str(key))]
    if any(map(_is_weight, bare.values())):
        chosen = {**bare, **({} if beside_optimizer else {k: v for k, v in likely.items() if k not in averages})}
    elif likely:
        chosen = {k: v for k, v in likely.items() if k not in averages} or likely
    else:  # no floats: integers alone, such as a table or quantised weights
        chosen = {k: v for k, v in (bare | dicts).items() if not _is_beside(k) and not _is_random(v)}
    order = [key for key in root if key in chosen]
    others = (key for key, value in able.items() if key in likely or _is_another(key, value))
    left = [key for key in (*others, *bare) if key not in chosen]
    notices: tuple[Notice, ...] = ()
    joined = [key for key in order if key in dicts]
    if joined and (len(joined) < len(order) or len(dicts) > 1 or not _is_plain(root, joined)):
        text = "no key says which entry is the model: taken for it, each by names that begin with its key"
        notices = (Notice(text, tuple(str(key) for key in order), Weight.UNSURE),)
    if left:
        notices = (*notices, *_others(", ".join(str(key) for key in order[:3]), left))
    return ModelTree(None, {key: chosen[key] for key in order}, notices)


def _is_plain(root: Mapping[Value, Value], joined: list[Value]) -> bool:
    """Is the tree nothing but dicts of tensors?"""
    return len(joined) == len(root)


def _others(chosen: str, others: list[Value]) -> tuple[Notice, ...]:
    if not others:
        return ()
    text = f"the model was read from `{chosen}`; what else could be a model's weights is carried as extras"
    return (Notice(text, tuple(str(key) for key in others), Weight.UNSURE),)


def _is_beside(key: Value) -> bool:
    return bool(_BESIDE.search(str(key)) or CALLED.search(str(key)))


def _rest(root: Mapping[Value, Value], place: Place) -> dict[Value, Value]:
    """The root without what lies at a place."""
    first, *inner = place
    rest = {key: value for key, value in root.items() if key != first}
    if not inner:
        return rest
    left = _rest(root[first], tuple(inner))
    return {key: left if key == first else value for key, value in root.items() if key != first or left}


def _as_dict(value: Value) -> Value:
    """Lists of dicts as dicts: some scripts save their models so."""
    if type(value) in (list, tuple) and value and all(isinstance(item, dict) for item in value):
        return {str(i): item for i, item in enumerate(value)}
    return value


def _leaves(value: Value) -> Iterator[Leaf]:
    """Those in it and in dicts in it, each dict once."""
    seen, waiting = set(), [value]
    while waiting:
        one = _as_dict(waiting.pop())
        if isinstance(one, Leaf):
            yield one
        elif isinstance(one, dict) and id(one) not in seen:
            seen.add(id(one))
            waiting += one.values()


def _is_random(value: Value) -> bool:
    """Is it the state of PyTorch's random numbers, on a CPU or a GPU, or are there only such in it?"""
    return all(leaf.dtype == np.uint8 and leaf.shape in ((5056,), (16,)) for leaf in _leaves(value))


def _is_weight(leaf: Leaf) -> bool:
    return len(leaf.shape) > 0 and (is_float(leaf.dtype) or leaf.dtype.kind == "c")
