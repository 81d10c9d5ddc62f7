"""The options of `diff` that write a delta, which it gets as one `DeltaOptions`."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import wraps
from math import isfinite
from typing import Any, TypeVar, cast

import click

F = TypeVar("F", bound=Callable[..., Any])

STANDALONE = "standalone"
"""The preset that has no parent."""
_REPORT = ("only", "skip", "states", "tensors_only", "sort", "by", "top", "html")
"""What `diff` is told of its report."""


@dataclass(frozen=True)
class DeltaOptions:
    """What the user says of the delta to write."""

    output: str | None = None
    into: str | None = None
    codec: str = "auto"
    preset: str | None = None
    max_abs_err: float | None = None
    rel_error: float | None = None
    max_loss_increase: float | None = None
    eval_cmd: str | None = None
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
        own = {field: others.pop(field) for field in DeltaOptions.__dataclass_fields__}
        return command(*args, writing=DeltaOptions(**own), **others)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return cast(F, gathered)


def check_together(writing: DeltaOptions, context: click.Context) -> None:
    """Raises `UsageError` for options that do not go together, so that none is passed over in silence."""
    given = {name for name in context.params if _is_given(context, name)}
    option = {parameter.name: parameter.opts[-1] for parameter in context.command.params}

    def first(names: Iterable[str]) -> str | None:
        return next((option[name] for name in names if name in given), None)

    if not writing.asked:
        own = first(field.name for field in fields(DeltaOptions))
        _refuse(own is not None, f"{own} is of deltas: it goes with -o or --into.")
        return
    report = first(_REPORT)
    _refuse(report is not None, f"{report} is of the report: it goes with neither -o nor --into.")
    _refuse(
        None not in (writing.into, writing.output), "-o writes one delta, --into appends to a chain: give one of them."
    )
    alone = "--preset standalone" if writing.preset == STANDALONE else None
    anchored = first(("anchor", "anchor_every"))
    chained = anchored or alone
    _refuse(writing.output is not None and chained is not None, f"{chained} is of chains: it goes with --into.")
    _refuse(None not in (alone, anchored), f"{alone} stores each state alone: {anchored} does not go with it.")
    _refuse(writing.preset is not None and "codec" in given, "--preset is a codec with its options: leave out --codec.")
    asked, told = writing.max_loss_increase, writing.eval_cmd
    _refuse((asked is None) != (told is None), "--max-loss-increase and --eval-cmd need each other.")
    bounds = {"max_loss_increase": asked, "max_abs_err": writing.max_abs_err, "rel_error": writing.rel_error}
    endless = next((option[name] for name, bound in bounds.items() if not isfinite(bound or 0)), None)
    _refuse(endless is not None, f"{endless} is a number such as 0.01.")
    _refuse(
        None not in (asked, writing.max_abs_err),
        "--max-loss-increase looks for the step that --max-abs-err says: give one of them.",
    )
    if told is not None:
        try:
            words = shlex.split(told)
        except ValueError as error:
            raise click.UsageError(f"--eval-cmd is no command: {error}.") from None
        _refuse(not any("{}" in word for word in words), "--eval-cmd needs {} where the path of the state is to stand.")


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _refuse(wrong: bool, said: str) -> None:
    if wrong:
        raise click.UsageError(said)


_BOUND = click.FloatRange(min=0, min_open=True)
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
        "--preset",
        type=click.Choice(["resume", "balanced", "archive", STANDALONE]),
        help="Lose something: the less, the sooner training goes on from it. standalone: each state without a parent.",
    ),
    click.option("--max-abs-err", type=_BOUND, metavar="X", help="Lose something: no weight is off by more than X."),
    click.option(
        "--rel-error",
        type=_BOUND,
        metavar="X",
        help="Lose something: the error of weights has at most X times the norm of their change.",
    ),
    click.option(
        "--max-loss-increase",
        type=click.FloatRange(min=0),
        metavar="X",
        help="Lose as much as --eval-cmd accepts: a loss that is higher by at most X.",
    ),
    click.option(
        "--eval-cmd",
        metavar="CMD",
        help="Evaluates the universal checkpoint whose path stands for {}; the last line it prints is the loss.",
    ),
    click.option(
        "--exact", multiple=True, metavar="PATTERN", help="Parameters in which a lossy codec may lose nothing."
    ),
    click.option("--step", type=click.IntRange(0, 1 << 62), help="The step, if not the one that the checkpoint says."),
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
    click.option(
        "--dry-run", is_flag=True, help="Check everything, estimate from some chunks what it takes, write nothing."
    ),
]
