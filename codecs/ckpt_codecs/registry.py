"""The codecs by name. To add one, write its module and add its class here."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from ckpt_codecs.base import Codec
from ckpt_codecs.delta import DeltaCodec
from ckpt_codecs.deltas.difference import Difference
from ckpt_codecs.deltas.replay import Replay
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.lossless.integers import Integers
from ckpt_codecs.lossless.moments import FirstMoment, SecondMoment
from ckpt_codecs.lossless.rounded import Rounded
from ckpt_codecs.lossless.zstd import Zstd
from ckpt_codecs.lossy import Excp, LcCheckpoint, Subspace

_AnyCodec = TypeVar("_AnyCodec", Codec, DeltaCodec)

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (Rounded, Planes, FirstMoment, SecondMoment, Integers, Zstd)
}
ENTRY_POINTS = "ckpt.codecs"
"""The entry points by which other packages add codecs: each has the name of a codec and refers to its class."""

DELTA_CODECS: dict[str, type[DeltaCodec]] = {
    codec.name: codec for codec in (Replay, Difference, Subspace, LcCheckpoint, Excp)
}
DEFAULT_DELTA = Replay.name
"""The codec of a new chain if the user names none."""
DELTA_ENTRY_POINTS = "ckpt.delta_codecs"


def find(name: str) -> type[Codec]:
    """Return the class of a codec, built in or of an installed package. Raises `CodecError` if there is none."""
    return _find(name, CODECS, Codec, ENTRY_POINTS)


def find_delta(name: str) -> type[DeltaCodec]:
    """Return the class of a delta codec, built in or of an installed package. Raises `CodecError` if there is none."""
    return _find(name, DELTA_CODECS, DeltaCodec, DELTA_ENTRY_POINTS)


def from_config(config: dict[str, Any]) -> Codec:
    """Return the codec with this `Codec.config`. Raises `CodecError` if its name or an option is unknown."""
    return _create(config, find)


def delta_from_config(config: dict[str, Any]) -> DeltaCodec:
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


def parse_delta(text: str) -> DeltaCodec:
    """Return the delta codec that a user writes as `name:option=value,...`. Raises `CodecError`."""
    return delta_from_config(_parse(text, find_delta))


def _find(name: str, builtin: dict[str, type[_AnyCodec]], base: type[Any], group: str) -> type[_AnyCodec]:
    if name in builtin:
        return builtin[name]
    from importlib.metadata import entry_points

    for entry_point in entry_points(group=group, name=name):
        codec = entry_point.load()
        if isinstance(codec, type) and issubclass(codec, base) and getattr(codec, "name", None) == name:
            return codec
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
