"""The facts of a checkpoint that a tree of state dicts cannot express, as one further entry of that tree.

    {'ckpt': {'record': JSON, 'copies': {name: tensor}, 'tensors': {name: tensor}}}

`copies` are the model's low-precision weights, if masters are in the model's
place; `tensors` are those that the record refers to. Scripts do not read the
entry, and do not save it again: so it cannot contradict the rest of the tree.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Group, Origin, Parameter, Role
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError, flaw
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import Fragment, Tensor
from ckpt_formats.core.values import Value, is_natural, tensor_names
from ckpt_formats.state_dicts.keys import StateKeys
from ckpt_formats.state_dicts.leaves import Leaf, tensor_leaf
from ckpt_formats.state_dicts.training_state import TrainingState

KEY = "ckpt"
_VERSION = 1
_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}


def record_of(source: Checkpoint, shown: Mapping[str, Value]) -> dict[str, Value]:
    """The entry. `shown` are the extras that the tree itself contains."""
    hidden = {key: value for key, value in source.extras.items() if key not in shown}
    masters = {name: p for name, p in source.parameters.items() if MASTER in p.states and MODEL in p.states}
    rounded = {name: p.states[MODEL].dtype.name for name, p in masters.items() if _is_rounded(p)}
    values = {name: dict(p.values) for name, p in source.parameters.items() if p.values}
    values_with_names = (*hidden.values(), *values.values(), *(dict(group.options) for group in source.groups))
    named = {name for value in values_with_names for name in tensor_names(value)}
    shown_names = {name for value in shown.values() for name in tensor_names(value)}
    needed = named | {name for name, p in source.parameters.items() if p.role == "extra" and name not in shown_names}
    origin = source.origin
    content = {
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
    tensor_dicts = {"copies": copies, "tensors": tensors}
    return {"record": json.dumps(content), **{key: members for key, members in tensor_dicts.items() if members}}


def has_record(root: Mapping[str, Value]) -> bool:
    """Whether the tree has this entry."""
    entry = root.get(KEY)
    record = entry.get("record") if isinstance(entry, dict) else None
    # Other programs may also save a text under this key.
    return isinstance(record, str) and record.lstrip()[:1] in ("{", "[")


def with_record(state: TrainingState, entry: Mapping[str, Value], where: Path) -> TrainingState:
    """The state of the rest of the tree, completed with the facts of the record. Raises `CorruptError`."""
    try:
        content = json.loads(entry["record"])
        if content["version"] != _VERSION:
            raise CorruptError(f"has a record of version {content['version']!r:.20}, which is unknown", where=where)
        tensors = {name: _leaf(leaf) for name, leaf in entry.get("tensors", {}).items()}
        copies = {name: _leaf(leaf) for name, leaf in entry.get("copies", {}).items()}
        origin = _origin(content["origin"], state.keys, where)
        aliases = {alias: name for alias, name in content["aliases"].items() if name in state.parameters}
        values, masters = decode(content["values"], where), frozenset(content["masters"])
        parameters = {name: p for name, p in state.parameters.items() if name not in aliases}
        for name in parameters.keys() & content["roles"].keys():
            own = _with_values(parameters[name], values.get(name, {}))
            if name in masters:
                own = _with_master(own, copies.get(name), content["rounded"].get(name))
            parameters[name] = replace(own, role=_ROLES[content["roles"][name]])
        parameters |= {name: Parameter(name, "extra", {MODEL: tensor}) for name, tensor in tensors.items()}
        groups = tuple(Group(decode(options, where), _texts(names)) for options, names in content["groups"])
        extras = {**state.extras, **decode(content["extras"], where)}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptError(f"its record is not one that ckpt writes: {flaw(error)}", where=where) from None
    return replace(
        state,
        parameters=parameters,
        groups=groups,
        extras=extras,
        aliases={**state.aliases, **aliases},
        step=origin.step,
        origin=origin,
    )


def _with_values(parameter: Parameter, values: Mapping[str, Value]) -> Parameter:
    """The parameter with plain values in the place of the tensors that replaced them."""
    weights = (MASTER, MODEL)
    states = {state: t for state, t in parameter.states.items() if state in weights or to_stored(state) not in values}
    return Parameter(parameter.name, parameter.role, states, values)


def _with_master(parameter: Parameter, copy: Tensor | None, rounded: str | None) -> Parameter:
    """The parameter with the model's tensor as its master, and as its weight the copy or the rounded master."""
    states = dict(parameter.states)
    master = states.pop(MODEL)
    states = {MASTER: master, **states}
    if copy is not None:
        states[MODEL] = copy
    elif rounded is not None:
        from ckpt_codecs import Rounded  # most checkpoints have no state with a codec

        states[MODEL] = Tensor.of(DerivedBlob(Rounded(), replace(master), DTYPES[rounded]))
    return replace(parameter, states=states)


def _origin(content: Any, keys: StateKeys, where: Path) -> Origin:
    engine, version, step, layout = content
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
    """Whether the model's copy is the rounded master in all its fragments."""
    from ckpt_codecs import Rounded

    blobs = [fragment.blob for fragment in parameter.states[MODEL].examples() if isinstance(fragment, Fragment)]
    return bool(blobs) and all(isinstance(blob, DerivedBlob) and isinstance(blob.codec, Rounded) for blob in blobs)


def _leaf(leaf: Value) -> Tensor:
    if not isinstance(leaf, Leaf):
        raise TypeError("not a tensor")
    return tensor_leaf(leaf)
