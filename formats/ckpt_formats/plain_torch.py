"""Files of `torch.save`: state dicts, flat or nested, with the optimizer by name or by number.

What we write is one dict that `torch.load(weights_only=True)` takes:

    {'model': {name: weight},
     'optimizer': {'state': {name: {'fp32', 'exp_avg', ..., 'step'}}, 'param_groups': [..., 'params': [name]]},
     'extras': {...}}

What `weights_only` refuses (objects of engines' classes, NumPy arrays, sets) is
in the extras as typed JSON (`typed_json`), and read back as what it was.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from ckpt_formats.base import (
    MASTER,
    MODEL,
    Checkpoint,
    Goal,
    Group,
    Options,
    Origin,
    Parameter,
    Part,
    Receipt,
    Role,
    Shard,
    WritableFormat,
)
from ckpt_formats.dtypes import is_float
from ckpt_formats.errors import Corrupt, Unsafe
from ckpt_formats.extras import lift
from ckpt_formats.naming import show
from ckpt_formats.numbering import Named, Run, Slot, one_way
from ckpt_formats.safetensors_file import natural
from ckpt_formats.tensor import Decoded, Tensor
from ckpt_formats.torch_tree import apart, tree_part, write_tree
from ckpt_formats.torchfile import TensorRef, TorchFile, open_file, tensor_of
from ckpt_formats.transfer import Transfer
from ckpt_formats.typed_json import decode, encode
from ckpt_formats.values import Global, StdDict, TensorName, Value

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net", "network", "params")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state", "optim_state_dict")
_STEP_KEYS = ("step", "global_step", "iteration", "global_steps")
_OURS = "ckpt"
_FILE = "model.pt"
_MOST_NAMES = 500_000
_ORDERED = Global("collections", "OrderedDict")
_MOST_BITS = 2000
"""Of an integer that `weights_only` reads."""


class PlainTorch(WritableFormat):
    name = "torch"
    summary = "one file of torch.save: a state dict, flat or nested, with or without optimizer"

    def detect(self, path: Path) -> bool:
        if not path.is_file():
            return False
        try:
            with path.open("rb") as file:
                head = file.read(2)
        except OSError:
            return False
        return head == b"PK" or head[:1] == b"\x80" or path.suffix in _SUFFIXES

    def read(self, path: Path, options: Options) -> Checkpoint:
        file = open_file(path)
        ours = file.root.get("extras") if isinstance(file.root, dict) else None
        if isinstance(ours, dict) and isinstance(ours.get(_OURS), dict) and isinstance(file.root.get("model"), dict):
            return _read_ours(file, ours[_OURS])
        return _read_foreign(file)

    def plan(self, source: Checkpoint, goal: Goal) -> tuple[Part, ...]:
        return (tree_part(_FILE, _tree(source), source.parameters.values()),)

    def write(self, folder: Path, part: Part, transfer: Transfer) -> Receipt:
        return write_tree(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        """The one file is whole when it is written."""

    def product(self, target: Path) -> str | None:
        return _FILE


def _tree(source: Checkpoint) -> dict[str, Value]:
    plain = _Plain(source.parameters)
    model: dict[str, Value] = {}
    states: dict[str, Value] = {}
    for name, parameter in source.parameters.items():
        if parameter.role == "extra":
            continue
        model[name] = _weight(parameter)
        masters = {MASTER: parameter.states[MASTER]} if MASTER in parameter.states else {}
        others = apart({s: t for s, t in parameter.states.items() if s not in (MASTER, MODEL)})
        kept = {**masters, **others, **{key: plain(value) for key, value in parameter.values.items()}}
        if kept:
            states[name] = kept
    model |= {alias: model[name] for alias, name in source.aliases.items() if name in model}
    groups = [
        {**{key: plain(value) for key, value in group.options.items()}, "params": list(group.names)}
        for group in source.groups
    ]
    origin = source.origin
    ours = {
        "roles": {name: parameter.role for name, parameter in source.parameters.items()},
        "aliases": dict(source.aliases),
        "origin": {
            "engine": origin.engine,
            "version": origin.version,
            "step": origin.step,
            "layout": encode(dict(origin.layout)),
        },
        "tensors": {name: p.weight for name, p in source.parameters.items() if p.role == "extra"},
    }
    optimizer = {"optimizer": {"state": states, "param_groups": groups}} if states or groups else {}
    extras = {key: plain(value) for key, value in source.extras.items()}
    if _OURS in extras:
        ours[_OURS] = extras.pop(_OURS)
    return {"model": model, **optimizer, "extras": {_OURS: ours, **extras}}


def _weight(parameter: Parameter) -> Tensor:
    """The model's copy; where that is the master itself, the two share their bytes in the file."""
    weight, master = parameter.weight, parameter.states.get(MASTER)
    blob = weight.fragments[0].blob if len(weight.fragments) == 1 else None
    same = (
        master is not None
        and isinstance(blob, Decoded)
        and blob.dtype == blob.base.dtype
        and master.dtype == weight.dtype
    )
    return master if same and master is not None else weight


class _Plain:
    """Puts tensors in the places of their names, and typed JSON in the place of what `weights_only` refuses."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = parameters

    def __call__(self, value: Value) -> Value:
        encode(value)  # raises `Unsafe` for a value without end
        return self._plain(value)

    def _plain(self, value: Value) -> Value:
        if isinstance(value, TensorName):
            return self._parameters[value.name].states[MODEL]
        if value is None or type(value) in (bool, str, bytes, float):
            return value
        if type(value) is int and value.bit_length() <= _MOST_BITS:
            return value
        if type(value) in (list, tuple):
            return type(value)(map(self._plain, value))
        if type(value) is StdDict and value.cls == _ORDERED and value.factory is None and _is_simple(value):
            made = StdDict()
            made.update((key, self._plain(item)) for key, item in value.items())
            made.attrs = {key: self._plain(item) for key, item in value.attrs.items()}
            return made
        if type(value) is dict and _is_simple(value):
            return {key: self._plain(item) for key, item in value.items()}
        return encode(value)


def _is_simple(value: Mapping[Value, Value]) -> bool:
    """Can it stay as it is, and not be taken for typed JSON?"""
    keys = list(value)
    return all(type(key) in (bool, int, str) for key in keys) and not (len(keys) == 1 and _begins(keys[0]))


def _begins(key: Value) -> bool:
    return isinstance(key, str) and key.startswith("$")


def _read_ours(file: TorchFile, ours: Mapping[str, Value]) -> Checkpoint:
    path = file.path
    try:
        optimizer = file.root.get("optimizer") or {"state": {}, "param_groups": []}
        restore = _Restore(ours["tensors"], path)
        parameters = {}
        for name, role in ours["roles"].items():
            weight = (ours["tensors"] if role == "extra" else file.root["model"])[name]
            kept = optimizer["state"].get(name, {})
            states = {key: tensor_of(value) for key, value in kept.items() if isinstance(value, TensorRef)}
            values = {key: restore(value) for key, value in kept.items() if key not in states}
            parameters[name] = Parameter(name, _ROLES[role], {**states, MODEL: tensor_of(weight)}, values)
        groups = tuple(
            Group({key: restore(value) for key, value in group.items() if key != "params"}, tuple(group["params"]))
            for group in optimizer["param_groups"]
        )
        extras = {key: restore(value) for key, value in file.root["extras"].items() if key != _OURS}
        if _OURS in ours:
            extras[_OURS] = restore(ours[_OURS])
        said = ours["origin"]
        origin = Origin(said["engine"], said["version"], said["step"], decode(said["layout"], path))
        aliases = {str(alias): str(name) for alias, name in ours["aliases"].items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"not in the form in which ckpt writes files of torch: {error!r}", where=path) from None
    return Checkpoint(path, origin, parameters, groups, extras, aliases, _shards(file), file.seals())


_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}


class _Restore:
    """Undoes `_Plain`. What several places share is restored once, and shared again."""

    def __init__(self, tensors: Mapping[str, TensorRef], path: Path) -> None:
        self._names = {(ref.storage.key, ref.offset): TensorName(name) for name, ref in tensors.items()}
        self._path = path
        self._done: dict[int, Value] = {}

    def __call__(self, value: Value) -> Value:
        if isinstance(value, TensorRef):
            return self._names[value.storage.key, value.offset]
        if not isinstance(value, (dict, list, tuple)):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._restored(value)
        return self._done[id(value)]

    def _restored(self, value: Value) -> Value:
        if type(value) is StdDict:
            made = StdDict(value.cls, value.factory)
            made.update((key, self(item)) for key, item in value.items())
            made.attrs = {key: self(item) for key, item in value.attrs.items()}
            return made
        if isinstance(value, dict):
            if len(value) == 1 and _begins(next(iter(value))):
                return decode(value, self._path)
            return {key: self(item) for key, item in value.items()}
        return type(value)(map(self, value))


def _read_foreign(file: TorchFile) -> Checkpoint:
    items = file.root.items() if isinstance(file.root, dict) else [("value", file.root)]
    root: dict[str, Value] = {str(key): value for key, value in items}
    if len(root) < len(items):
        raise Corrupt("two keys of the file differ only in their type", where=file.path)
    inside = next((key for key in _MODEL_KEYS if isinstance(root.get(key), dict) and _has_tensor(root[key])), None)
    rest = {key: value for key, value in root.items() if key != inside}
    optimizer_key = next((key for key in _OPTIMIZER_KEYS if _is_optimizer(rest.get(key))), None)
    optimizer = rest.pop(optimizer_key) if optimizer_key else None
    if inside is None:
        model, rest = rest, {key: value for key, value in rest.items() if not _has_tensor(value)}
    else:
        model = root[inside]
    found: dict[str, TensorRef] = {}
    for name, ref in _flat(model):
        if name in found:
            raise Corrupt(f"two tensors are called `{show(name)}`", where=file.path)
        found[name] = ref
        if len(found) > _MOST_NAMES:
            raise Unsafe(f"the file calls its tensors by more than {_MOST_NAMES:,} names", where=file.path)
    aliases = _aliases(found)
    named = [Named(name, tensor_of(ref)) for name, ref in found.items() if name not in aliases]
    parameters = {one.name: Parameter(one.name, _role(one), {MODEL: one.tensor}) for one in named}
    notices: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    if optimizer is not None:
        matched = _optimizer(optimizer, named)
        if matched is None:
            rest[str(optimizer_key)] = optimizer
            notices = (
                "the optimizer's states could not be told to the parameters' names; they are carried as they are",
            )
        else:
            groups = matched.groups
            trained = {name for group in groups for name in group.names}
            for name, parameter in parameters.items():
                role: Role = "parameter" if name in trained else "buffer" if parameter.role == "buffer" else "frozen"
                states = {**matched.states.get(name, {}), MODEL: parameter.weight}
                parameters[name] = Parameter(name, role, states)
            for name, values in matched.values.items():
                lifted = {key: lift(value, f"{name}/{key}", parameters) for key, value in values.items()}
                parameters[name] = replace(parameters[name], values=lifted)
            groups = tuple(
                Group(lift(dict(group.options), f"{optimizer_key}/param_groups/{i}", parameters), group.names)
                for i, group in enumerate(groups)
            )
    extras = {key: lift(value, key, parameters) for key, value in rest.items()}
    if inside is not None:
        others = dict(_others(model))
        extras |= {key: lift(value, key, parameters) for key, value in others.items() if key not in extras}
    step = next((root[key] for key in _STEP_KEYS if natural(root.get(key))), None)
    origin = Origin("torch", None, step)
    return Checkpoint(file.path, origin, parameters, groups, extras, aliases, _shards(file), file.seals(), notices)


@dataclass(frozen=True)
class _Matched:
    """An optimizer whose states have found their parameters."""

    groups: tuple[Group, ...]
    states: Mapping[str, dict[str, Tensor]]
    values: Mapping[str, dict[str, Value]]


def _optimizer(optimizer: Mapping[str, Value], named: Sequence[Named]) -> _Matched | None:
    """States by name, or by number if there is exactly one way to name them; None if not."""
    keyed, listed = optimizer["state"], optimizer["param_groups"]
    members = [list(group.get("params", ())) for group in listed]
    if not all(isinstance(group.get("params"), list) for group in listed):
        return None
    names = {one.name for one in named}
    titles = {key: key for group in members for key in group if isinstance(key, str)}
    stated = [group.get("param_names") for group in listed]
    if all(isinstance(said, list) and len(said) == len(group) for said, group in zip(stated, members, strict=True)):
        titles = {
            key: said
            for said_names, group in zip(stated, members, strict=True)
            for key, said in zip(group, said_names, strict=True)
        }
    if not titles:
        runs = [Run(tuple(Slot(None, _states(keyed.get(key, {}))) for key in group)) for group in members]
        matches = one_way(runs, [one for one in named if _role(one) != "buffer"])
        if matches is None:
            return None
        titles = {members[match.run][match.start]: match.name for match in matches}
    if (
        not (set(keyed) | {key for group in members for key in group}) <= titles.keys()
        or not set(titles.values()) <= names
    ):
        return None
    states: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Value]] = {}
    for key, state in keyed.items():
        name = titles[key]
        states[name] = {str(k): tensor_of(v) for k, v in state.items() if isinstance(v, TensorRef)}
        values[name] = {str(k): v for k, v in state.items() if not isinstance(v, TensorRef)}
    groups = (
        Group(
            {str(k): v for k, v in group.items() if k not in ("params", "param_names")},
            tuple(titles[key] for key in keys),
        )
        for group, keys in zip(listed, members, strict=True)
    )
    return _Matched(tuple(groups), states, values)


def _states(state: Mapping[str, Value]) -> dict[str, Tensor]:
    """Those states that have the parameter's shape: all but counters."""
    tensors = {str(key): tensor_of(value) for key, value in state.items() if isinstance(value, TensorRef)}
    return {key: tensor for key, tensor in tensors.items() if key != "step"}


def _is_optimizer(value: Value) -> bool:
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("param_groups"), list)
        or not isinstance(value.get("state"), dict)
    ):
        return False
    mappings = (*value["param_groups"], *value["state"].values())
    return all(isinstance(one, dict) for one in mappings) and set(value) == {"state", "param_groups"}


def _role(one: Named) -> Role:
    """Integers are not trained, nor are the running statistics of PyTorch's normalisations."""
    statistic = one.name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
    return "buffer" if statistic or not is_float(one.tensor.dtype) else "parameter"


def _has_tensor(value: Value) -> bool:
    """In it or in dicts in it. On a stack of our own, and each dict once: a file may nest and share without end."""
    seen, waiting = set(), [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, TensorRef):
            return True
        if isinstance(one, dict) and id(one) not in seen:
            seen.add(id(one))
            waiting += one.values()
    return False


def _flat(tree: Mapping[Value, Value], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, TensorRef]]:
    """Tensors by dotted names. Raises `Corrupt` if they are nested without end."""
    if depth > 50:
        raise Corrupt("dicts are nested too deeply to be a model")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, TensorRef):
            yield name, value
        elif isinstance(value, dict) and _has_tensor(value):
            yield from _flat(value, f"{name}.", depth + 1)


def _others(tree: Mapping[Value, Value], prefix: str = "") -> Iterator[tuple[str, Value]]:
    """What lies between the tensors of a model and is none."""
    for key, value in tree.items():
        if isinstance(value, dict) and _has_tensor(value):
            yield from _others(value, f"{prefix}{key}.")
        elif not isinstance(value, TensorRef):
            yield f"{prefix}{key}", value


def _aliases(found: Mapping[str, TensorRef]) -> dict[str, str]:
    """Names of the same elements of one storage as an earlier name."""
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name, ref in found.items():
        place = (ref.storage.key, ref.dtype, ref.offset, ref.shape, ref.strides)
        if ref.size and first.setdefault(place, name) != name:
            aliases[name] = first[place]
    return aliases


def _shards(file: TorchFile) -> tuple[Shard, ...]:
    return (Shard(file.path, file.path.stat().st_size, "all"),)
