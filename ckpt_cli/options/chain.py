"""Options of commands that change chains."""

import re
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.param_type import ParamType
from ckpt_cli.options.source import read_options
from ckpt_cli.options.types import CheckpointPath, SegmentsType, numbers
from ckpt_formats.core.arguments import Count, Positive

if TYPE_CHECKING:
    from ckpt_formats.core.format import ReadOptions

F = TypeVar("F", bound=Callable[..., Any])

base_every = click.option("--base-every", type=numbers(Positive), metavar="N", help="Store each Nth state as a base.")


class RetentionType(ParamType[str]):
    """A policy of states that stay: `last:N`, `every:N`, `all`, or steps with commas."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"all|(last|every):[1-9]\d{0,17}|\d{1,18}(,\d{1,18})*", str(value)):
            self.fail(f"{value!r:.60} is not a policy: write last:N, every:N, all, or steps with commas.", param, ctx)
        return str(value)


class BaseEveryType(ParamType[Any]):
    """A number of members, or `auto`."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto":
            return "auto"
        return int(numbers(Positive).convert(value, param, ctx))


def retention(command: F) -> F:
    """`--keep`, `--gradients`, `--upto` and `--remove`; the command gets them as one `Retention`."""

    @wraps(command)
    def wrapper(
        *args: Any,
        keep: tuple[str, ...],
        gradients: int | None,
        upto: int | None,
        remove: tuple[str, ...],
        **arguments: Any,
    ) -> Any:
        from ckpt.chains.compact import Retention

        return command(*args, retention=Retention(keep, gradients, upto, remove), **arguments)

    return cast(
        F,
        with_options(
            wrapper,
            click.option(
                "--keep",
                type=RetentionType(),
                multiple=True,
                metavar="POLICY",
                default=["all"],
                show_default=True,
                help="States that stay: last:N, every:N (multiples of N), all, or steps with commas. "
                "May be given again.",
            ),
            click.option(
                "--gradients",
                type=SegmentsType(),
                metavar="last:N|all",
                default="all",
                show_default=True,
                help="Segments of the log of gradients that stay: the last N, or all.",
            ),
            click.option("--upto", type=numbers(Count), metavar="STEP", help="Drop all steps after STEP."),
            click.option(
                "--remove",
                multiple=True,
                metavar="MODEL",
                help="Remove this model of a family. Models that are stored against it are written again. May be given "
                "again.",
            ),
            group="Retention",
        ),
    )


def chain_state(command: F) -> F:
    """`CHAIN`, `--step` and the options of readers; the command gets the state as one `ChainState`."""

    @wraps(command)
    def wrapper(
        *args: Any, chain: str, step: int | None, other: str | None, options: "ReadOptions", **arguments: Any
    ) -> Any:
        from ckpt_cli.reading import PEERS, open_chain_state

        if other is not None and not chain.startswith(PEERS):
            raise click.UsageError("--from is for a run in the memory of peers: peers://HOST:PORT,HOST:PORT/RUN.")
        return command(*args, state=open_chain_state(chain, step, options, other), **arguments)

    option = click.option("--step", type=numbers(Count), help="Which state.  [default: the last]")
    other = click.option(
        "--from",
        "other",
        type=CheckpointPath(),
        metavar="PATH|URL",
        help="If CHAIN is peers://HOSTS: another copy of the chain, for pieces that no peer has undamaged.",
    )
    return cast(F, click.argument("chain", type=CheckpointPath())(option(other(read_options(wrapper)))))


def bases(command: F) -> F:
    """`--base-every` and `--base`; they go into the command's `DeltaPolicy`."""

    @wraps(command)
    def wrapper(*args: Any, policy: Any, base_every: int | str | None, base: str, **arguments: Any) -> Any:
        from dataclasses import replace

        if policy.base == "coded" and (base_every is not None or base != "exact"):
            raise click.UsageError("--preset standalone stores each state alone: --base and --base-every do not apply.")
        if policy.base == "exact":
            number = None if base_every == "auto" else base_every
            policy = replace(policy, base_every=number, base_by_cost=base_every == "auto", base=base)
        return command(*args, policy=policy, **arguments)

    every = click.option(
        "--base-every",
        type=BaseEveryType(),
        metavar="N|auto",
        help="Store each Nth state as a base; auto: where replaying the deltas since the last base would take longer "
        "than 4 times writing a state, as estimated from bytes.",
    )
    option = click.option(
        "--base",
        type=click.Choice(["exact", "coded"]),
        default="exact",
        show_default=True,
        help="Store bases without loss (exact), or with the codec of the deltas (coded).",
    )
    return cast(F, with_options(wrapper, every, option, group="Bases"))
