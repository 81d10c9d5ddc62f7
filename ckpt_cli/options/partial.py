"""Partial recovery: what is lost, and the checkpoint that has all else."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.param_type import ParamType
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.chains.restore import ChainState
    from ckpt.partial.lost_blocks import RankSet

F = TypeVar("F", bound=Callable[..., Any])


class RanksType(ParamType["RankSet"]):
    """`2,3`, or with a dimension `dp=2,3`."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> "RankSet":
        from ckpt.partial.lost_blocks import RankSet

        match = re.fullmatch(r"(?:([a-z_]{1,32})=)?(\d{1,9}(?:,\d{1,9}){0,9999})", str(value))
        if match is None:
            self.fail(f"{value!r:.60} is not a list of ranks like 2,3 or dp=2,3", param, ctx)
        return RankSet(tuple(map(int, match[2].split(","))), match[1])


def partial_recovery(command: F) -> F:
    """`--partial`, `--live`, `--lost` and `--lost-ranks`: the command gets the state with the live blocks in it."""

    @wraps(command)
    def wrapper(
        *args: Any,
        state: "ChainState",
        partial: bool,
        live: str | None,
        lost_names: tuple[str, ...],
        lost_ranks: "tuple[RankSet, ...]",
        **arguments: Any,
    ) -> Any:
        given = {"--live": live is not None, "--lost": bool(lost_names), "--lost-ranks": bool(lost_ranks)}
        first = next((flag for flag, is_given in given.items() if is_given), None)
        if first is not None and not partial:
            raise click.UsageError(f"{first} mixes blocks of several steps in one state: say so with --partial.")
        if partial and live is None:
            raise click.UsageError("--partial needs --live CKPT, which has what is not lost.")
        if live is not None:
            from ckpt.partial.recovery import recover
            from ckpt_cli.reading import open_live

            surviving = open_live(live, click.get_current_context().meta["ckpt.read"])
            mixed = recover(surviving, state.checkpoint, lost_names, lost_ranks)
            state = replace(state, checkpoint=mixed)
        return command(*args, state=state, **arguments)

    options = (
        click.option(
            "--partial",
            is_flag=True,
            help="Take only lost blocks from CHAIN, and all else from --live. TARGET then has blocks of two steps.",
        ),
        click.option(
            "--live",
            type=CheckpointPath(),
            metavar="CKPT",
            help="The checkpoint of what survived: of any format, or a shadow's address. Of DCP, files may be missing.",
        ),
        click.option(
            "--lost",
            "lost_names",
            multiple=True,
            metavar="PATTERN",
            help="Parameters that are lost, by their names. May be given again.",
        ),
        click.option(
            "--lost-ranks",
            type=RanksType(),
            multiple=True,
            metavar="[DIM=]N,N",
            help="Ranks of --live whose files are lost, such as 2,3 or dp=2,3. May be given again.",
        ),
    )
    return cast(F, with_options(wrapper, *options, group="Partial recovery"))
