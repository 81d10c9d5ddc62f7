"""Codecs by name. To add one: write its file, add its line."""

import json
from dataclasses import fields
from typing import Any

from ckpt_codecs.base import Codec, DType
from ckpt_codecs.errors import CodecError
from ckpt_codecs.general import ZSTD_LEVELS, Zstd
from ckpt_codecs.integers import Integers
from ckpt_codecs.moments import FirstMoment, SecondMoment
from ckpt_codecs.planes import Planes
from ckpt_codecs.rounded import Rounded

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (Rounded, Planes, FirstMoment, SecondMoment, Integers, Zstd)
}
ENTRY_POINTS = "ckpt.codecs"
"""Where other packages offer theirs: an entry point of the codec's name, for its class."""

BY_ROWS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "momentum_buffer", "exp_inf", "sum")
"""States that vary by rows and columns, by the names that optimizers give them."""


def find(name: str) -> type[Codec]:
    """The class of a codec, ours or an installed package's. Raises `CodecError` if there is none."""
    if name in CODECS:
        return CODECS[name]
    from importlib.metadata import entry_points

    for offered in entry_points(group=ENTRY_POINTS, name=name):
        codec = offered.load()
        if isinstance(codec, type) and issubclass(codec, Codec) and codec.name == name:
            return codec
        raise CodecError(f"what {offered.value} offers as codec {name!r} is no class of that name derived from Codec")
    raise CodecError(f"no codec is called {name!r}; there are: {', '.join(CODECS)}")


def from_config(config: dict[str, Any]) -> Codec:
    """The codec that `Codec.config` described. Raises `CodecError` for one we do not have."""
    options = dict(config)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise CodecError(f"a codec's name is a text, not {name!r}")
    codec = find(name)
    try:
        return codec(**options)
    except (TypeError, ValueError) as error:
        raise CodecError(f"codec {name}: {error}") from None


def parse(text: str) -> Codec:
    """A codec as a user types it.

    >>> parse("planes:level=max")
    Planes(level='max')
    >>> parse("zstd:level=9").config()
    {'name': 'zstd', 'level': 9}
    """
    name, _, rest = text.partition(":")
    known = [field.name for field in fields(find(name))]
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key not in known or key in options:
            raise CodecError(f"codec {name}: what is {item!r}? Options are written name=value: {', '.join(known)}")
        options[key] = _value(value)
    return from_config({"name": name, **options})


def _value(text: str) -> Any:
    """A number, `true`, `false` or `null` as JSON has them; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def best_for(role: str, state: str, dtype: DType, level: str = "default") -> tuple[Codec, ...]:
    """The codecs to try for a state, the best first. Each falls back by itself, chunk by chunk."""
    if level not in ZSTD_LEVELS:
        raise CodecError(f"no level is called {level!r}; there are: {', '.join(ZSTD_LEVELS)}")
    if dtype.kind in "biu" and dtype.name != "bfloat16":
        return (Integers(level),)
    if dtype.kind not in "fcV":
        return (Zstd(ZSTD_LEVELS[level]),)
    if role == "parameter" and state == "exp_avg":
        return FirstMoment(level), Planes(level)
    if role == "parameter" and state in BY_ROWS:
        return SecondMoment(level), Planes(level)
    return (Planes(level),)
