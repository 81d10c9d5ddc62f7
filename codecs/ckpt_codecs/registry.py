"""Codecs by name. To add one: write its file, add its line."""

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

_Kind = TypeVar("_Kind", Codec, DeltaCodec)

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (Rounded, Planes, FirstMoment, SecondMoment, Integers, Zstd)
}
ENTRY_POINTS = "ckpt.codecs"
"""Where other packages offer theirs: an entry point of the codec's name, for its class."""

DELTA_CODECS: dict[str, type[DeltaCodec]] = {
    codec.name: codec for codec in (Replay, Difference, Subspace, LcCheckpoint, Excp)
}
DEFAULT_DELTA = Replay.name
"""What a chain is made with if nobody says."""
DELTA_ENTRY_POINTS = "ckpt.delta_codecs"


def find(name: str) -> type[Codec]:
    """The class of a codec, ours or an installed package's. Raises `CodecError` if there is none."""
    return _find(name, CODECS, Codec, ENTRY_POINTS)


def find_delta(name: str) -> type[DeltaCodec]:
    """The class of a delta codec, ours or an installed package's. Raises `CodecError` if there is none."""
    return _find(name, DELTA_CODECS, DeltaCodec, DELTA_ENTRY_POINTS)


def from_config(config: dict[str, Any]) -> Codec:
    """The codec that `Codec.config` described. Raises `CodecError` for one we do not have."""
    return _made(config, find)


def delta_from_config(config: dict[str, Any]) -> DeltaCodec:
    """The codec that `DeltaCodec.config` described. Raises `CodecError` for one we do not have."""
    return _made(config, find_delta)


def parse(text: str) -> Codec:
    """A codec as a user types it.

    >>> parse("planes:level=max")
    Planes(level='max')
    >>> parse("zstd:level=9").config()
    {'name': 'zstd', 'level': 9}
    """
    return from_config(_config(text, find))


def parse_delta(text: str) -> DeltaCodec:
    """A delta codec as a user types it."""
    return delta_from_config(_config(text, find_delta))


def _find(name: str, ours: dict[str, type[_Kind]], base: type[Any], group: str) -> type[_Kind]:
    if name in ours:
        return ours[name]
    from importlib.metadata import entry_points

    for offered in entry_points(group=group, name=name):
        codec = offered.load()
        if isinstance(codec, type) and issubclass(codec, base) and getattr(codec, "name", None) == name:
            return codec
        raise CodecError(
            f"what {offered.value} offers as codec {name!r} is no class of that name derived from {base.__name__}"
        )
    raise CodecError(f"no codec is called {name!r}; there are: {', '.join(ours)}")


def _made(config: dict[str, Any], find: Callable[[str], type[_Kind]]) -> _Kind:
    options = dict(config)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise CodecError(f"a codec's name is a text, not {name!r}")
    codec = find(name)
    try:
        return codec(**options)
    except (TypeError, ValueError) as error:
        raise CodecError(f"codec {name}: {error}") from None


def _config(text: str, find: Callable[[str], type[Any]]) -> dict[str, Any]:
    name, _, rest = text.partition(":")
    known = [field.name for field in fields(find(name))]
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key not in known or key in options:
            raise CodecError(f"codec {name}: what is {item!r}? Options are written name=value: {', '.join(known)}")
        options[key] = _value(value)
    return {"name": name, **options}


def _value(text: str) -> Any:
    """A number, `true`, `false` or `null` as JSON has them; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
