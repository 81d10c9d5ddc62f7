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
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Group, Origin, Parameter, Role
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import Corrupt, flaw
from ckpt_formats.core.tensor import DerivedBlob, Fragment, Tensor
from ckpt_formats.core.values import Value, tensor_names
from ckpt_formats.state_dicts.keys import StateKeys
from ckpt_formats.state_dicts.leaves import Leaf, tensor_leaf
from ckpt_formats.state_dicts.training_state import TrainingState

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
    record = entry.get("record") if isinstance(entry, dict) else None
    return isinstance(record, str) and record.lstrip()[:1] in ("{", "[")  # others may call a text so, too


def with_record(found: TrainingState, entry: Mapping[str, Value], where: Path) -> TrainingState:
    """What the rest of the tree holds, together with what the record says of it. Raises `Corrupt`."""
    try:
        said = json.loads(entry["record"])
        if said["version"] != _VERSION:
            raise Corrupt(f"has a record of version {said['version']!r:.20}, which is unknown", where=where)
        tensors = {name: _leaf(leaf) for name, leaf in entry.get("tensors", {}).items()}
        copies = {name: _leaf(leaf) for name, leaf in entry.get("copies", {}).items()}
        origin = _origin(said["origin"], found.keys, where)
        aliases = {alias: name for alias, name in said["aliases"].items() if name in found.parameters}
        values, masters = decode(said["values"], where), frozenset(said["masters"])
        parameters = {name: p for name, p in found.parameters.items() if name not in aliases}
        for name in parameters.keys() & said["roles"].keys():
            own = _without(parameters[name], values.get(name, {}))
            if name in masters:
                own = _as_master(own, copies.get(name), said["rounded"].get(name))
            parameters[name] = replace(own, role=_ROLES[said["roles"][name]])
        parameters |= {name: Parameter(name, "extra", {MODEL: tensor}) for name, tensor in tensors.items()}
        groups = tuple(Group(decode(options, where), _texts(names)) for options, names in said["groups"])
        extras = {**found.extras, **decode(said["extras"], where)}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"its record is not as ckpt writes it: {flaw(error)}", where=where) from None
    return replace(
        found,
        parameters=parameters,
        groups=groups,
        extras=extras,
        aliases={**found.aliases, **aliases},
        step=origin.step,
        origin=origin,
    )


def _without(parameter: Parameter, values: Mapping[str, Value]) -> Parameter:
    """With plain numbers again in the place of the tensors that stood for them."""
    weights = (MASTER, MODEL)
    states = {state: t for state, t in parameter.states.items() if state in weights or state not in values}
    return Parameter(parameter.name, parameter.role, states, values)


def _as_master(parameter: Parameter, copy: Tensor | None, rounded: str | None) -> Parameter:
    """With the model's tensor as the master that it is, and beside it the copy, or what it is rounded to."""
    states = dict(parameter.states)
    master = states.pop(MODEL)
    states = {MASTER: master, **states}
    if copy is not None:
        states[MODEL] = copy
    elif rounded is not None:
        states[MODEL] = Tensor.of(DerivedBlob(Rounded(), replace(master), DTYPES[rounded]))
    return replace(parameter, states=states)


def _origin(said: Any, keys: StateKeys, where: Path) -> Origin:
    engine, version, step, layout = said
    if not isinstance(engine, str) or not (version is None or isinstance(version, str)):
        raise TypeError("the names of engine and version are not texts")
    if not (step is None or is_natural(step)):
        raise TypeError("the step is not a whole number")
    return Origin(engine, version, step, {**decode(layout, where), "keys": keys.to_json()})


def _texts(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("not a list of names")
    return tuple(names)


def _is_rounded(parameter: Parameter) -> bool:
    """Is the model's copy made of the master, wherever it is read?"""
    blobs = [fragment.blob for fragment in parameter.states[MODEL].fragments if isinstance(fragment, Fragment)]
    return bool(blobs) and all(isinstance(blob, DerivedBlob) and isinstance(blob.codec, Rounded) for blob in blobs)


def _leaf(leaf: Value) -> Tensor:
    if not isinstance(leaf, Leaf):
        raise TypeError("not a tensor")
    return tensor_leaf(leaf)
