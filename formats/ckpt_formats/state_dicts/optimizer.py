"""An optimizer's states and groups, told to the names of the model's tensors.

Names are stated by the keys themselves, or by the groups (`param_names`). Where parameters
are numbered, the user names them, or there is one way in which they fit the model
(`numbered`). A tensor has the states of one optimizer only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ckpt_formats.core.checkpoint import MASTER, MODEL, Group
from ckpt_formats.core.errors import BadRules
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.leaves import Leaf, tensor_leaf
from ckpt_formats.state_dicts.numbered_optimizers import Numbered, match_numbers
from ckpt_formats.state_dicts.optimizer_form import FULL, Groups, Optimizer, States
from ckpt_formats.state_dicts.parameter_order import BY_ORDER, NamedTensor, has_equals, is_state_of

T = TypeVar("T")

RESERVED_STATES = frozenset((MASTER, MODEL))
"""What an optimizer may call a state, but a checkpoint calls the weights."""


@dataclass(frozen=True)
class ParameterOrders:
    """The names of the parameters that optimizers number, as the user says them."""

    only: Sequence[str] = ()
    """Of the only optimizer that numbers its parameters."""
    by_place: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of an optimizer, by its place in the file: `optimizer_states.0`."""

    @property
    def any(self) -> bool:
        return bool(self.only or self.by_place)


@dataclass
class MatchedOptimizer:
    """Optimizers whose states have found their parameters, and what became of the others."""

    optimizers: list[Optimizer] = field(default_factory=list)
    groups: list[tuple[str, Group]] = field(default_factory=list)
    """Each with the place of its optimizer."""
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, dict[str, Value]] = field(default_factory=dict)
    untied: set[str] = field(default_factory=set)
    """Tensors that share the values of another, but have states of their own."""
    notices: list[Notice] = field(default_factory=list)

    def attempt(self, one: Optimizer, step: Callable[[Optimizer], T]) -> T | None:
        """What a step towards names gives; None, and a notice, if the optimizer cannot be told to names."""
        try:
            return step(one)
        except _Unmatched as why:
            self.notices.append(_unmatched(one, str(why)))
            return None


class _Unmatched(Exception):
    """Why an optimizer cannot be told to names."""


@dataclass(frozen=True)
class _KeyedStates:
    """States and groups, by the optimizer's own keys."""

    optimizer: Optimizer
    states: States
    groups: Groups
    members: Sequence[Sequence[Value]]

    @property
    def keys(self) -> list[Value]:
        """Of the parameters, in the order of the groups; without groups, of the states."""
        listed = [key for group in self.members for key in group]
        return listed or ([] if self.groups else list(self.states))

    @property
    def numbers(self) -> bool:
        return any(not isinstance(key, str) for key in self.keys) and _stated(self.groups, self.members) is None


def match_optimizers(
    optimizers: Sequence[Optimizer],
    names: Sequence[str],
    trainable: Sequence[NamedTensor],
    aliases: Mapping[str, str],
    orders: ParameterOrders,
    *,
    in_order: bool = False,
) -> MatchedOptimizer:
    """Tell each optimizer's states to parameters.

    `names` are those of all the model's tensors, `trainable` those without `aliases` that an optimizer may have,
    in the model's order. `in_order`: somebody knows that this is the order in which the model registers them.
    Raises `BadRules` for an order that cannot be.
    """
    _check_places(orders, optimizers)
    found = MatchedOptimizer()
    keyed = [own for one in optimizers if (own := found.attempt(one, lambda one: _keyed(one, names))) is not None]
    for own, titles in _titles(keyed, names, trainable, aliases, orders, found, in_order):
        found.attempt(own.optimizer, partial(_add, own, titles, trainable, aliases, found))
    return found


def _check_places(orders: ParameterOrders, optimizers: Sequence[Optimizer]) -> None:
    places = [one.title for one in optimizers]
    for place in orders.by_place:
        if place not in places:
            held = ", ".join(map(printable, places)) or "none"
            raise BadRules(
                f"there is no optimizer at `{printable(place)}` to order",
                hint=f"Optimizers of this checkpoint: {held}.",
            )


def _keyed(optimizer: Optimizer, names: Sequence[str]) -> _KeyedStates:
    content = next((c for known in _known(optimizer, names) if (c := optimizer.content(known)) is not None), None)
    if content is None:
        raise _Unmatched("it speaks of parameters that the model does not have")
    states, groups = content
    for i, group in enumerate(groups):
        if not isinstance(group.get("params"), list):
            raise _Unmatched(f"its group {i} does not list its parameters")
    members = [list(group["params"]) for group in groups]
    if not all(isinstance(key, (str, int)) for group in members for key in group):
        raise _Unmatched("its groups list parameters by something else than names and numbers")
    keyed = _KeyedStates(optimizer, _as_numbers(states, {key for group in members for key in group}), groups, members)
    _stated(groups, members)
    listed = keyed.keys
    if len(set(listed)) < len(listed) or len(set(map(str, listed))) < len(listed):
        raise _Unmatched("its groups list a parameter twice")
    known = set(listed)
    if unlisted := [str(key) for key in keyed.states if key not in known]:
        raise _Unmatched(f"it has states of a parameter that no group lists (`{printable(unlisted[0][:80])}`)")
    return keyed


def _known(optimizer: Optimizer, names: Sequence[str]) -> Iterator[set[str]]:
    """Names as the model has them; of a flat one, also as its submodules have them."""
    yield set(names)
    if optimizer.flat:
        yield from ({n[len(p) :] for n in names if n.startswith(p)} for p in _prefixes(names))


def _as_numbers(keyed: States, members: set[Value]) -> States:
    """States by the numbers that the groups list. DCP makes strings of all keys of dicts, but not of lists' items."""
    named = {str(member): member for member in members if type(member) is int}
    numbered = {named.get(key, key) if isinstance(key, str) else key: state for key, state in keyed.items()}
    if len(numbered) < len(keyed) or len(set(map(str, numbered))) < len(numbered):
        raise _Unmatched("two of its parameters have keys that differ only in their type")
    return numbered


def _titles(
    keyed: Sequence[_KeyedStates],
    names: Sequence[str],
    trainable: Sequence[NamedTensor],
    aliases: Mapping[str, str],
    orders: ParameterOrders,
    found: MatchedOptimizer,
    in_order: bool,
) -> list[tuple[_KeyedStates, dict[Value, str]]]:
    """The name behind each key of each optimizer that can be told, in the order of the optimizers."""
    titled: dict[int, dict[Value, str]] = {}
    open_: dict[int, _KeyedStates] = {}
    numbering = [one for one in keyed if one.numbers]
    if orders.only and len(numbering) > 1 and not orders.by_place:
        places = ", ".join(printable(one.optimizer.title) for one in numbering)
        raise BadRules(
            f"{len(numbering)} optimizers number their parameters, so the order must say whose it is: {places}",
            hint="Write --param-order PLACE=FILE, once for each.",
        )
    shapes = {named.name: named.tensor.shape for named in trainable}
    for i, one in enumerate(keyed):
        order = orders.by_place.get(one.optimizer.title, orders.only)
        if not one.numbers:
            named = found.attempt(one.optimizer, partial(_by_name, one, names, shapes))
            if named is not None:
                titled[i] = named
        elif order:
            titled[i] = _by_order(one, trainable, order)
        else:
            open_[i] = one
    taken = {aliases.get(name, name) for own in titled.values() for name in own.values()}
    free = [one for one in trainable if one.name not in taken]
    slots = {i: Numbered(one.members if one.groups else [one.keys], one.states) for i, one in open_.items()}
    for i, numbers in match_numbers(slots, free).items():
        if numbers is None:
            found.notices.append(_unmatched(open_[i].optimizer, ""))
            continue
        titled[i] = numbers
        if not in_order and has_equals(numbers.values(), free):
            found.notices.append(Notice(BY_ORDER, (open_[i].optimizer.title,), Weight.UNSURE))
    return [(one, titled[i]) for i, one in enumerate(keyed) if i in titled]


UNMATCHED = "the optimizer's states could not be matched to parameters, and are carried as they are"
_LISTS = ("params", "param_names")
"""Options of a group that say which parameters it has."""


def _unmatched(one: Optimizer, why: str) -> Notice:
    how = f". If it numbers its parameters, name them in order: --param-order {printable(one.title)}=FILE"
    text = f"{UNMATCHED}, since {why or 'its numbers fit the model in several ways or in none'}"
    return Notice(text if why else text + how, (one.title,) if one.title else (), Weight.LOST)


def _by_name(one: _KeyedStates, names: Sequence[str], shapes: Mapping[str, Shape], _: Optimizer) -> dict[Value, str]:
    stated = _stated(one.groups, one.members)
    said = {key: str(key) for key in one.keys} if stated is None else stated
    if len(set(said.values())) < len(said):
        raise _Unmatched("its groups call two parameters by one name")
    known = set(names)
    if known.issuperset(said.values()):
        return said
    fitting = [
        {key: prefix + name for key, name in said.items()}
        for prefix in _prefixes(names)
        if all(prefix + name in known for name in said.values())
    ]
    fitting = [titles for titles in fitting if _fits(one, titles, shapes)] if len(fitting) > 1 else fitting
    if len(fitting) > 1:
        raise _Unmatched("its names are those of several submodules")
    if fitting:
        return fitting[0]
    plain = {_unwrapped(name): name for name in names}
    if len(plain) == len(known) and all(_unwrapped(name) in plain for name in said.values()):
        return {key: plain[_unwrapped(name)] for key, name in said.items()}
    lacking = next(name for name in said.values() if name not in known)
    raise _Unmatched(f"it speaks of a parameter that the model does not have (`{printable(lacking[:80])}`)")


def _fits(one: _KeyedStates, titles: Mapping[Value, str], shapes: Mapping[str, Shape]) -> bool:
    """Could all states with the shapes of their parameters be those of these?"""
    return not any(
        isinstance(leaf, Leaf) and titles[key] in shapes and _is_odd(str(name), leaf, shapes[titles[key]])
        for key, state in one.states.items()
        for name, leaf in state.items()
    )


def _stated(groups: Groups, members: Sequence[Sequence[Value]]) -> dict[Value, str] | None:
    """The names that groups state of the parameters that they number."""
    stated = [group.get("param_names", ()) for group in groups]
    told = zip(stated, members, strict=True)
    if not groups or not all(isinstance(said, list) and len(said) == len(group) for said, group in told):
        return None
    pairs = [pair for said, group in zip(stated, members, strict=True) for pair in zip(group, said, strict=True)]
    if not all(isinstance(name, str) for _, name in pairs):
        raise _Unmatched("its groups call parameters by something else than texts")
    return dict(pairs) or None


def _prefixes(names: Sequence[str]) -> list[str]:
    """Of the submodules at the top, where a model may lie inside of another."""
    return list(dict.fromkeys(name[: name.index(".") + 1] for name in names if "." in name))


_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _by_order(one: _KeyedStates, trainable: Sequence[NamedTensor], order: Sequence[str]) -> dict[Value, str]:
    """As the user says. Raises `BadRules` where that cannot be."""
    shapes = {named.name: named.tensor.shape for named in trainable}
    for key in one.keys:
        if not isinstance(key, int) or not 0 <= key < len(order):
            raise BadRules(f"the optimizer has a parameter {printable(str(key))}, but the order names {len(order)}")
        name = order[key]
        if name not in shapes:
            raise BadRules(
                f"the order says that the optimizer's parameter {key} is `{printable(name)}`, which is not there"
            )
        for state, leaf in one.states.get(key, {}).items():
            if isinstance(leaf, Leaf) and leaf.shape and not is_state_of(str(state), leaf.shape, shapes[name]):
                raise BadRules(
                    f"the order says that the optimizer's parameter {key} is `{printable(name)}`, of shape "
                    f"{list(shapes[name])}, but its {printable(str(state))} has {list(leaf.shape)}"
                )
    return {key: order[key] for key in one.keys}


def _add(
    one: _KeyedStates,
    titles: Mapping[Value, str],
    trainable: Sequence[NamedTensor],
    aliases: Mapping[str, str],
    found: MatchedOptimizer,
    _: Optimizer,
) -> None:
    """Put an optimizer's states beside those of the others. Raises `_Unmatched` where names meet."""
    before = set(found.states) | {name for _, group in found.groups for name in group.names}
    if twice := sorted(before & set(titles.values())):
        raise _Unmatched(f"another optimizer has states of the same parameters (`{printable(twice[0])}`)")
    states: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Value]] = {}
    for key, state in one.states.items():
        if len(set(map(str, state))) < len(state):
            raise _Unmatched("two of its states have names that differ only in their type")
        own = {str(k): v for k, v in state.items()}
        tensors = {k: tensor_leaf(v) for k, v in own.items() if isinstance(v, Leaf) and k not in RESERVED_STATES}
        states[titles[key]] = tensors
        values[titles[key]] = {k: v for k, v in own.items() if k not in tensors}
    for i, group in enumerate(one.groups):
        if len(set(map(str, group))) < len(group):
            raise _Unmatched(f"two options of its group {i} have names that differ only in their type")
    groups = [
        Group({str(k): v for k, v in group.items() if k not in _LISTS}, tuple(titles[key] for key in keys))
        for group, keys in zip(one.groups, one.members, strict=True)
    ]
    found.optimizers.append(one.optimizer)
    found.groups += ((one.optimizer.title, group) for group in groups)
    found.states |= states
    found.values |= values
    found.notices += _remarks(one, titles, trainable)
    _untie(found, set(titles.values()) | before, aliases)


def _remarks(one: _KeyedStates, titles: Mapping[Value, str], trainable: Sequence[NamedTensor]) -> Iterator[Notice]:
    """What is unusual about the states."""
    shapes = {named.name: named.tensor.shape for named in trainable}
    odd, apart = [], []
    for key, state in one.states.items():
        whole = shapes.get(titles[key])
        for name, leaf in state.items():
            if isinstance(leaf, Leaf) and str(name) in RESERVED_STATES:
                apart.append(f"{titles[key]}.{name}")
            elif isinstance(leaf, Leaf) and whole is not None and _is_odd(str(name), leaf, whole):
                odd.append(f"{titles[key]}.{name}")
    if odd:
        yield Notice("states of the optimizer have another shape than their parameter", tuple(odd), Weight.UNSURE)
    if apart:
        text = "states of the optimizer have names that stand for weights here; they are carried as values"
        yield Notice(text, tuple(apart), Weight.INFO)


def _is_odd(state: str, leaf: Leaf, whole: Shape) -> bool:
    return bool(FULL.fullmatch(state)) and not is_state_of(state, leaf.shape, whole)


def _untie(found: MatchedOptimizer, names: set[str], aliases: Mapping[str, str]) -> None:
    """Two names for one tensor, of which the optimizer updates each: they share values only by chance."""
    first: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name in aliases, name)):
        if first.setdefault(aliases.get(name, name), name) != name:
            found.untied.add(name)
