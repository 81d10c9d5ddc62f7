"""Files of `torch.save`: state dicts, flat or nested, with the optimizer by name or by number.

We write one dict that `torch.load(weights_only=True)` takes:

    {'model': {name: weight},
     'optimizer': {'state': {name: {'fp32', 'exp_avg', ..., 'step'}}, 'param_groups': [..., 'params': [name]]},
     'extras': {...}}

What `weights_only` refuses (objects of engines' classes, NumPy arrays, sets) is
in the extras as typed JSON (`typed_json`), from which it is read back exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from ckpt_formats.containers.file_starts import HEAD_NBYTES, SAFETENSORS
from ckpt_formats.containers.torchfile import STARTS, TensorRef, TorchFile, open_file, tensor_of
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
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.errors import CkptError, CorruptError, NotFoundError, UnsupportedError, flaw
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.state_names import STORED_MASTER, from_stored, to_stored
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Global, StdDict, TensorName, Value
from ckpt_formats.engines.fsdp_ranks.single_rank import whole_tree
from ckpt_formats.state_dicts.files_inside import HOLDS_TENSORS, files_inside
from ckpt_formats.state_dicts.leaves import is_extra_state
from ckpt_formats.state_dicts.objects import as_root, attributes_of
from ckpt_formats.state_dicts.original_form import form_of, tree_of
from ckpt_formats.state_dicts.read import check_weights, training_state

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_RECORD = "ckpt"
_EXTRA_STATES = "extra_states"
"""The key of the record for the extras that are in the model's dict, as results of `get_extra_state`."""
_RECORD_KEYS = {"roles", "aliases", "origin", "tensors"}
"""Keys of the entry of ckpt in the extras. An entry with at most one of these is of another program."""
_FILE = "model.pt"
_ORDERED = Global("collections", "OrderedDict")
_MAX_BITS = 2000
"""Bits of an integer that `weights_only` reads."""


@dataclass(frozen=True, kw_only=True)
class Torch(WritableFormat):
    """One file of `torch.save`."""

    name = "torch"
    summary = "one file of torch.save: a state dict, flat or nested, with or without optimizer"
    joins_ranks = False
    needs_model = False

    original: bool = False
    """Write the source as its original file (`Checkpoint.original`), if it was one of torch.save."""

    def detect(self, path: Path) -> bool:
        if not path.is_file():
            return False
        try:
            with path.open("rb") as file:
                head = file.read(HEAD_NBYTES)
        except CkptError:
            raise
        except OSError:
            return False
        if SAFETENSORS.match(head):
            return False
        return head.startswith(STARTS) or path.suffix in _SUFFIXES

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        file = open_file(path)
        extras = file.root.get("extras") if isinstance(file.root, dict) else None
        note = extras.get(_RECORD) if isinstance(extras, dict) else None
        if isinstance(note, dict) and len(note.keys() & _RECORD_KEYS) > 1 and isinstance(file.root.get("model"), dict):
            return _read_recorded(file, note)
        return _read_foreign(file, options)

    def plan(self, source: Checkpoint) -> Plan:
        from ckpt_formats.containers.torchfile_tree import tree_part  # only writing needs it

        was = source.original
        known = self.original and was is not None and was.format == self.name and was.form is not None
        form = was.form() if was is not None and was.form is not None and known else None
        tree = None if form is None else tree_of(form, source)
        file = tree_part(_FILE, _tree(source) if tree is None else tree, source.parameters.values())
        return Plan((file,), single_file=_FILE)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        from ckpt_formats.containers.torchfile_tree import write_tree

        return write_tree(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        """Nothing: the one file is complete when it is written."""


def _tree(source: Checkpoint) -> dict[str, Value]:
    from ckpt_formats.containers.torchfile_tree import unshare_states

    plain = _ItemEncoder(source.parameters)
    model: dict[str, Value] = {}
    states: dict[str, Value] = {}
    for name, parameter in source.parameters.items():
        if parameter.role == "extra":
            continue
        model[name] = _weight(parameter)
        masters = {STORED_MASTER: parameter.states[MASTER]} if MASTER in parameter.states else {}
        other_states = unshare_states(
            {to_stored(s): t for s, t in parameter.states.items() if s not in (MASTER, MODEL)}
        )
        if clashing := sorted(parameter.values.keys() & (masters.keys() | other_states.keys())):
            raise UnsupportedError(
                f"`{printable(name)}` has a state and a value that are both called `{printable(clashing[0])}`"
            )
        items = {**masters, **other_states, **{key: plain(value) for key, value in parameter.values.items()}}
        if items:
            states[name] = items
    model |= {alias: model[name] for alias, name in source.aliases.items() if name in model}
    groups = [
        {**{key: plain(value) for key, value in group.options.items()}, "params": list(group.names)}
        for group in source.groups
    ]
    origin = source.origin
    record = {
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
    if _RECORD in extras:
        record[_RECORD] = extras.pop(_RECORD)
    of_modules = [key for key in extras if is_extra_state(key) and key not in model]
    if of_modules:  # a model loads them with its weights
        record[_EXTRA_STATES] = of_modules
        model |= {key: extras.pop(key) for key in of_modules}
    return {"model": model, **optimizer, "extras": {_RECORD: record, **extras}}


def _weight(parameter: Parameter) -> Tensor:
    """The model's copy, or the master if both have the same bytes, which the file then has once."""
    weight, master = parameter.weight, parameter.states.get(MASTER)
    blob = weight.fragments[0].blob if len(weight.fragments) == 1 else None
    same = (
        master is not None
        and isinstance(blob, DerivedBlob)
        and blob.dtype == blob.base.dtype
        and master.dtype == weight.dtype
    )
    return master if same and master is not None else weight


class _ItemEncoder:
    """Replaces names of tensors by the tensors, and values that `weights_only` refuses by typed JSON."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = parameters

    def __call__(self, value: Value) -> Value:
        encode(value)  # raises `UnsafeError` for a value that contains itself
        return self._plain(value)

    def _plain(self, value: Value) -> Value:
        if isinstance(value, TensorName):
            return self._parameters[value.name].states[MODEL]
        if value is None or type(value) in (bool, str, bytes, float):
            return value
        if type(value) is int and value.bit_length() <= _MAX_BITS:
            return value
        if type(value) in (list, tuple):
            return type(value)(map(self._plain, value))
        if type(value) is StdDict and value.cls == _ORDERED and value.factory is None and _is_simple(value):
            converted = StdDict()
            converted.update((key, self._plain(item)) for key, item in value.items())
            converted.attrs = {key: self._plain(item) for key, item in value.attrs.items()}
            return converted
        if type(value) is dict and _is_simple(value):
            return {key: self._plain(item) for key, item in value.items()}
        return encode(value)


def _is_simple(value: Mapping[Value, Value]) -> bool:
    """Whether it can stay as it is, and is not mistaken for typed JSON."""
    keys = list(value)
    return all(type(key) in (bool, int, str) for key in keys) and not (len(keys) == 1 and _begins(keys[0]))


def _begins(key: Value) -> bool:
    return isinstance(key, str) and key.startswith("$")


def _read_recorded(file: TorchFile, record: Mapping[str, Value]) -> Checkpoint:
    path = file.path
    try:
        optimizer = file.root.get("optimizer") or {"state": {}, "param_groups": []}
        restore = _ItemDecoder(record["tensors"], path)
        parameters = {}
        for name, role in record["roles"].items():
            weight = (record["tensors"] if role == "extra" else file.root["model"])[name]
            items = optimizer["state"].get(name, {})
            value_names = set(record.get("values", {}).get(name, ()))
            tensors = {key: value for key, value in items.items() if key not in value_names}
            states = {key: tensor_of(value) for key, value in tensors.items() if isinstance(value, TensorRef)}
            values = {key: restore(value) for key, value in items.items() if key not in states}
            parameters[name] = Parameter(
                name,
                _ROLES[role],
                {**{from_stored(key): state for key, state in states.items()}, MODEL: tensor_of(weight)},
                values,
            )
        groups = tuple(
            Group({key: restore(value) for key, value in group.items() if key != "params"}, tuple(group["params"]))
            for group in optimizer["param_groups"]
        )
        extras = {key: restore(value) for key, value in file.root["extras"].items() if key != _RECORD}
        extras |= {key: restore(file.root["model"][key]) for key in record.get(_EXTRA_STATES, ())}
        if _RECORD in record:
            extras[_RECORD] = restore(record[_RECORD])
        stated = record["origin"]
        origin = Origin(stated["engine"], stated["version"], stated["step"], decode(stated["layout"], path))
        aliases = {str(alias): str(name) for alias, name in record["aliases"].items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            f"the file does not have the form in which ckpt writes files of torch.save: {flaw(error)}", where=path
        ) from None
    return Checkpoint(
        path=path,
        origin=origin,
        parameters=parameters,
        groups=groups,
        extras=extras,
        aliases=aliases,
        files=_shards(file),
        seals=file.seals(),
    )


_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}


class _ItemDecoder:
    """The inverse of `_ItemEncoder`. An object that is in several places is restored once, and shared again."""

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
            restored = StdDict(value.cls, value.factory)
            restored.update((key, self(item)) for key, item in value.items())
            restored.attrs = {key: self(item) for key, item in value.attrs.items()}
            return restored
        if isinstance(value, dict):
            if len(value) == 1 and _begins(next(iter(value))):
                return decode(value, self._path)
            return {key: self(item) for key, item in value.items()}
        return type(value)(map(self, value))


def _read_foreign(file: TorchFile, options: ReadOptions) -> Checkpoint:
    items, notices = as_root(file.root)
    root: dict[str, Value] = {str(key): value for key, value in items.items()}
    if len(root) < len(items):
        raise CorruptError("two keys of the file differ only in their type", where=file.path)
    root = whole_tree(root, file.path)
    attributes = attributes_of(file.root)
    state = training_state(root, file.path, options.order, options.orders, further_extras=attributes)
    if not state.parameters:
        inside = tuple(files_inside(root.items()))
        notices = (*state.notices, *((Notice(HOLDS_TENSORS, inside, Weight.LOST),) if inside else ()))
        losses = "".join(f"; {notice}" for notice in notices if notice.weight is Weight.LOST)
        raise NotFoundError(f"a file without a tensor is not a checkpoint{losses}", where=file.path)
    without = check_weights(state, root, file.path)
    origin = Origin("torch", None, state.step, {"keys": state.keys.to_json()})
    return Checkpoint(
        path=file.path,
        origin=origin,
        parameters=state.parameters,
        groups=state.groups,
        extras=state.extras,
        aliases=state.aliases,
        files=_shards(file),
        seals=file.seals(),
        notices=(*notices, *without, *state.notices),
        original=OriginalForm(Torch.name, file.path.name, partial(form_of, file, state.parameters, state.extras)),
    )


def _shards(file: TorchFile) -> tuple[SourceFile, ...]:
    return (SourceFile(file.path, file.path.stat().st_size, "all"),)
