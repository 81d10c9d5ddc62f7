"""Tables with another number of rows, as a command writes them."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.param_type import ParamType
from ckpt_cli.options.types import numbers
from ckpt_formats.core.arguments import Positive

if TYPE_CHECKING:
    from ckpt_formats.core.checkpoint import Checkpoint

F = TypeVar("F", bound=Callable[..., Any])


class RowsType(ParamType[tuple[str, int]]):
    """`NAME=ROWS`: the last `=` divides them."""

    name = "rows"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        name, mark, rows = str(value).rpartition("=")
        if not mark or not name or not rows.isascii() or not rows.isdigit() or len(rows) > 18 or not int(rows):
            self.fail(f"{value!r:.60} is not NAME=ROWS, such as lm_head.weight=50304", param, ctx)
        return name, int(rows)


_OPTIONS = (
    click.option(
        "--pad-vocab",
        type=numbers(Positive),
        metavar="N",
        help="Pad the rows of the tables of the vocabulary to the next multiple of N; config.json follows.",
    ),
    click.option(
        "--resize",
        type=RowsType(),
        multiple=True,
        metavar="NAME=ROWS",
        help="Give a tensor of the source this number of rows, with its optimizer states. May be given again.",
    ),
    click.option(
        "--fill",
        type=click.Choice(["zero", "mean"]),
        help="What new rows of weights are: zero, or the mean of all rows. States get zeros.  [default: zero]",
    ),
    click.option("--allow-cut", is_flag=True, help="With --resize and fewer rows: the last rows are lost."),
)


def resized(command: F) -> F:
    """`--pad-vocab`, `--resize`, `--fill` and `--allow-cut`; the command gets the resized source."""

    @wraps(command)
    def changed(
        *args: Any,
        source: "Checkpoint",
        pad_vocab: int | None,
        resize: tuple[tuple[str, int], ...],
        fill: Any,
        allow_cut: bool,
        **arguments: Any,
    ) -> Any:
        if (fill or allow_cut) and not (pad_vocab or resize):
            raise click.UsageError("--fill and --allow-cut are about --pad-vocab and --resize: give one of them, too.")
        rows = dict(resize)
        if len(rows) < len(resize):
            raise click.UsageError("--resize names a tensor twice.")
        if pad_vocab or resize:
            from ckpt.combine import resize as resize_tables
            from ckpt_cli.reading import noted

            source = noted(resize_tables(source, rows, pad_vocab=pad_vocab, fill=fill or "zero", cut=allow_cut))
        return command(*args, source=source, **arguments)

    return cast(F, with_options(changed, *_OPTIONS, group="Edits"))
