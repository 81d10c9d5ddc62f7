"""What a tree of state dicts holds: the model, the optimizer, and the rest.

Trainers save one dict, and each calls the parts as it likes. Here they are told
by what they are: the model is a dict of tensors, the optimizer one of states
and groups, and all else is carried as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_formats.base import MODEL, Group, Parameter, Role
from ckpt_formats.dtypes import is_float
from ckpt_formats.errors import Corrupt, Unsafe
from ckpt_formats.extras import lift, numbered
from ckpt_formats.naming import show
from ckpt_formats.notices import Notice, Weight
from ckpt_formats.numbering import Named
from ckpt_formats.safetensors_file import natural
from ckpt_formats.state_dicts.keys import StateKeys
from ckpt_formats.state_dicts.leaves import Leaf, between, has_tensor, named_leaves, tensor_leaf, ties
from ckpt_formats.state_dicts.optimizer import is_flat, is_optimizer, match
from ckpt_formats.state_dicts.record import KEY, has_record, with_record
from ckpt_formats.state_dicts.sorted_state import TrainingState
from ckpt_formats.values import Value

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net", "network", "params")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state", "optim_state_dict")
RESERVED = frozenset((*_MODEL_KEYS, *OPTIMIZER_KEYS))
"""Keys that other things must not have, since they would be taken for the model or the optimizer."""
_STEP_KEYS = ("step", "global_step", "iteration", "global_steps")
_STEP_PLACES = ("train_state", "trainer_state", "trainer", "state", "app")
_MOST_NAMES = 500_000
UNMATCHED = (
    "the optimizer's states could not be matched to parameters; they are carried as they are. "
    "If the optimizer numbers its parameters, --param-order names them"
)


def training_state(root: Mapping[str, Value], where: Path, order: Sequence[str] = ()) -> TrainingState:
    """Sort a tree whose tensors are `TensorRef`s or `Tensor`s.

    `order` names the parameters of an optimizer that numbers them. Raises
    `Corrupt` if two tensors have one name.
    """
    rest = dict(root)
    if has_record(rest):
        entry = rest.pop(KEY)
        return with_record(training_state(rest, where, order), entry, where)
    inside = next((key for key in _MODEL_KEYS if isinstance(rest.get(key), dict) and has_tensor(rest[key])), None)
    optimizer_key = next((key for key in OPTIMIZER_KEYS if key != inside and is_optimizer(rest.get(key))), None)
    optimizer = rest.pop(optimizer_key) if optimizer_key else None
    model = rest.pop(inside) if inside is not None else _top_level(rest, optimizer is not None)
    if inside is None:
        rest = {key: value for key, value in rest.items() if key not in model}
    found = _by_name(model, where)
    aliases = ties(found)
    named = [Named(name, tensor_leaf(leaf)) for name, leaf in found.items() if name not in aliases]
    parameters = {one.name: Parameter(one.name, role_of(one), {MODEL: one.tensor}) for one in named}
    notices: tuple[Notice, ...] = ()
    groups: tuple[Group, ...] = ()
    if optimizer is not None:
        trainable = [one for one in named if role_of(one) != "buffer"]
        matched = match(optimizer, found, trainable, order)
        if matched is None:
            rest[str(optimizer_key)] = optimizer
            notices = (Notice(UNMATCHED, (str(optimizer_key),), Weight.LOST),)
        else:
            states, values = _untied(matched.states, aliases), _untied(matched.values, aliases)
            groups = tuple(Group(g.options, tuple(aliases.get(n, n) for n in g.names)) for g in matched.groups)
            trained = {name for group in groups for name in group.names}
            for name, parameter in parameters.items():
                role: Role = "parameter" if name in trained else "buffer" if parameter.role == "buffer" else "frozen"
                parameters[name] = Parameter(name, role, {**states.get(name, {}), MODEL: parameter.weight})
            for name, said in values.items():
                lifted = {key: lift(value, f"{name}/{key}", parameters) for key, value in said.items()}
                parameters[name] = replace(parameters[name], values=lifted)
            groups = tuple(
                Group(lift(dict(group.options), f"{optimizer_key}/param_groups/{i}", parameters), group.names)
                for i, group in enumerate(groups)
            )
    extras = {key: lift(value, key, parameters) for key, value in rest.items()}
    for key, value in between(model):
        free = next(name for name in numbered(key) if name not in extras)
        extras[free] = lift(value, free, parameters)
    flat = optimizer is not None and is_flat(optimizer)
    keys = StateKeys(inside, optimizer_key, flat)
    return TrainingState(parameters, groups, extras, aliases, notices, step_in(root), keys)


def role_of(one: Named) -> Role:
    """Integers are not trained, nor are the running statistics of PyTorch's normalisations."""
    statistic = one.name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
    trained = is_float(one.tensor.dtype) or one.tensor.dtype.kind == "c"
    return "parameter" if trained and not statistic else "buffer"


def _top_level(root: Mapping[str, Value], beside_optimizer: bool) -> dict[str, Value]:
    """The model whose tensors have no dict of their own.

    Where an optimizer is beside it, dicts with tensors belong to other things: to a data loader, an RNG. Of several
    optimizers nobody knows whose they are.
    """
    direct = {key: value for key, value in root.items() if isinstance(value, Leaf)}
    if beside_optimizer and direct:
        return direct
    return {key: value for key, value in root.items() if has_tensor(value) and not is_optimizer(value)}


def _by_name(model: Mapping[Value, Value], where: Path) -> dict[str, Leaf]:
    found: dict[str, Leaf] = {}
    for name, leaf in named_leaves(model):
        if name in found:
            raise Corrupt(f"two tensors are called `{show(name)}`", where=where)
        found[name] = leaf
        if len(found) > _MOST_NAMES:
            raise Unsafe(f"the file calls its tensors by more than {_MOST_NAMES:,} names", where=where)
    return found


def _untied(by_name: Mapping[str, dict[str, Value]], aliases: Mapping[str, str]) -> dict[str, dict[str, Value]]:
    """What an optimizer keeps under another name of a tied tensor is that tensor's."""
    return {aliases.get(name, name): kept for name, kept in by_name.items()}


def step_in(root: Mapping[str, Value]) -> int | None:
    """The step that a tree of state dicts speaks of."""
    places = (root, *(root[key] for key in _STEP_PLACES if isinstance(root.get(key), dict)))
    return next((place[key] for place in places for key in _STEP_KEYS if natural(place.get(key))), None)
