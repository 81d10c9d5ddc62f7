"""Optimizer states in a file of weights: tensors under names such as `optimizer.exp_avg.layers.0.weight`.

The metadata of the file has the rest of the optimizer under the key `ckpt.optimizer`, as typed JSON: groups, values
such as the step, roles, and which weights are masters. Files without that key have no states, whatever their names are.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.containers.safetensors_shards import OPTIMIZER_KEY
from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Group, Parameter
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.state_names import from_stored, to_stored
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable

KEY = OPTIMIZER_KEY
PREFIX = "optimizer."
_ROLES = ("frozen", "buffer")


def as_weights(source: Checkpoint) -> Iterator[Parameter]:
    """All states of the model's parameters as weights of their own. Raises `UnsupportedError` for names that clash."""
    for name, parameter in source.parameters.items():
        if parameter.role == "extra":
            continue
        if name.startswith(PREFIX):
            raise UnsupportedError(
                f"the parameter `{printable(name)}` has a name like that of a state", where=source.path
            )
        yield replace(parameter, states={MODEL: parameter.weight}, values={})
        for state, tensor in parameter.states.items():
            if tensor is parameter.weight:
                continue
            stored = to_stored(state)
            if "." in stored:
                raise UnsupportedError(f"the state `{printable(state)}` has a name with a dot", where=source.path)
            yield Parameter(f"{PREFIX}{stored}.{name}", "parameter", {MODEL: tensor})


def metadata_of(source: Checkpoint) -> dict[str, str]:
    """The entry of the metadata that makes the weights a checkpoint with an optimizer again."""
    model = {name: one for name, one in source.parameters.items() if one.role != "extra"}
    facts = {
        "step": source.origin.step,
        "groups": [{"options": encode(group.options), "names": list(group.names)} for group in source.groups],
        "values": {name: encode(one.values) for name, one in model.items() if one.values},
        "roles": {name: one.role for name, one in model.items() if one.role in _ROLES},
        "masters": [name for name, one in model.items() if MODEL not in one.states and MASTER in one.states],
    }
    return {KEY: json.dumps(facts, allow_nan=False)}


def parameters_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path
) -> tuple[dict[str, Parameter], tuple[Group, ...], int | None]:
    """The parameters with their states, the groups and the step. Raises `CorruptError` if the metadata do not fit."""
    facts = parse_json_object(metadata[KEY].encode("utf-8", "surrogatepass"), path)
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX):
            states.setdefault(key, {})[MODEL] = tensor
    for key, tensor in tensors.items():
        if key.startswith(PREFIX):
            stored, _, name = key.removeprefix(PREFIX).partition(".")
            state = from_stored(stored)
            if name not in states or state in states[name]:
                raise CorruptError(f"`{printable(key)}` is a state of no parameter in the file", where=path)
            states[name][state] = tensor
    values, roles = (_mapping(facts, key, states, path) for key in ("values", "roles"))
    for name in _names(facts.get("masters"), states, path):
        if MASTER in states[name]:
            raise CorruptError(f"`{printable(name)}` has two masters", where=path)
        states[name] = {MASTER if state == MODEL else state: one for state, one in states[name].items()}
    parameters = {name: Parameter(name, "parameter", own) for name, own in states.items()}
    for name, role in roles.items():
        if role not in _ROLES:
            raise CorruptError(f"`{printable(name)}` has no known role", where=path)
        parameters[name] = replace(parameters[name], role=role)
    for name, own in values.items():
        decoded = decode(own, path)
        if not isinstance(decoded, dict):
            raise CorruptError(f"the values of `{printable(name)}` are not an object", where=path)
        parameters[name] = replace(parameters[name], values=decoded)
    return parameters, tuple(_groups(facts.get("groups"), states, path)), _step(facts.get("step"), path)


def _groups(rows: Any, known: Mapping[str, Any], path: Path) -> Iterator[Group]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CorruptError("the groups of the optimizer are not a list of objects", where=path)
    for row in rows:
        options = decode(row.get("options"), path)
        if not isinstance(options, dict):
            raise CorruptError("the options of a group are not an object", where=path)
        yield Group(options, tuple(_names(row.get("names"), known, path)))


def _mapping(facts: Mapping[str, Any], key: str, known: Mapping[str, Any], path: Path) -> dict[str, Any]:
    entry = facts.get(key)
    if not isinstance(entry, dict):
        raise CorruptError(f"the entry `{key}` of {KEY} is not an object", where=path)
    _names(list(entry), known, path)
    return entry


def _names(names: Any, known: Mapping[str, Any], path: Path) -> list[str]:
    if not isinstance(names, list):
        raise CorruptError(f"{KEY} has no list of names where one belongs", where=path)
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise CorruptError(
                f"{KEY} names a parameter that is not in the file: {printable(str(name)[:80])}", where=path
            )
    return names


def _step(step: Any, path: Path) -> int | None:
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 62):
        raise CorruptError(f"the step in {KEY} is not a step", where=path)
    return step
