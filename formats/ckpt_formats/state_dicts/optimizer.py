"""Matches optimizers' states and groups to the names of the model's tensors.

The keys themselves are names, or the groups state names (`param_names`). If parameters are
numbered, the user gives their names, or there is exactly one assignment to the model's tensors
(`numbered_optimizers`). A tensor has the states of at most one optimizer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

from ckpt_formats.core.checkpoint import Group
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.errors import CkptError, RulesError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.state_names import STORED_MASTER, from_stored, is_reserved
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.leaves import Leaf, tensor_leaf
from ckpt_formats.state_dicts.numbered_optimizers import Numbered, match_numbers, match_trained_model
from ckpt_formats.state_dicts.optimizer_form import FULL, Groups, Optimizer, States
from ckpt_formats.state_dicts.parameter_order import (
    BY_ORDER,
    NamedTensor,
    first_values_match,
    has_equals,
    is_state_of,
)

T = TypeVar("T")

_TEXT = frozenset((str,))
"""The types of most names of states."""
_COMPARED = 8
"""Masters whose first values are compared with the weights."""


@dataclass(frozen=True)
class ParameterOrders:
    """The names of parameters that optimizers number, as the user gives them."""

    only: Sequence[str] = ()
    """For the only optimizer that numbers its parameters."""
    by_place: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For several optimizers: place in the file, such as `optimizer_states.0` -> names."""

    @property
    def any(self) -> bool:
        """Whether the user gave an order."""
        return bool(self.only or self.by_place)


@dataclass
class MatchedOptimizer:
    """Optimizers whose states are matched to parameters, and notices about the others."""

    optimizers: list[Optimizer] = field(default_factory=list)
    groups: list[tuple[str, Group]] = field(default_factory=list)
    """Each with the place of its optimizer."""
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, dict[str, Value]] = field(default_factory=dict)
    untied: set[str] = field(default_factory=set)
    """Tensors that share the values of another tensor, but have their own states."""
    notices: list[Notice] = field(default_factory=list)

    def attempt(self, optimizer: Optimizer, step: Callable[[Optimizer], T]) -> T | None:
        """The result of `step`; None, and a notice, if the optimizer cannot be matched."""
        try:
            return step(optimizer)
        except _CannotMatch as why:
            self.notices.append(_unmatched_notice(optimizer, str(why)))
            return None


class _CannotMatch(Exception):
    """The reason why an optimizer cannot be matched to names."""


@dataclass(frozen=True)
class _KeyedStates:
    """States and groups, by the optimizer's own keys."""

    optimizer: Optimizer
    states: States
    groups: Groups
    members: Sequence[Sequence[Value]]

    @property
    def keys(self) -> list[Value]:
        """The keys of the parameters, in the order of the groups; without groups, the keys of the states."""
        listed = [key for group in self.members for key in group]
        return listed or ([] if self.groups else list(self.states))

    @property
    def numbers(self) -> bool:
        return any(not isinstance(key, str) for key in self.keys) and _stated_names(self.groups, self.members) is None


def match_optimizers(
    optimizers: Sequence[Optimizer],
    names: Sequence[str],
    trainable: Sequence[NamedTensor],
    aliases: Mapping[str, str],
    orders: ParameterOrders,
    *,
    in_order: bool = False,
) -> MatchedOptimizer:
    """Match each optimizer's states to parameters.

    `names`: the names of all tensors of the model. `trainable`: the tensors that an optimizer may have, without
    `aliases`, in the model's order. `in_order`: this is known to be the order in which the model registers them.
    Raises `RulesError` for an order that is impossible.
    """
    _check_places(orders, optimizers)
    matched = MatchedOptimizer()
    keyed = [own for one in optimizers if (own := matched.attempt(one, lambda one: _keyed(one, names))) is not None]
    for own, titles in _titles(keyed, names, trainable, aliases, orders, matched, in_order):
        matched.attempt(own.optimizer, partial(_add, own, titles, trainable, aliases, matched))
    return matched


def _check_places(orders: ParameterOrders, optimizers: Sequence[Optimizer]) -> None:
    places = [one.title for one in optimizers]
    for place in orders.by_place:
        if place not in places:
            places_text = ", ".join(map(printable, places)) or "none"
            raise RulesError(
                f"there is no optimizer at `{printable(place)}` to order",
                hint=f"Optimizers of this checkpoint: {places_text}.",
            )


def _keyed(optimizer: Optimizer, names: Sequence[str]) -> _KeyedStates:
    content = next((c for known in _name_sets(optimizer, names) if (c := optimizer.content(known)) is not None), None)
    if content is None:
        raise _CannotMatch("it refers to parameters that the model does not have")
    states, groups = content
    for i, group in enumerate(groups):
        if not isinstance(group.get("params"), list):
            raise _CannotMatch(f"its group {i} does not list its parameters")
    members = [list(group["params"]) for group in groups]
    if not all(isinstance(key, (str, int)) for group in members for key in group):
        raise _CannotMatch("its groups list parameters by keys that are neither names nor numbers")
    keyed = _KeyedStates(optimizer, _as_numbers(states, {key for group in members for key in group}), groups, members)
    _stated_names(groups, members)
    listed = keyed.keys
    if len(set(listed)) < len(listed) or len(set(map(str, listed))) < len(listed):
        raise _CannotMatch("its groups list a parameter twice")
    known = set(listed)
    if unlisted := [str(key) for key in keyed.states if key not in known]:
        raise _CannotMatch(f"it has states of a parameter that no group lists (`{printable(unlisted[0][:80])}`)")
    return keyed


def _name_sets(optimizer: Optimizer, names: Sequence[str]) -> Iterator[set[str]]:
    """The model's names; for a flat state dict, also the names inside each submodule."""
    yield set(names)
    if optimizer.flat:
        yield from ({n[len(p) :] for n in names if n.startswith(p)} for p in _prefixes(names))


def _as_numbers(keyed: States, members: set[Value]) -> States:
    """The states by the numbers in the groups. DCP converts keys of dicts to strings, but not items of lists."""
    named = {str(member): member for member in members if type(member) is int}
    numbered = {named.get(key, key) if isinstance(key, str) else key: state for key, state in keyed.items()}
    if len(numbered) < len(keyed) or len(set(map(str, numbered))) < len(numbered):
        raise _CannotMatch("two of its parameters have keys that differ only in their type")
    return numbered


def _titles(
    keyed: Sequence[_KeyedStates],
    names: Sequence[str],
    trainable: Sequence[NamedTensor],
    aliases: Mapping[str, str],
    orders: ParameterOrders,
    matched: MatchedOptimizer,
    in_order: bool,
) -> list[tuple[_KeyedStates, dict[Value, str]]]:
    """For each optimizer that can be matched, in their order: key -> name."""
    titled: dict[int, dict[Value, str]] = {}
    undecided: dict[int, _KeyedStates] = {}
    with_numbers = [one for one in keyed if one.numbers]
    if orders.only and len(with_numbers) > 1 and not orders.by_place:
        places = ", ".join(printable(one.optimizer.title) for one in with_numbers)
        raise RulesError(
            f"{len(with_numbers)} optimizers number their parameters, so --param-order must name one of: {places}",
            hint="Write --param-order PLACE=FILE, once for each.",
        )
    shapes = {named.name: named.tensor.shape for named in trainable}
    for i, one in enumerate(keyed):
        order = orders.by_place.get(one.optimizer.title, orders.only)
        if not one.numbers:
            named = matched.attempt(one.optimizer, partial(_by_name, one, names, shapes))
            if named is not None:
                titled[i] = named
        elif order:
            titled[i] = _by_order(one, trainable, order)
        else:
            undecided[i] = one
    used = {aliases.get(name, name) for own in titled.values() for name in own.values()}
    unused = [one for one in trainable if one.name not in used]
    slots = {i: Numbered(one.members if one.groups else [one.keys], one.states) for i, one in undecided.items()}
    for i, numbers in match_numbers(slots, unused).items():
        if numbers is None and len(slots) == 1 and (trained := match_trained_model(slots[i], unused)) is not None:
            numbers, averages = trained
            matched.notices.append(Notice(AVERAGES, averages, Weight.UNSURE))
        if numbers is None:
            matched.notices.append(_unmatched_notice(undecided[i].optimizer, ""))
            continue
        titled[i] = numbers
        if not in_order and has_equals(numbers.values(), unused):
            matched.notices.append(Notice(BY_ORDER, (undecided[i].optimizer.title,), Weight.UNSURE))
    return [(one, titled[i]) for i, one in enumerate(keyed) if i in titled]


AVERAGES = "the optimizer is matched to the one model that, by its key, is not an average of another, as these are"
UNMATCHED = "the optimizer's states could not be matched to parameters, and are carried as they are"
_LISTS = ("params", "param_names")
"""Options of a group that list its parameters."""


def _unmatched_notice(optimizer: Optimizer, why: str) -> Notice:
    how = f". If it numbers its parameters, name them in order: --param-order {printable(optimizer.title)}=FILE"
    text = f"{UNMATCHED}, because {why or 'no assignment of its numbers to the model fits, or several do'}"
    return Notice(text if why else text + how, (optimizer.title,) if optimizer.title else (), Weight.LOST)


def _by_name(keyed: _KeyedStates, names: Sequence[str], shapes: Mapping[str, Shape], _: Optimizer) -> dict[Value, str]:
    stated = _stated_names(keyed.groups, keyed.members)
    names_by_key = {key: str(key) for key in keyed.keys} if stated is None else stated
    if len(set(names_by_key.values())) < len(names_by_key):
        raise _CannotMatch("its groups give two parameters one name")
    known = set(names)
    if known.issuperset(names_by_key.values()):
        return names_by_key
    fitting = [
        {key: prefix + name for key, name in names_by_key.items()}
        for prefix in _prefixes(names)
        if all(prefix + name in known for name in names_by_key.values())
    ]
    fitting = [titles for titles in fitting if _fits(keyed, titles, shapes)] if len(fitting) > 1 else fitting
    if len(fitting) > 1:
        raise _CannotMatch("its names match those of several submodules")
    if fitting:
        return fitting[0]
    by_unwrapped = {_unwrapped(name): name for name in names}
    if len(by_unwrapped) == len(known) and all(_unwrapped(name) in by_unwrapped for name in names_by_key.values()):
        return {key: by_unwrapped[_unwrapped(name)] for key, name in names_by_key.items()}
    missing = next(name for name in names_by_key.values() if name not in known)
    raise _CannotMatch(f"it refers to a parameter that the model does not have (`{printable(missing[:80])}`)")


def _fits(keyed: _KeyedStates, titles: Mapping[Value, str], shapes: Mapping[str, Shape]) -> bool:
    """Whether the shapes of all states fit the parameters with these names."""
    return not any(
        isinstance(leaf, Leaf) and titles[key] in shapes and _has_other_shape(str(name), leaf, shapes[titles[key]])
        for key, state in keyed.states.items()
        for name, leaf in state.items()
    )


def _stated_names(groups: Groups, members: Sequence[Sequence[Value]]) -> dict[Value, str] | None:
    """Parameter number -> the name that its group states; None if groups state no names."""
    stated = [group.get("param_names", ()) for group in groups]
    lists = zip(stated, members, strict=True)
    if not groups or not all(isinstance(names, list) and len(names) == len(group) for names, group in lists):
        return None
    pairs = [pair for names, group in zip(stated, members, strict=True) for pair in zip(group, names, strict=True)]
    if not all(isinstance(name, str) for _, name in pairs):
        raise _CannotMatch("its groups name parameters by values that are not texts")
    return dict(pairs) or None


def _prefixes(names: Sequence[str]) -> list[str]:
    """The prefixes of the top-level submodules: a model may be inside another one."""
    return list(dict.fromkeys(name[: name.index(".") + 1] for name in names if "." in name))


_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _by_order(keyed: _KeyedStates, trainable: Sequence[NamedTensor], order: Sequence[str]) -> dict[Value, str]:
    """The names in the order that the user gives. Raises `RulesError` if a name or a shape does not fit."""
    shapes = {named.name: named.tensor.shape for named in trainable}
    for key in keyed.keys:
        if not isinstance(key, int) or not 0 <= key < len(order):
            raise RulesError(f"the optimizer has a parameter {printable(str(key))}, but the order names {len(order)}")
        name = order[key]
        if name not in shapes:
            raise RulesError(
                f"the order states that the optimizer's parameter {key} is `{printable(name)}`, which does not exist"
            )
        for state, leaf in keyed.states.get(key, {}).items():
            if isinstance(leaf, Leaf) and leaf.shape and not is_state_of(str(state), leaf.shape, shapes[name]):
                raise RulesError(
                    f"the order states that the optimizer's parameter {key} is `{printable(name)}`, of shape "
                    f"{list(shapes[name])}, but its {printable(str(state))} has {list(leaf.shape)}"
                )
    return {key: order[key] for key in keyed.keys}


def _add(
    keyed: _KeyedStates,
    titles: Mapping[Value, str],
    trainable: Sequence[NamedTensor],
    aliases: Mapping[str, str],
    matched: MatchedOptimizer,
    _: Optimizer,
) -> None:
    """Add the states of an optimizer to `matched`. Raises `_CannotMatch` if another one has the same parameters."""
    before = set(matched.states) | {name for _, group in matched.groups for name in group.names}
    if twice := sorted(before & set(titles.values())):
        raise _CannotMatch(f"another optimizer has states of the same parameters (`{printable(twice[0])}`)")
    states: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Value]] = {}
    weights = {named.name: named.tensor for named in trainable}
    masters = {STORED_MASTER} if _has_masters(keyed, titles, weights) else set()
    for key, state in keyed.states.items():
        own = state if _TEXT.issuperset(map(type, state)) else {str(k): v for k, v in state.items()}
        if len(own) < len(state):
            raise _CannotMatch("two of its states have names that differ only in their type")
        tensors = {
            k: tensor_leaf(v) for k, v in own.items() if isinstance(v, Leaf) and (k in masters or not is_reserved(k))
        }
        states[titles[key]] = {from_stored(k): tensor for k, tensor in tensors.items()}
        values[titles[key]] = {k: v for k, v in own.items() if k not in tensors}
    for i, group in enumerate(keyed.groups):
        if len(set(map(str, group))) < len(group):
            raise _CannotMatch(f"two options of its group {i} have names that differ only in their type")
    groups = [
        Group({str(k): v for k, v in group.items() if k not in _LISTS}, tuple(titles[key] for key in keys))
        for group, keys in zip(keyed.groups, keyed.members, strict=True)
    ]
    matched.optimizers.append(keyed.optimizer)
    matched.groups += ((keyed.optimizer.title, group) for group in groups)
    matched.states |= states
    matched.values |= values
    matched.notices += _unusual_states(keyed, titles, weights, masters)
    _untie(matched, set(titles.values()) | before, aliases)


def _has_masters(keyed: _KeyedStates, titles: Mapping[Value, str], weights: Mapping[str, Tensor]) -> bool:
    """Whether all states that are called as masters are in files of ckpt are masters, as far as a few of them tell.

    They have the shapes of the weights, and the first values of some are those of the weights when they are rounded.
    """
    pairs = [
        (weights.get(titles[key]), tensor_leaf(leaf))
        for key, state in keyed.states.items()
        if isinstance(leaf := state.get(STORED_MASTER), Leaf)
    ]
    if not pairs or not all(
        weight is not None and weight.shape == master.shape and is_float(weight.dtype) and is_float(master.dtype)
        for weight, master in pairs
    ):
        return False
    try:
        with Reader(check=False) as reader:
            some = pairs[:: -(-len(pairs) // _COMPARED)]
            return all(weight is not None and first_values_match(master, weight, reader) for weight, master in some)
    except CkptError:  # whoever reads the values says why
        return False


def _unusual_states(
    keyed: _KeyedStates, titles: Mapping[Value, str], weights: Mapping[str, Tensor], masters: Set[str]
) -> Iterator[Notice]:
    """Notices about states with unusual shapes or names. `masters`: the names of those that are masters."""
    odd, reserved = [], []
    for key, state in keyed.states.items():
        weight = weights.get(titles[key])
        for name, leaf in state.items():
            if not isinstance(leaf, Leaf) or name in masters:
                continue
            if is_reserved(str(name)):
                reserved.append(f"{titles[key]}.{name}")
            elif weight is not None and _has_other_shape(str(name), leaf, weight.shape):
                odd.append(f"{titles[key]}.{name}")
    if odd:
        yield Notice("states of the optimizer have another shape than their parameter", tuple(odd), Weight.UNSURE)
    if reserved:
        text = "states of the optimizer have names that mean weights in files of ckpt; they are carried as values"
        yield Notice(text, tuple(reserved), Weight.INFO)
    if masters:
        text = (
            f"the optimizer's `{STORED_MASTER}` are read as masters: rounded, they are the weights, as far as compared"
        )
        yield Notice(text, weight=Weight.INFO)


def _has_other_shape(state: str, leaf: Leaf, full_shape: Shape) -> bool:
    return _is_full(state) and not is_state_of(state, leaf.shape, full_shape)


@lru_cache(1 << 10)
def _is_full(state: str) -> bool:
    return FULL.fullmatch(state) is not None


def _untie(matched: MatchedOptimizer, names: set[str], aliases: Mapping[str, str]) -> None:
    """Mark as untied two names of one tensor if the optimizer updates each: they share values only by chance."""
    first: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name in aliases, name)):
        if first.setdefault(aliases.get(name, name), name) != name:
            matched.untied.add(name)
