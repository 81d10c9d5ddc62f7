"""A checkpoint without its values as JSON: what a reader of a shadow gets first. It may come from a hostile peer."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from ckpt.shadow.wire import MAX_STATE
from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.checkpoint import Checkpoint, Edit, Group, Origin, OriginalForm, Parameter, Role
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import Corrupt, Unsafe
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Blob, Tensor
from ckpt_formats.core.values import Value

_ROLES: dict[str, Role] = {"parameter": "parameter", "frozen": "frozen", "buffer": "buffer", "extra": "extra"}
_MAX_ELEMENTS = 1 << 50
_MAX_AXES = 64

MakeBlob = Callable[[int, Shape, DType], Blob]
"""The blob of a tensor, from its number in the order of `Checkpoint.tensors`, its shape and its type."""


def dump(checkpoint: Checkpoint) -> bytes:
    """The JSON of a checkpoint. Raises `Unsafe` if it is too long."""
    origin, original = checkpoint.origin, checkpoint.original
    fields = {
        "origin": [origin.engine, origin.version, origin.step, encode(dict(origin.layout))],
        "parameters": [
            [
                parameter.name,
                parameter.role,
                [[state, tensor.dtype.name, list(tensor.shape)] for state, tensor in parameter.states.items()],
                encode(dict(parameter.values)),
            ]
            for parameter in checkpoint.parameters.values()
        ],
        "groups": [[encode(dict(group.options)), list(group.names)] for group in checkpoint.groups],
        "extras": encode(dict(checkpoint.extras)),
        "aliases": dict(checkpoint.aliases),
        "notices": [[one.text, list(one.names), int(one.weight)] for one in checkpoint.notices],
        "suspicions": list(checkpoint.suspicions),
        "errors": [[name, state, encode(dict(error))] for (name, state), error in checkpoint.errors.items()],
        "original": None if original is None else [original.format, original.file],
    }
    content = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    if len(content) > MAX_STATE:
        raise Unsafe(f"the names and options of the state take {len(content)} bytes, more than {MAX_STATE}")
    return content


def load(content: bytes | bytearray, where: Path, make_blob: MakeBlob, history: tuple[Edit, ...]) -> Checkpoint:
    """The checkpoint whose JSON is `content`. Raises `Corrupt`."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        raise Corrupt("the shadow's answer is not JSON", where=where) from None
    check = FieldReader(where)
    check.true(isinstance(fields, dict), "the state")
    engine, version, step, layout = _row(check.sequence(fields, "origin"), 4, check, "origin")
    texts = isinstance(engine, str) and (version is None or isinstance(version, str))
    check.true(texts and (step is None or is_natural(step)), "origin")
    original = None
    if check.get(fields, "original") is not None:
        format, file = _row(check.sequence(fields, "original"), 2, check, "original")
        check.true(isinstance(format, str) and (file is None or isinstance(file, str)), "original")
        original = OriginalForm(format, file)
    aliases = check.mapping(fields, "aliases")
    check.texts(aliases.values(), "aliases")
    parameters = _parameters(check.sequence(fields, "parameters"), check, make_blob)
    return Checkpoint(
        where,
        Origin(engine, version, step, _mapping(layout, check, "origin")),
        parameters,
        tuple(_group(row, check) for row in check.sequence(fields, "groups")),
        _mapping(check.mapping(fields, "extras"), check, "extras"),
        aliases,
        notices=tuple(_notice(row, check) for row in check.sequence(fields, "notices")),
        suspicions=check.texts(check.sequence(fields, "suspicions"), "suspicions"),
        errors=dict(_error(row, check) for row in check.sequence(fields, "errors")),
        original=original,
        history=history,
    )


def _row(row: Any, count: int, check: FieldReader, field: str) -> list[Any]:
    check.true(isinstance(row, list) and len(row) == count, field)
    return list(row)


def _mapping(value: Any, check: FieldReader, field: str) -> dict[str, Value]:
    decoded = decode(value, check.path)
    check.true(isinstance(decoded, dict) and all(isinstance(key, str) for key in decoded), field)
    return dict(decoded)


def _parameters(rows: Any, check: FieldReader, make_blob: MakeBlob) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    number = 0
    for row in rows:
        name, role, states, values = _row(row, 4, check, "parameters")
        check.true(isinstance(name, str) and name not in parameters, "parameters: a name")
        check.true(isinstance(role, str) and role in _ROLES, "parameters: a role")
        check.true(isinstance(states, list) and bool(states), "parameters: states")
        tensors: dict[str, Tensor] = {}
        for one in states:
            state, dtype, shape = _row(one, 3, check, "parameters: states")
            check.true(isinstance(state, str) and state not in tensors, "parameters: a state")
            check.true(isinstance(dtype, str) and dtype in DTYPES, "parameters: a type")
            sizes = isinstance(shape, list) and len(shape) <= _MAX_AXES and all(map(is_natural, shape))
            check.true(sizes and prod(max(n, 1) for n in shape) <= _MAX_ELEMENTS, "parameters: a shape")
            tensors[state] = Tensor.of(make_blob(number, tuple(shape), DTYPES[dtype]))
            number += 1
        parameters[name] = Parameter(name, _ROLES[role], tensors, _mapping(values, check, "parameters: values"))
    return parameters


def _group(row: Any, check: FieldReader) -> Group:
    options, names = _row(row, 2, check, "groups")
    check.true(isinstance(names, list), "groups")
    return Group(_mapping(options, check, "groups"), check.texts(names, "groups"))


def _notice(row: Any, check: FieldReader) -> Notice:
    text, names, weight = _row(row, 3, check, "notices")
    check.true(isinstance(text, str) and isinstance(names, list), "notices")
    check.true(is_natural(weight) and weight in set(Weight), "notices")
    return Notice(text, check.texts(names, "notices"), Weight(weight))


def _error(row: Any, check: FieldReader) -> tuple[tuple[str, str], dict[str, Value]]:
    name, state, figures = _row(row, 3, check, "errors")
    check.true(isinstance(name, str) and isinstance(state, str), "errors")
    return (name, state), _mapping(figures, check, "errors")
