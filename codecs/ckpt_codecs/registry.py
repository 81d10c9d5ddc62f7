"""The codecs by name. To add one, write its module and add its line here.

The values are import paths, not classes, so that only the codecs that a checkpoint has are imported.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_codecs.base import Codec
from ckpt_codecs.errors import CodecError

if TYPE_CHECKING:
    from ckpt_codecs.delta import DeltaCodec

_AnyCodec = TypeVar("_AnyCodec", Codec, "DeltaCodec")

CODECS: dict[str, str] = {
    "rounded": "ckpt_codecs.lossless.rounded:Rounded",
    "planes": "ckpt_codecs.lossless.float_planes:Planes",
    "first-moment": "ckpt_codecs.lossless.moments:FirstMoment",
    "second-moment": "ckpt_codecs.lossless.moments:SecondMoment",
    "integers": "ckpt_codecs.lossless.integers:Integers",
    "zstd": "ckpt_codecs.lossless.zstd:Zstd",
}
ENTRY_POINTS = "ckpt.codecs"
"""The entry points by which other packages add codecs: each has the name of a codec and refers to its class."""

DELTA_CODECS: dict[str, str] = {
    "replay": "ckpt_codecs.deltas.replay:Replay",
    "rows": "ckpt_codecs.deltas.replay:ReplayRows",
    "difference": "ckpt_codecs.deltas.difference:Difference",
    "subspace": "ckpt_codecs.lossy.subspace:Subspace",
    "subspace-rows": "ckpt_codecs.lossy.subspace:SubspaceRows",
    "lc": "ckpt_codecs.lossy.lc:LcCheckpoint",
    "excp": "ckpt_codecs.lossy.excp:Excp",
}
DEFAULT_DELTA = "replay"
"""The codec of a new chain if the user names none."""
DELTA_ENTRY_POINTS = "ckpt.delta_codecs"


def find(name: str) -> type[Codec]:
    """Return the class of a codec, built in or of an installed package. Raises `CodecError` if there is none."""
    return _find(name, CODECS, Codec, ENTRY_POINTS)


def find_delta(name: str) -> "type[DeltaCodec]":
    """Return the class of a delta codec, built in or of an installed package. Raises `CodecError` if there is none."""
    from ckpt_codecs.delta import DeltaCodec  # most checkpoints have no deltas

    return _find(name, DELTA_CODECS, DeltaCodec, DELTA_ENTRY_POINTS)


def from_config(config: dict[str, Any]) -> Codec:
    """Return the codec with this `Codec.config`. Raises `CodecError` if its name or an option is unknown."""
    return _create(config, find)


def delta_from_config(config: dict[str, Any]) -> "DeltaCodec":
    """Return the codec with this `DeltaCodec.config`. Raises `CodecError` if its name or an option is unknown."""
    return _create(config, find_delta)


def parse(text: str) -> Codec:
    """Return the codec that a user writes as `name:option=value,...`. Raises `CodecError`.

    >>> parse("planes:level=max")
    Planes(level='max')
    >>> parse("zstd:level=9").config()
    {'name': 'zstd', 'level': 9}
    """
    return from_config(_parse(text, find))


def parse_delta(text: str) -> "DeltaCodec":
    """Return the delta codec that a user writes as `name:option=value,...`. Raises `CodecError`."""
    return delta_from_config(_parse(text, find_delta))


def _find(name: str, builtin: Mapping[str, str], base: type[Any], group: str) -> type[_AnyCodec]:
    if name in builtin:
        module, _, attribute = builtin[name].partition(":")
        codec: type[_AnyCodec] = getattr(import_module(module), attribute)
        return codec
    from importlib.metadata import entry_points

    for entry_point in entry_points(group=group, name=name):
        loaded = entry_point.load()
        if isinstance(loaded, type) and issubclass(loaded, base) and getattr(loaded, "name", None) == name:
            return loaded
        raise CodecError(
            f"the entry point {entry_point.value} of codec {name!r} is not a subclass of {base.__name__} of that name"
        )
    raise CodecError(f"there is no codec {name!r}; there are: {', '.join(builtin)}")


def _create(config: dict[str, Any], find: Callable[[str], type[_AnyCodec]]) -> _AnyCodec:
    options = dict(config)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise CodecError(f"the name of a codec is a string, not {name!r}")
    codec = find(name)
    try:
        return codec(**options)
    except (TypeError, ValueError) as error:
        raise CodecError(f"codec {name}: {error}") from None


def _parse(text: str, find: Callable[[str], type[Any]]) -> dict[str, Any]:
    name, _, rest = text.partition(":")
    known = [field.name for field in fields(find(name))]
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key not in known or key in options:
            raise CodecError(f"codec {name}: {item!r} is not an option. Write name=value: {', '.join(known)}")
        options[key] = _parse_value(value)
    return {"name": name, **options}


def _parse_value(text: str) -> Any:
    """Return a number, `true`, `false` or `null` as JSON defines them; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
