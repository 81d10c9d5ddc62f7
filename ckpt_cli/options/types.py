"""Types of values on the command line."""

import math
import re
from collections.abc import Sequence
from typing import Any, get_args

import click

from ckpt_cli.options.param_type import ParamType
from ckpt_formats.core.arguments import MAX_INTEGER

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class WholeRange(click.IntRange):
    """Whole numbers of a range. The largest number of the library is shown as a power of two."""

    def _describe_range(self) -> str:
        return super()._describe_range().replace(str(MAX_INTEGER), "2^62")


def numbers(annotation: Any) -> ParamType[Any]:
    """Return the type of an option that takes the numbers of an annotation in the library, such as `Ranks`.

    So each range stands once, where the library checks it.
    """
    kind, bounds = get_args(annotation)
    least, most = (None if math.isinf(one) else one for one in (bounds.least, bounds.most))
    return (WholeRange if kind is int else click.FloatRange)(least, most, bounds.above, bounds.below)


class SizeType(ParamType[int]):
    """A size such as `512M`: binary units, with or without a final B."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", str(value).strip().lower())
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size like 512M or 2G", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


class ShardType(ParamType[Any]):
    """`i/N`, `auto` or `auto/N`: the share of the files that this process writes, with the words of the command.

    In these words, the share is numbers: `ckpt commit` repeats them where no job array is.
    """

    name = "i/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        import os
        from dataclasses import replace

        from ckpt.pipeline.shard import parse_shard

        words = ctx.meta.get("ckpt.words", ()) if ctx is not None else ()
        shard = parse_shard(value, os.environ)
        return replace(shard, command=_with_value(words, "--shard", str(shard)))


def _with_value(words: Sequence[str], option: str, value: str) -> tuple[str, ...]:
    """The words of a command line with another value of an option, which they have."""
    end = words.index("--") if "--" in words else len(words)
    replaced = list(words)
    for i, word in enumerate(words[:end]):
        if word.startswith(f"{option}="):
            replaced[i] = f"{option}={value}"
        elif word == option and i + 1 < len(words):
            replaced[i + 1] = value
    return tuple(replaced)


class NamedPath(click.Path):
    """A path or a URL that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty. Was a variable of the shell not set?", param, ctx)
        return super().convert(value, param, ctx)


class CheckpointPath(NamedPath):
    """The path of a checkpoint to read or to write."""

    def __init__(self) -> None:
        super().__init__(readable=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail(
                "a checkpoint is read and written at many places of its files, so a pipe cannot be used. "
                "Name a file or folder (./- for one with this name).",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


class FileToRead(NamedPath):
    """A file of this machine that a command reads; never one in a store."""

    def __init__(self, path_type: type | None = None) -> None:
        super().__init__(dir_okay=False, readable=False, path_type=path_type)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in str(value):
            from ckpt_formats.stores.location import refuse_url

            refuse_url(str(value), f"{_shown(param)} reads a file of this machine", "Copy it here, and name the copy.")
        return super().convert(value, param, ctx)


class LocalTarget(NamedPath):
    """A file or a folder of this machine into which a command writes; never one in a store."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in str(value):
            from ckpt_formats.stores.location import refuse_url

            hint = "Name a local path. What is written there can be uploaded afterwards."
            refuse_url(str(value), f"{_shown(param)} is a path of this machine", hint)
        return super().convert(value, param, ctx)


def _shown(param: click.Parameter | None) -> str:
    """The name of an option or of an argument, as the user knows it."""
    if param is None:
        return "the command"
    return param.opts[0] if isinstance(param, click.Option) else str(param.name).upper()


class FloatType(ParamType[str]):
    """A floating-point type by one of its names."""

    name = "type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ckpt_formats.core.dtypes import DTYPES, SHORT_NAMES, is_float

        dtype = DTYPES.get(SHORT_NAMES.get(value, value))
        if dtype is None or not is_float(dtype):
            from ckpt_cli.options.suggestions import DTYPES as OTHER_NAMES  # only a name that ckpt does not have

            meant = OTHER_NAMES.get(str(value).lower())
            if meant is not None:
                self.fail(f"{value!r:.60} is not a floating-point type; {meant}", param, ctx)
            known = ", ".join((*SHORT_NAMES, *(name for name, one in DTYPES.items() if is_float(one))))
            self.fail(f"{value!r:.60} is not a floating-point type; there are: {known}", param, ctx)
        return str(value)


class PatternType(ParamType[str]):
    """A regular expression that is matched in reasonable time."""

    name = "pattern"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ckpt_formats.core.errors import RulesError
        from ckpt_formats.core.rules import safe_pattern

        try:
            return safe_pattern(str(value), param.opts[0] if param is not None else self.name)
        except RulesError as error:
            self.fail(error.what, param, ctx)


class RenameType(ParamType[tuple[str, str]]):
    """`PATTERN=NEW`: a regular expression, and what stands in its place. The last `=` divides them."""

    name = "renaming"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        pattern, mark, new = str(value).rpartition("=")
        if not mark or not pattern:
            self.fail(f"{value!r:.60} is not PATTERN=NEW, such as '^module\\.='", param, ctx)
        PatternType().convert(pattern, param, ctx)
        try:
            re.sub(pattern, new, "")
        except (re.error, IndexError) as error:
            self.fail(f"{new!r:.60} cannot stand in place of {pattern!r:.60}: {error}", param, ctx)
        return pattern, new


class SegmentsType(ParamType[int]):
    """`last:N`, or `all`, which is None."""

    name = "segments"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "all":
            return None  # type: ignore[return-value]
        match = re.fullmatch(r"last:(\d{1,18})", str(value))
        if match is None:
            self.fail(f"{value!r} is not last:N or all", param, ctx)
        return int(match[1])


class NumbersType(ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"\d+(,\d+)*", str(value)):
            self.fail(f"{value!r} is not a list of numbers like 0,4,8", param, ctx)
        return tuple(map(int, str(value).split(",")))


class WeightsType(ParamType[tuple[float, ...]]):
    """Finite numbers with commas between them."""

    name = "weights"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(map(float, str(value).split(",")))
        except ValueError:
            numbers = ()
        if not numbers or not all(map(math.isfinite, numbers)):
            self.fail(f"{value!r:.60} is not a list of numbers like 1,2,1", param, ctx)
        return numbers


_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_NUMBER = r"\d{1,18}(?:\.\d{1,18})?(?:e[+-]?\d{1,2})?"


class DurationType(ParamType[float]):
    """A duration such as `3h`, `40ms` or `2m30s`, in seconds; a number alone is seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip().lower()
        if re.fullmatch(_NUMBER, text):
            return float(text)
        part = rf"({_NUMBER})\s*(us|ms|min|s|m|h|d)"
        if not re.fullmatch(rf"(?:{part}\s*){{1,5}}", text):
            self.fail(f"{value!r:.60} is not a duration like 3h, 2m30s or 40ms", param, ctx)
        return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(part, text))


class RateType(ParamType[float]):
    """Bytes a second, such as `2GiB/s`: binary units, as for sizes."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)i?b?(?:/s)?", str(value).strip().lower())
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r:.60} is not a rate like 500MiB/s or 2GiB/s", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


class CountType(ParamType[float]):
    """A number of parameters such as `350M` or `7e9`: decimal units."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(rf"({_NUMBER})\s*([kmbt]?)(?:/s)?", str(value).strip().lower())
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r:.60} is not a number like 350M, 7B or 7e9", param, ctx)
        return float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]]


class ShareType(ParamType[float]):
    """A share such as `1%` or `0.01`."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*(%?)", str(value).strip())
        if match is None:
            self.fail(f"{value!r:.60} is not a share like 1% or 0.01", param, ctx)
        return float(match[1]) / (100 if match[2] else 1)
