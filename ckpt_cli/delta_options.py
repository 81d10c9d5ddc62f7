"""The options of `diff` that write a delta, which it gets as one `Writing`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import click

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Writing:
    """What the user says of the delta to write."""

    output: str | None = None
    into: str | None = None
    codec: str = "auto"
    exact: tuple[str, ...] = ()
    step: int | None = None
    anchor_every: int | None = None
    anchor: str = "exact"
    no_check: bool = False
    dry_run: bool = False

    @property
    def asked(self) -> bool:
        return self.output is not None or self.into is not None


def writing(command: F) -> F:
    """`-o`, `--into` and what goes with them."""

    @wraps(command)
    def gathered(*args: Any, **others: Any) -> Any:
        own = {field: others.pop(field) for field in Writing.__dataclass_fields__}
        return command(*args, writing=Writing(**own), **others)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return cast(F, gathered)


_OPTIONS = [
    click.option("-o", "--output", type=click.Path(), metavar="DELTA", help="Write SECOND as a delta against FIRST."),
    click.option("--into", type=click.Path(), metavar="CHAIN", help="Append FIRST to a chain, or begin one with it."),
    click.option(
        "--codec",
        default="auto",
        show_default=True,
        metavar="NAME[:OPTION=VALUE,...]",
        help="Codec of deltas; auto is the best that loses nothing.",
    ),
    click.option(
        "--exact", multiple=True, metavar="PATTERN", help="Parameters in which a lossy codec may lose nothing."
    ),
    click.option("--step", type=click.IntRange(0, 1 << 62), help="The step, where the checkpoint does not say it."),
    click.option(
        "--anchor-every", type=click.IntRange(1), metavar="N", help="Store each Nth state of the chain whole."
    ),
    click.option(
        "--anchor",
        type=click.Choice(["exact", "coded"]),
        default="exact",
        show_default=True,
        help="Store whole states without loss, or with the codec of the deltas.",
    ),
    click.option("--no-check", is_flag=True, help="Do not decode again, and compare, what was encoded."),
    click.option("--dry-run", is_flag=True, help="Check everything, say what would be written, write nothing."),
]
