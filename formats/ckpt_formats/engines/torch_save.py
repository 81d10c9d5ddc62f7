"""Files of `torch.save`: state dicts, flat or nested, with the optimizer by name or by number.

What we write is one dict that `torch.load(weights_only=True)` takes:

    {'model': {name: weight},
     'optimizer': {'state': {name: {'fp32', 'exp_avg', ..., 'step'}}, 'param_groups': [..., 'params': [name]]},
     'extras': {...}}

What `weights_only` refuses (objects of engines' classes, NumPy arrays, sets) is
in the extras as typed JSON (`typed_json`), and read back as what it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from ckpt_formats.containers.torchfile import TensorRef, TorchFile, open_file, tensor_of
from ckpt_formats.containers.torchfile.reader import STARTS
from ckpt_formats.containers.torchfile_tree import tree_part, unshare_states, write_tree
from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.checkpoint import (
    MASTER,
    MODEL,
    Checkpoint,
    Group,
    Origin,
    OriginalForm,
    Parameter,
    Role,
    SourceFile,
)
from ckpt_formats.core.errors import Corrupt, NotFound, Unsupported, flaw
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import Weight
from ckpt_formats.core.tensor import DerivedBlob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Global, StdDict, TensorName, Value
from ckpt_formats.engines.fsdp_ranks.single_rank import whole_tree
from ckpt_formats.state_dicts.objects import as_root, attributes_of
from ckpt_formats.state_dicts.original_form import form_of, tree_of
from ckpt_formats.state_dicts.read import check_weights, training_state

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_OURS = "ckpt"
_NOTED = {"roles", "aliases", "origin", "tensors"}
"""What our entry among the extras says; one with none of these, or one, is somebody's own."""
_FILE = "model.pt"
_ORDERED = Global("collections", "OrderedDict")
_MOST_BITS = 2000
"""Of an integer that `weights_only` reads."""


@dataclass(frozen=True, kw_only=True)
class Torch(WritableFormat):
    """One file of `torch.save`."""

    name = "torch"
    summary = "one file of torch.save: a state dict, flat or nested, with or without optimizer"
    needs_model = False

    original: bool = False
    """Write the source as the file that it was (`Checkpoint.original`), if it was one of torch.save."""

    def detect(self, path: Path) -> bool:
        if not path.is_file():
            return False
        try:
            with path.open("rb") as file:
                head = file.read(2)
        except OSError:
            return False
        return head.startswith(STARTS) or path.suffix in _SUFFIXES

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        file = open_file(path)
        ours = file.root.get("extras") if isinstance(file.root, dict) else None
        note = ours.get(_OURS) if isinstance(ours, dict) else None
        if isinstance(note, dict) and len(note.keys() & _NOTED) > 1 and isinstance(file.root.get("model"), dict):
            return _read_ours(file, note)
        return _read_foreign(file, options)

    def plan(self, source: Checkpoint) -> Plan:
        was = source.original
        known = self.original and was is not None and was.format == self.name and was.form is not None
        form = was.form() if was is not None and was.form is not None and known else None
        tree = None if form is None else tree_of(form, source)
        file = tree_part(_FILE, _tree(source) if tree is None else tree, source.parameters.values())
        return Plan((file,), single_file=_FILE)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        return write_tree(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        """The one file is whole when it is written."""


def _tree(source: Checkpoint) -> dict[str, Value]:
    plain = _Encoder(source.parameters)
    model: dict[str, Value] = {}
    states: dict[str, Value] = {}
    for name, parameter in source.parameters.items():
        if parameter.role == "extra":
            continue
        model[name] = _weight(parameter)
        masters = {MASTER: parameter.states[MASTER]} if MASTER in parameter.states else {}
        others = unshare_states({s: t for s, t in parameter.states.items() if s not in (MASTER, MODEL)})
        if meeting := sorted(parameter.values.keys() & (masters.keys() | others.keys())):
            raise Unsupported(
                f"`{printable(name)}` has a state and a value that are both called `{printable(meeting[0])}`"
            )
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
        "values": {
            name: keys
            for name, p in source.parameters.items()
            if (keys := [key for key, value in p.values.items() if isinstance(value, TensorName)])
        },
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
        and isinstance(blob, DerivedBlob)
        and blob.dtype == blob.base.dtype
        and master.dtype == weight.dtype
    )
    return master if same and master is not None else weight


class _Encoder:
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
        restore = _Decoder(ours["tensors"], path)
        parameters = {}
        for name, role in ours["roles"].items():
            weight = (ours["tensors"] if role == "extra" else file.root["model"])[name]
            kept = optimizer["state"].get(name, {})
            whole = set(ours.get("values", {}).get(name, ()))
            tensors = {key: value for key, value in kept.items() if key not in whole}
            states = {key: tensor_of(value) for key, value in tensors.items() if isinstance(value, TensorRef)}
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
        raise Corrupt(f"not in the form in which ckpt writes files of torch: {flaw(error)}", where=path) from None
    return Checkpoint(path, origin, parameters, groups, extras, aliases, _shards(file), file.seals())


_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}


class _Decoder:
    """Undoes `_Encoder`. What several places share is restored once, and shared again."""

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


def _read_foreign(file: TorchFile, options: ReadOptions) -> Checkpoint:
    items, notices = as_root(file.root)
    root: dict[str, Value] = {str(key): value for key, value in items.items()}
    if len(root) < len(items):
        raise Corrupt("two keys of the file differ only in their type", where=file.path)
    root = whole_tree(root, file.path)
    carried = attributes_of(file.root)
    found = training_state(root, file.path, options.order, options.orders, further_extras=carried)
    if not found.parameters:
        said = "".join(f"; {notice}" for notice in found.notices if notice.weight is Weight.LOST)
        raise NotFound(f"a file without a tensor is no checkpoint{said}", where=file.path)
    without = check_weights(found, root, file.path)
    origin = Origin("torch", None, found.step, {"keys": found.keys.to_json()})
    return Checkpoint(
        file.path,
        origin,
        found.parameters,
        found.groups,
        found.extras,
        found.aliases,
        _shards(file),
        file.seals(),
        (*notices, *without, *found.notices),
        original=OriginalForm(Torch.name, file.path.name, partial(form_of, file, found.parameters, found.extras)),
    )


def _shards(file: TorchFile) -> tuple[SourceFile, ...]:
    return (SourceFile(file.path, file.path.stat().st_size, "all"),)
