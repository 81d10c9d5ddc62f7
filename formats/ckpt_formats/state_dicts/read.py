"""Splits a tree of state dicts into the model, the optimizer, and extras.

Trainers save one dict, with different keys. So the parts are detected by their
content: the model is a dict of tensors, the optimizer a dict of states and
groups, and everything else becomes extras.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ckpt_formats.containers.torchfile import Storage, StorageSlice
from ckpt_formats.core.checkpoint import MODEL, Group, Parameter, Role
from ckpt_formats.core.claims import MAX_NAMES
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record, Value, is_natural, kind_of
from ckpt_formats.state_dicts.extras import candidate_names, names_for_tensors
from ckpt_formats.state_dicts.keys import StateKeys
from ckpt_formats.state_dicts.leaves import (
    Leaf,
    find_ties,
    has_tensor,
    is_extra_state,
    named_leaves,
    non_tensor_items,
    tensor_leaf,
)
from ckpt_formats.state_dicts.model import MODEL_KEYS, ModelTree, find_model, without_model
from ckpt_formats.state_dicts.objects import open_objects
from ckpt_formats.state_dicts.optimizer import MatchedOptimizer, ParameterOrders, match_optimizers
from ckpt_formats.state_dicts.optimizer_form import OPTIMIZER_KEY, Optimizer, optimizers_in, without_optimizers
from ckpt_formats.state_dicts.parameter_order import NamedTensor
from ckpt_formats.state_dicts.record import KEY, has_record, with_record
from ckpt_formats.state_dicts.steps import contradictions, step_of
from ckpt_formats.state_dicts.tensor_parts import OBJECT
from ckpt_formats.state_dicts.training_state import TrainingState
from ckpt_formats.state_dicts.walk import holds_tensor

RESERVED = frozenset((*MODEL_KEYS, "optimizer", "optimizer_state_dict", "optim", "optimizer_state", "optim_state_dict"))
"""Keys that extras must not have, because readers take their values for the model or the optimizer."""


_LAYER = re.compile(r"((?:.*\.)?(?:layers?|blocks?|h))\.(\d{1,6})\.(.+)")
_PARALLEL_KEY = re.compile(
    r"(?:tp|pp|ep|mp|tensor|pipeline|expert|model)(?:_model)?(?:_parallel)?(?:_world)?_(size|rank|degree)|"
    r"(?:pipeline_)?stage(?:_id)?|shard_id|partition_id"
)


_OBJECT = f".{OBJECT}"


def training_state(
    root: Mapping[str, Value],
    where: Path,
    order: Sequence[str] = (),
    orders: Mapping[str, Sequence[str]] | None = None,
    *,
    further_extras: Mapping[str, Value] | None = None,
    in_order: bool = False,
) -> TrainingState:
    """The parts of a tree whose tensors are `TensorRef`s or `Tensor`s.

    `order` lists the names of the parameters for the only optimizer that numbers them, `orders` for optimizers by
    their places. `further_extras` are entries that become extras, whatever they look like. `in_order`: it is known
    that the model's names are in the order in which it registers them. Raises `CorruptError` if two tensors have one
    name, `RulesError` for impossible orders.
    """
    if has_record(root):
        rest = {key: value for key, value in root.items() if key != KEY}
        return with_record(training_state(rest, where, order, orders, further_extras=further_extras), root[KEY], where)
    without_objects = open_objects(root, str(where))
    root = without_objects.root
    optimizers = optimizers_in(root)
    model = find_model(without_optimizers(root, optimizers), had_optimizer=bool(optimizers))
    leaves = _leaves_by_name(model.tree, where)
    aliases = find_ties(leaves)
    named = [NamedTensor(name, tensor_leaf(leaf)) for name, leaf in leaves.items()]
    matched = _match(optimizers, named, aliases, ParameterOrders(order, orders or {}), in_order)
    aliases = {alias: name for alias, name in aliases.items() if alias not in matched.untied}
    parameters = _parameters(named, aliases, matched)
    groups = tuple(
        Group(
            names_for_tensors(dict(group.options), f"{place}/param_groups/{i}", parameters),
            tuple(aliases.get(name, name) for name in group.names),
        )
        for i, (place, group) in enumerate(matched.groups)
    )
    unmatched = [one for one in optimizers if one not in matched.optimizers]
    rest = _rest(root, model, matched.optimizers, unmatched)
    stated = {**root, **(further_extras or {})}
    extras = {key: names_for_tensors(value, key, parameters) for key, value in rest.items()}
    for key, value in (*without_objects.extras.items(), *(further_extras or {}).items()):
        free = next(name for name in candidate_names(key) if name not in extras)
        extras[free] = names_for_tensors(value, free, parameters)
    for key, value in non_tensor_items(model.tree):
        free = next(name for name in candidate_names(key) if name not in extras)
        extras[free] = names_for_tensors(value, free, parameters)
    notices = (
        *without_objects.notices,
        *not_weights(model.tree, rest if model.place is None else {}),
        *matched.notices,
        *_merge_notices(matched),
        *model.notices,
        *_unknown_optimizers(rest, unmatched),
        *contradictions(stated),
        *signs_of_part(stated, leaves),
    )
    return TrainingState(
        parameters, groups, extras, aliases, notices, step_of(stated), _keys(model, optimizers, matched.optimizers)
    )


def check_weights(state: TrainingState, root: Mapping[str, Value], where: Path) -> tuple[Notice, ...]:
    """Notices for a tree without a model. Raises `UnsupportedError` if it has no optimizer either."""
    if any(parameter.role != "extra" for parameter in state.parameters.values()):
        return ()
    if optimizers := optimizers_in(root):
        text = (
            "there are no weights of a model, only the state of an optimizer: it is carried as extras, without "
            "parameters"
        )
        return (Notice(text, tuple(one.title for one in optimizers if one.title), Weight.LOST),)
    entries = ", ".join(f"{printable(key)} ({kind_of(value)})" for key, value in list(root.items())[:5]) or "nothing"
    raise UnsupportedError(
        f"contains no weights of a model by their names: its entries are {entries}",
        where=where,
        hint="Name the file with the model: a dict of tensors by name, or a module.",
    )


def _match(
    optimizers: Sequence[Optimizer],
    named: Sequence[NamedTensor],
    aliases: Mapping[str, str],
    orders: ParameterOrders,
    in_order: bool,
) -> MatchedOptimizer:
    """Match with one name for tied tensors; if that fails, with all names, because parameters may only share data."""
    names = [one.name for one in named]
    trainable = [one for one in named if role_of(one) != "buffer"]
    untied = [one for one in trainable if one.name not in aliases]
    matched = match_optimizers(optimizers, names, untied, aliases, orders, in_order=in_order)
    if len(matched.optimizers) == len(optimizers) or not aliases or orders.any:
        return matched
    with_aliases = match_optimizers(optimizers, names, trainable, aliases, orders, in_order=in_order)
    return with_aliases if len(with_aliases.optimizers) == len(optimizers) else matched


def _parameters(
    named: Sequence[NamedTensor], aliases: Mapping[str, str], matched: MatchedOptimizer
) -> dict[str, Parameter]:
    """The model's tensors with their states and values. States of an alias become states of the tied tensor."""
    states = {aliases.get(name, name): own for name, own in matched.states.items()}
    values = {aliases.get(name, name): own for name, own in matched.values.items()}
    trained = {aliases.get(name, name) for _, group in matched.groups for name in group.names} | states.keys()
    parameters: dict[str, Parameter] = {}
    for one in named:
        name = one.name
        if name not in aliases:
            role = role_of(one)
            if matched.optimizers:
                role = "parameter" if name in trained else "buffer" if role == "buffer" else "frozen"
            parameters[name] = Parameter(name, role, {**states.get(name, {}), MODEL: one.tensor})
    for name, own_values in values.items():
        if own_values:
            named_values = {key: names_for_tensors(own, f"{name}/{key}", parameters) for key, own in own_values.items()}
            parameter = parameters[name]
            parameters[name] = Parameter(name, parameter.role, parameter.states, named_values)
    return parameters


def _rest(
    root: Mapping[str, Value], model: ModelTree, matched: Sequence[Optimizer], unmatched: Sequence[Optimizer]
) -> dict[str, Value]:
    """All entries except the model and the matched optimizers."""
    rest = {str(key): value for key, value in without_model(without_optimizers(root, matched), model).items()}
    for one in unmatched:
        if one.place and model.contains(one.place):
            free = next(name for name in candidate_names(one.title) if name not in rest)
            rest[free] = {key: one.inside[key] for key in one.keys}
    return rest


def _merge_notices(matched: MatchedOptimizer) -> Iterator[Notice]:
    if len(matched.optimizers) > 1:
        text = "several optimizers are read as one, which has the groups of all, one after another"
        yield Notice(text, tuple(one.title for one in matched.optimizers))
    if matched.untied:
        text = "these share values with other tensors, but have their own optimizer states: read as separate parameters"
        yield Notice(text, tuple(sorted(matched.untied)), Weight.UNSURE)


def _unknown_optimizers(rest: Mapping[str, Value], unmatched: Sequence[Optimizer]) -> tuple[Notice, ...]:
    """A notice for entries that are named like an optimizer and have tensors, but no known form of its state."""
    known = {one.place[0] for one in unmatched if one.place}
    keys = [key for key in rest if OPTIMIZER_KEY.search(key) and key not in known]
    names = tuple(key for key in keys if has_tensor(rest[key], lists=True))
    text = "named like an optimizer, but of an unknown form: carried as extras, and matched to no parameters"
    return (Notice(text, names, Weight.LOST),) if names else ()


def _keys(model: ModelTree, optimizers: Sequence[Optimizer], matched: Sequence[Optimizer]) -> StateKeys:
    """How the tree is keyed, or the closest way in which `state_tree` can write it."""
    inside = None if model.place is None else str(model.place[0]) if len(model.place) == 1 else "model"
    if len(optimizers) != 1:
        return StateKeys(inside, "optim" if matched else None)
    (one,) = optimizers
    if one.flat and len(one.place) == 0:
        return StateKeys(inside, None, True)
    return StateKeys(inside, str(one.place[0]) if len(one.place) == 1 else "optim", one.flat)


def role_of(one: NamedTensor) -> Role:
    """`parameter`, or `buffer` for integers and for the running statistics of PyTorch's normalisations."""
    statistic = one.name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
    trained = is_float(one.tensor.dtype) or one.tensor.dtype.kind == "c"
    return "parameter" if trained and not statistic else "buffer"


def _leaves_by_name(model: Mapping[Value, Value], where: Path) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for name, leaf in named_leaves(model):
        if name in leaves:
            raise CorruptError(f"two tensors are called `{printable(name)}`", where=where)
        leaves[name] = leaf
        if len(leaves) > MAX_NAMES:
            raise UnsafeError(f"the file has more than {MAX_NAMES:,} names for its tensors", where=where)
    return leaves


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


def not_weights(model: Mapping[Value, Value], rest: Mapping[str, Value]) -> tuple[Notice, ...]:
    """Notices about entries of the model's dict, and of `rest`, that contain tensors but are not weights.

    `rest` is empty if the model has its own dict: then that dict should contain only tensors.
    """
    among_tensors = [
        (key, value) for key, value in non_tensor_items(model) if not is_extra_state(key) and not key.endswith(_OBJECT)
    ]
    holders = (Record, Storage, StorageSlice) if rest else (Record, Storage, StorageSlice, np.ndarray)
    unread = [(key, value) for key, value in among_tensors if isinstance(value, holders) or holds_tensor(value)]
    unread += [
        (key, value)
        for key, value in rest.items()
        if isinstance(value, (Storage, StorageSlice)) or _has_tensors_inside(value)
    ]
    return tuple(
        Notice(text, names, Weight.LOST)
        for text, names in (
            (
                "contains tensors in an unknown form; carried as extras, not as weights",
                tuple(f"{key} ({_kind(value)})" for key, value in unread),
            ),
        )
        if names
    )


def _has_tensors_inside(value: Value) -> bool:
    """Whether a value is a list with tensors as items, or an object with tensors anywhere in it."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, Leaf) for item in value)
    return isinstance(value, Record) and holds_tensor(value)


def _kind(value: Value) -> str:
    if isinstance(value, Record):
        return value.cls.qualname
    return "NumPy" if isinstance(value, np.ndarray) else type(value).__name__.lower()
