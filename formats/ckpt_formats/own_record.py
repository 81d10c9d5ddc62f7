"""What we know of a checkpoint beyond what a tree of state dicts can say, as one entry of that tree.

    {'ckpt': {'record': JSON, 'copies': {name: tensor}, 'tensors': {name: tensor}}}

`copies` are the model's low-precision weights where masters stand in the
model's place, `tensors` those of the extras which the record speaks of. Scripts
never ask for the entry, and it goes when they save again: it cannot become untrue.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ckpt_codecs import Rounded
from ckpt_formats.base import MASTER, MODEL, Checkpoint, Group, Origin, Parameter, Role
from ckpt_formats.dtypes import DTYPES
from ckpt_formats.errors import Corrupt
from ckpt_formats.leaves import Leaf, tensor_leaf
from ckpt_formats.sorted_state import TrainingState
from ckpt_formats.tensor import Decoded, Fragment, Tensor
from ckpt_formats.typed_json import decode, encode
from ckpt_formats.values import Value, tensor_names

KEY = "ckpt"
_VERSION = 1
_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}


def record_of(source: Checkpoint, shown: Mapping[str, Value]) -> dict[str, Value]:
    """The entry. `shown` are those extras that the tree has in plain sight."""
    hidden = {key: value for key, value in source.extras.items() if key not in shown}
    masters = {name: p for name, p in source.parameters.items() if MASTER in p.states and MODEL in p.states}
    rounded = {name: p.states[MODEL].dtype.name for name, p in masters.items() if _is_rounded(p)}
    values = {name: dict(p.values) for name, p in source.parameters.items() if p.values}
    speak_of = (*hidden.values(), *values.values(), *(dict(group.options) for group in source.groups))
    named = {name for value in speak_of for name in tensor_names(value)}
    seen = {name for value in shown.values() for name in tensor_names(value)}
    needed = named | {name for name, p in source.parameters.items() if p.role == "extra" and name not in seen}
    origin = source.origin
    said = {
        "version": _VERSION,
        "origin": [origin.engine, origin.version, origin.step, encode(dict(origin.layout))],
        "roles": {name: p.role for name, p in source.parameters.items() if p.role != "extra"},
        "masters": sorted(name for name, p in source.parameters.items() if MASTER in p.states),
        "rounded": rounded,
        "values": encode(values),
        "groups": [[encode(dict(group.options)), list(group.names)] for group in source.groups],
        "aliases": dict(source.aliases),
        "extras": encode(hidden),
    }
    copies = {name: p.states[MODEL] for name, p in masters.items() if name not in rounded}
    tensors = {name: source.parameters[name].weight for name in sorted(needed)}
    held = {"copies": copies, "tensors": tensors}
    return {"record": json.dumps(said), **{key: found for key, found in held.items() if found}}


def has_record(root: Mapping[str, Value]) -> bool:
    """Is the entry in this tree?"""
    entry = root.get(KEY)
    return isinstance(entry, dict) and isinstance(entry.get("record"), str)


def with_record(found: TrainingState, entry: Mapping[str, Value], where: Path) -> TrainingState:
    """What the rest of the tree holds, together with what the record says of it. Raises `Corrupt`."""
    try:
        said = json.loads(entry["record"])
        if said["version"] != _VERSION:
            raise Corrupt(f"has a record of version {said['version']!r:.20}, which is unknown", where=where)
        tensors = {name: _leaf(leaf) for name, leaf in entry.get("tensors", {}).items()}
        copies = {name: _leaf(leaf) for name, leaf in entry.get("copies", {}).items()}
        values = decode(said["values"], where)
        engine, version, step, layout = said["origin"]
        origin = Origin(engine, version, step, {**decode(layout, where), "keys": found.keys.to_json()})
        aliases = {alias: name for alias, name in said["aliases"].items() if name in found.parameters}
        parameters = {
            name: _restored(parameter, said, copies, values)
            for name, parameter in found.parameters.items()
            if name not in aliases
        }
        parameters |= {name: Parameter(name, "extra", {MODEL: tensor}) for name, tensor in tensors.items()}
        groups = tuple(Group(decode(options, where), tuple(names)) for options, names in said["groups"])
        extras = {**found.extras, **decode(said["extras"], where)}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"its record is not as ckpt writes it: {error!r:.200}", where=where) from None
    every = {**found.aliases, **aliases}
    return replace(found, parameters=parameters, groups=groups, extras=extras, aliases=every, step=step, origin=origin)


def _restored(
    parameter: Parameter, said: Mapping[str, Any], copies: Mapping[str, Tensor], values: Mapping[str, Value]
) -> Parameter:
    name = parameter.name
    if name not in said["roles"]:
        return parameter
    kept = values.get(name, {})
    states = {state: tensor for state, tensor in parameter.states.items() if state not in kept}
    if name in said["masters"]:
        master = states.pop(MODEL)
        states = {MASTER: master, **states}
        if name in copies:
            states[MODEL] = copies[name]
        elif name in said["rounded"]:
            states[MODEL] = _rounded(master, said["rounded"][name])
    return Parameter(name, _ROLES[said["roles"][name]], states, kept)


def _rounded(master: Tensor, dtype_name: str) -> Tensor:
    dtype = DTYPES[dtype_name]
    return Tensor.of(Decoded(Rounded(), replace(master), dtype))


def _is_rounded(parameter: Parameter) -> bool:
    """Is the model's copy made of the master, wherever it is read?"""
    blobs = [fragment.blob for fragment in parameter.states[MODEL].fragments if isinstance(fragment, Fragment)]
    return bool(blobs) and all(isinstance(blob, Decoded) and isinstance(blob.codec, Rounded) for blob in blobs)


def _leaf(leaf: Value) -> Tensor:
    if not isinstance(leaf, Leaf):
        raise TypeError("not a tensor")
    return tensor_leaf(leaf)
