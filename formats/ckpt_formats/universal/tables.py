"""The tables of an index: what its columns refer to by number. They are part of the manifest."""

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.checkpoint import ErrorFigures
from ckpt_formats.core.dtypes import SAFETENSORS_TAGS
from ckpt_formats.core.state_names import from_stored, to_stored
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.values import Value

_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True)
class CodecItem:
    """The codec of a state, and the state of the same parameter that it needs to decode. Its configuration is JSON."""

    text: str
    base: str | None

    @classmethod
    def none(cls) -> "CodecItem":
        """The item of states without a codec."""
        return cls("null", None)

    @classmethod
    def of(cls, codec: Mapping[str, Any], base: str | None) -> "CodecItem":
        return cls(Tables.text(dict(codec)), base)

    @property
    def codec(self) -> Any:
        """The configuration; None without a codec."""
        return json.loads(self.text)


@dataclass(frozen=True)
class DeltaItem:
    """The codec of a delta, the states in it, and those of the parent that it needs."""

    text: str
    states: tuple[str, ...]
    parent_states: tuple[str, ...]

    @classmethod
    def of(cls, codec: Mapping[str, Any], states: Sequence[str], parent_states: Sequence[str]) -> "DeltaItem":
        return cls(Tables.text(encode(dict(codec))), tuple(states), tuple(parent_states))

    @property
    def codec(self) -> Any:
        return decode(json.loads(self.text), Path("manifest.json"))


@dataclass(frozen=True)
class Tables:
    """What the columns refer to by number."""

    states: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    codecs: tuple[CodecItem, ...] = (CodecItem("null", None),)
    """Number 0 is: no codec."""
    deltas: tuple[DeltaItem, ...] = ()
    values: tuple[Mapping[str, Value], ...] = ({},)
    """Distinct values of parameters, such as `step`. Number 0 is: none."""
    errors: tuple[ErrorFigures | None, ...] = (None,)
    """Distinct figures of errors. Number 0 is: exact."""

    @staticmethod
    def text(content: Any) -> str:
        """JSON without spaces. The order of keys is kept."""
        return json.dumps(content, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def mapping(text: str) -> Mapping[str, Value]:
        """The values whose typed JSON is `text`."""
        value = decode(json.loads(text), Path("manifest.json"))
        assert isinstance(value, dict)
        return value

    @staticmethod
    def figures(text: str) -> ErrorFigures | None:
        """The figures whose typed JSON is `text`; None for `null`."""
        return None if text == "null" else Tables.mapping(text)

    def to_json(self) -> dict[str, Any]:
        """The fields of the manifest. They have the stored names of states."""
        return {
            "states": list(map(to_stored, self.states)),
            "dtypes": list(self.dtypes),
            "codecs": [
                {"codec": item.codec, "base": None if item.base is None else to_stored(item.base)}
                for item in self.codecs
            ],
            "deltas": [
                {
                    "codec": json.loads(item.text),
                    "states": list(map(to_stored, item.states)),
                    "parent_states": list(map(to_stored, item.parent_states)),
                }
                for item in self.deltas
            ],
            "values": [encode(dict(values)) for values in self.values],
            "errors": [None if error is None else encode(dict(error)) for error in self.errors],
        }

    @classmethod
    def of_json(cls, fields: Any, check: FieldReader) -> "Tables":
        """The tables in the fields of a manifest. Raises `CorruptError`."""
        states = check.texts(check.sequence(fields, "states"), "states")
        dtypes = check.texts(check.sequence(fields, "dtypes"), "dtypes")
        check.true(len(set(states)) == len(states), "states: a name twice")
        check.true(all(dtype in SAFETENSORS_TAGS for dtype in dtypes), "dtypes: an unknown element type")
        codecs = tuple(_codec(item, check.of("codecs")) for item in check.sequence(fields, "codecs"))
        deltas = tuple(_delta(item, check.of("deltas")) for item in check.sequence(fields, "deltas"))
        values = tuple(_values(item, check.of("values")) for item in check.sequence(fields, "values"))
        errors = tuple(_figures(item, check.of("errors")) for item in check.sequence(fields, "errors"))
        for table, items, none in (
            ("codecs", codecs, CodecItem.none()),
            ("values", values, {}),
            ("errors", errors, None),
        ):
            check.true(items[:1] == (none,), f"{table}: the first item is not empty")
            check.true(table == "values" or none not in items[1:], f"{table}: an empty item that is not the first")
        return cls(tuple(map(from_stored, states)), dtypes, codecs, deltas, values, errors)

    @classmethod
    def merged(cls, tables: Sequence["Tables"]) -> "tuple[Tables, list[dict[str, Array]]]":
        """One set of tables for several, and for each of them the new numbers of its items by column: (n,) int64."""
        start = cls()
        states, dtypes = _Numbering[str](()), _Numbering[str](())
        codecs, deltas = _Numbering[CodecItem](start.codecs), _Numbering[DeltaItem](())
        values, errors = _Numbering[str]((cls.text({}),)), _Numbering[str]((cls.text(None),))
        numbers = [
            {
                "state.name": states.add(one.states),
                "state.dtype": dtypes.add(one.dtypes),
                "state.codec": codecs.add(one.codecs),
                "delta.codec": deltas.add(one.deltas),
                "parameter.values": values.add(cls.text(encode(dict(item))) for item in one.values),
                "state.error": errors.add(
                    cls.text(None if item is None else encode(dict(item))) for item in one.errors
                ),
            }
            for one in tables
        ]
        result = cls(
            tuple(states.items),
            tuple(dtypes.items),
            tuple(codecs.items),
            tuple(deltas.items),
            tuple(map(cls.mapping, values.items)),
            tuple(map(cls.figures, errors.items)),
        )
        return result, numbers


def _codec(item: Any, check: FieldReader) -> CodecItem:
    codec, base = check.get(item, "codec"), check.get(item, "base")
    is_codec = isinstance(codec, dict) and isinstance(codec.get("name"), str)
    check.true(is_codec or codec is None, "an item is not a codec")
    check.true(base is None or (isinstance(base, str) and is_codec), "the base of an item")
    return CodecItem(Tables.text(codec), None if base is None else from_stored(base))


def _delta(item: Any, check: FieldReader) -> DeltaItem:
    config = check.values(item, "codec")
    check.true(isinstance(config.get("name"), str), "an item is not a codec")
    own, parents = (check.texts(check.sequence(item, key), key) for key in ("states", "parent_states"))
    valid = 0 < len(own) == len(set(own)) and set(parents) <= set(own) and len(set(parents)) == len(parents)
    check.true(valid, "the states of an item")
    return DeltaItem(Tables.text(item["codec"]), tuple(map(from_stored, own)), tuple(map(from_stored, parents)))


def _values(item: Any, check: FieldReader) -> Mapping[str, Value]:
    return check.values({"an item": item}, "an item")


def _figures(item: Any, check: FieldReader) -> ErrorFigures | None:
    return None if item is None else _values(item, check)


class _Numbering(Generic[_T]):
    """Distinct items, numbered as they come."""

    def __init__(self, items: Iterable[_T]) -> None:
        self.items: dict[_T, int] = {item: number for number, item in enumerate(items)}

    def add(self, items: Iterable[_T]) -> Array:
        """The numbers of these items: (items,) int64."""
        return np.array([self.items.setdefault(item, len(self.items)) for item in items], np.int64)
