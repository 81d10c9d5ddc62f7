"""A checkpoint without its values as JSON: what a reader of a shadow gets first. It may come from a hostile peer."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.checkpoint import Checkpoint, Edit, Group, Origin, OriginalForm, Parameter, Role
from ckpt_formats.core.claims import MAX_AXES, MAX_STEPPED_ELEMENTS
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, UnsafeError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.state_names import from_stored, to_stored
from ckpt_formats.core.tensor import Blob, Tensor
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.stores.wire import MAX_STATE
from ckpt_formats.universal.gradients.parts import MAX_PARTS

_ROLES: dict[str, Role] = {"parameter": "parameter", "frozen": "frozen", "buffer": "buffer", "extra": "extra"}

MakeBlob = Callable[[int, Shape, DType], Blob]
"""The blob of a tensor, from its number in the order of `Checkpoint.tensors`, its shape and its type."""


@dataclass(frozen=True)
class PartOfState:
    """Which part of a state a shadow holds, and of which state.

    Attributes:
        number: Which of the parts, from 1 on.
        count: How many parts there are.
        run: The id of the run.
        segment: The name of the folder of the segment.
        total: How many parameters the whole state has.
        places: Which of these the part has, in their order: from 0 on.
    """

    number: int
    count: int
    run: str
    segment: str
    total: int
    places: tuple[int, ...]


def dump(checkpoint: Checkpoint, part: PartOfState | None = None) -> bytes:
    """The JSON of a checkpoint, or of a part of one. Raises `UnsafeError` if it is too long."""
    origin, original = checkpoint.origin, checkpoint.original
    fields = {
        "origin": [origin.engine, origin.version, origin.step, encode(dict(origin.layout))],
        "parameters": [
            [
                parameter.name,
                parameter.role,
                [
                    [to_stored(state), tensor.dtype.name, list(tensor.shape)]
                    for state, tensor in parameter.states.items()
                ],
                encode(dict(parameter.values)),
            ]
            for parameter in checkpoint.parameters.values()
        ],
        "groups": [[encode(dict(group.options)), list(group.names)] for group in checkpoint.groups],
        "extras": encode(dict(checkpoint.extras)),
        "aliases": dict(checkpoint.aliases),
        "notices": [[one.text, list(one.names), int(one.weight)] for one in checkpoint.notices],
        "suspicions": list(checkpoint.suspicions),
        "errors": [[name, to_stored(state), encode(dict(error))] for (name, state), error in checkpoint.errors.items()],
        "original": None if original is None else [original.format, original.file],
        "part": None if part is None else asdict(part),
    }
    content = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    if len(content) > MAX_STATE:
        raise UnsafeError(f"the names and options of the state take {len(content)} bytes, more than {MAX_STATE}")
    return content


def load(
    content: bytes | bytearray, where: Path, make_blob: MakeBlob, history: tuple[Edit, ...]
) -> tuple[Checkpoint, PartOfState | None]:
    """The checkpoint whose JSON is `content`, and which part of a state it is. Raises `CorruptError`."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        raise CorruptError("the shadow's answer is not JSON", where=where) from None
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
    checkpoint = Checkpoint(
        path=where,
        origin=Origin(engine, version, step, _mapping(layout, check, "origin")),
        parameters=parameters,
        groups=tuple(_group(row, check) for row in check.sequence(fields, "groups")),
        extras=_mapping(check.mapping(fields, "extras"), check, "extras"),
        aliases=aliases,
        notices=tuple(_notice(row, check) for row in check.sequence(fields, "notices")),
        suspicions=check.texts(check.sequence(fields, "suspicions"), "suspicions"),
        errors=dict(_error(row, check) for row in check.sequence(fields, "errors")),
        original=original,
        history=history,
    )
    return checkpoint, _part(fields, len(parameters), check)


def _part(fields: Any, own: int, check: FieldReader) -> PartOfState | None:
    if check.get(fields, "part") is None:
        return None
    part = check.mapping(fields, "part")
    number, count, total = (check.natural(part, key) for key in ("number", "count", "total"))
    check.true(1 <= number <= count <= MAX_PARTS, "part: its number")
    places = check.sequence(part, "places")
    check.true(all(is_natural(one) and one < total for one in places), "part: places")
    check.true(len(places) == own and all(a < b for a, b in pairwise(places)), "part: places")
    return PartOfState(number, count, check.text(part, "run"), check.text(part, "segment"), total, tuple(places))


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
            check.true(isinstance(state, str) and from_stored(state) not in tensors, "parameters: a state")
            check.true(isinstance(dtype, str) and dtype in DTYPES, "parameters: a type")
            sizes = isinstance(shape, list) and len(shape) <= MAX_AXES and all(map(is_natural, shape))
            check.true(sizes and prod(max(n, 1) for n in shape) <= MAX_STEPPED_ELEMENTS, "parameters: a shape")
            tensors[from_stored(state)] = Tensor.of(make_blob(number, tuple(shape), DTYPES[dtype]))
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
    return (name, from_stored(state)), _mapping(figures, check, "errors")
