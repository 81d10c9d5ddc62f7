"""Finds the model in a tree of state dicts without its optimizers.

Trainers use different keys for the model. If a key is one of `MODEL_KEYS`, its value is the model. Else the model is
every entry with weights (floats with axes), and the names of its tensors begin with the key of the entry. Averages of
weights, random states and similar entries are not part of the model.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.leaves import Leaf, has_tensor
from ckpt_formats.state_dicts.optimizer_form import OPTIMIZER_KEY, Place, title

MODEL_KEYS = (
    *("model", "state_dict", "model_state_dict", "module", "net", "network", "params"),
    *("model_state", "model_states", "net_state_dict", "network_state_dict", "weights", "model_weights"),
)
_PLAIN_KEYS = ("model", "state_dict", "model_state_dict", "model_state")
"""Those that are unlikely names of a submodule."""
_MAX_WRAPPERS = 3
"""Limit of nested dicts in which such a key is searched."""
_AVERAGES = re.compile(r"(?:^|[^a-z])(?:ema|swa|shadow|averaged?|avg)(?:$|[^a-z])|(?:_|^)ema|ema$", re.IGNORECASE)
_NOT_A_MODEL = re.compile(
    r"rng|random|seed|loader|sampler|sched|scaler|callback|loops?$|metric|history|meter|loss|queue|stats|dataset|"
    r"^(?:args|amp|epoch|config|cfg|hyper_?parameters|trainer|train_state|extra.*|meta)$",
    re.IGNORECASE,
)
"""Matches keys of entries that scripts save in addition to a model."""


@dataclass(frozen=True)
class ModelTree:
    """The model's dict."""

    place: Place | None
    """Where it is; None: its tensors and dicts are entries of the top level."""
    tree: Mapping[Value, Value]
    notices: tuple[Notice, ...] = field(default=())

    def contains(self, place: Place) -> bool:
        """Whether this place is inside the model's dict, or inside an entry that is part of the model."""
        if self.place is None:
            return bool(place) and place[0] in self.tree
        return place[: len(self.place)] == self.place


def without_model(root: Mapping[Value, Value], model: ModelTree) -> dict[Value, Value]:
    """The top level without the model."""
    if model.place is None:
        return {key: value for key, value in root.items() if key not in model.tree}
    return _rest(root, model.place)


def find_model(root: Mapping[Value, Value], *, had_optimizer: bool) -> ModelTree:
    """The model in a tree without optimizers. Its dict is empty if there is no model.

    `had_optimizer`: the tree had an optimizer. Then, if weights are at the top level, they alone are the model.
    """
    if (place := _find_by_key(root)) is not None:
        model = root
        for key in place:
            model = _as_dict(model[key])
        rest = _rest(root, place)
        others = [key for key, value in rest.items() if _may_be_another(key, value)]
        return ModelTree(place, model, _unchosen_notice(title(place), others))
    return _find_by_content(root, had_optimizer)


def _may_be_another(key: Value, value: Value) -> bool:
    """Whether the entry could also be a model: by its key, or because it has weights."""
    count = sum(map(_is_weight, _leaves(value))) if _is_tree(value) and not OPTIMIZER_KEY.search(str(key)) else 0
    return count > (0 if key in MODEL_KEYS or _AVERAGES.search(str(key)) else 1)


def has_weights(value: Value) -> bool:
    """Whether a value contains floats with axes."""
    return any(_is_weight(leaf) for leaf in _leaves(value))


def _find_by_key(root: Mapping[Value, Value]) -> Place | None:
    """The place of a dict of tensors under one of the model's keys, also inside the only dict with tensors."""
    place: Place = ()
    for _ in range(_MAX_WRAPPERS):
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


def _find_by_content(root: Mapping[Value, Value], had_optimizer: bool) -> ModelTree:
    """The model in a tree where no key is one of `MODEL_KEYS`."""
    bare = {key: value for key, value in root.items() if isinstance(value, Leaf)}
    dicts = {key: _as_dict(value) for key, value in root.items() if _is_tree(value)}
    with_weights = {
        key: value for key, value in dicts.items() if has_weights(value) and not OPTIMIZER_KEY.search(str(key))
    }
    likely = {key: value for key, value in with_weights.items() if not _NOT_A_MODEL.search(str(key))} or with_weights
    averages = [key for key in likely if _AVERAGES.search(str(key))]
    if any(map(_is_weight, bare.values())):
        chosen = {**bare, **({} if had_optimizer else {k: v for k, v in likely.items() if k not in averages})}
    elif likely:
        chosen = {k: v for k, v in likely.items() if k not in averages} or likely
    else:  # no floats, only integers, such as a table or quantised weights
        chosen = {k: v for k, v in (bare | dicts).items() if not _is_not_a_model(k) and not _is_random(v)}
    order = [key for key in root if key in chosen]
    others = (key for key, value in with_weights.items() if key in likely or _may_be_another(key, value))
    unchosen = [key for key in (*others, *bare) if key not in chosen]
    notices: tuple[Notice, ...] = ()
    chosen_dicts = [key for key in order if key in dicts]
    if chosen_dicts and (len(chosen_dicts) < len(order) or len(dicts) > 1 or not _is_plain(root, chosen_dicts)):
        text = "no key states which entry is the model: these are read as the model, by names that begin with the key"
        notices = (Notice(text, tuple(str(key) for key in order), Weight.UNSURE),)
    if unchosen:
        notices = (*notices, *_unchosen_notice(", ".join(str(key) for key in order[:3]), unchosen))
    return ModelTree(None, {key: chosen[key] for key in order}, notices)


def _is_plain(root: Mapping[Value, Value], joined: list[Value]) -> bool:
    """Whether the tree consists only of dicts of tensors."""
    return len(joined) == len(root)


def _unchosen_notice(chosen: str, names: list[Value]) -> tuple[Notice, ...]:
    if not names:
        return ()
    text = f"the model is read from `{chosen}`; other possible weights of a model are carried as extras"
    return (Notice(text, tuple(str(key) for key in names), Weight.UNSURE),)


def _is_not_a_model(key: Value) -> bool:
    return bool(_NOT_A_MODEL.search(str(key)) or OPTIMIZER_KEY.search(str(key)))


def _rest(root: Mapping[Value, Value], place: Place) -> dict[Value, Value]:
    """The root without the value at a place."""
    first, *inner = place
    rest = {key: value for key, value in root.items() if key != first}
    if not inner:
        return rest
    inner_rest = _rest(root[first], tuple(inner))
    return {key: inner_rest if key == first else value for key, value in root.items() if key != first or inner_rest}


def _as_dict(value: Value) -> Value:
    """A list of dicts as a dict by number, because some scripts save their models as lists; else the value."""
    if type(value) in (list, tuple) and value and all(isinstance(item, dict) for item in value):
        return {str(i): item for i, item in enumerate(value)}
    return value


def _leaves(value: Value) -> Iterator[Leaf]:
    """The tensors in a value and in nested dicts; each dict is visited once."""
    seen, pending = set(), [value]
    while pending:
        item = _as_dict(pending.pop())
        if isinstance(item, Leaf):
            yield item
        elif isinstance(item, dict) and id(item) not in seen:
            seen.add(id(item))
            pending += item.values()


def _is_random(value: Value) -> bool:
    """Whether all tensors in a value are states of PyTorch's random numbers, on a CPU or a GPU."""
    return all(leaf.dtype == np.uint8 and leaf.shape in ((5056,), (16,)) for leaf in _leaves(value))


def _is_weight(leaf: Leaf) -> bool:
    return len(leaf.shape) > 0 and (is_float(leaf.dtype) or leaf.dtype.kind == "c")
