"""Types of values on the command line."""

import math
import re
from typing import Any

import click

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class SizeType(click.ParamType[int]):
    """A size such as `512M`: binary units, with or without a final B."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", str(value).strip().lower())
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size like 512M or 2G", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


class CheckpointPath(click.Path):
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


class FloatType(click.ParamType[str]):
    """A floating-point type by one of its names."""

    name = "type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ckpt_formats.core.dtypes import DTYPES, SHORT_NAMES, is_float

        dtype = DTYPES.get(SHORT_NAMES.get(value, value))
        if dtype is None or not is_float(dtype):
            known = ", ".join((*SHORT_NAMES, *(name for name, one in DTYPES.items() if is_float(one))))
            self.fail(f"{value!r:.60} is not a floating-point type; there are: {known}", param, ctx)
        return str(value)


class SegmentsType(click.ParamType[int]):
    """`last:N`, or `all`, which is None."""

    name = "segments"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "all":
            return None  # type: ignore[return-value]
        match = re.fullmatch(r"last:(\d{1,18})", str(value))
        if match is None:
            self.fail(f"{value!r} is not last:N or all", param, ctx)
        return int(match[1])


class NumbersType(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"\d+(,\d+)*", str(value)):
            self.fail(f"{value!r} is not a list of numbers like 0,4,8", param, ctx)
        return tuple(map(int, str(value).split(",")))


class WeightsType(click.ParamType[tuple[float, ...]]):
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
