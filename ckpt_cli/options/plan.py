"""Options of `plan`: what a run costs, and which failures it has."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.groups import take_options, with_options
from ckpt_cli.options.types import CountType, DurationType, FileToRead, RateType, ShareType, SizeType, numbers
from ckpt_formats.core.arguments import Ranks

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class PlanOptions:
    """What the user states of a run; None is not stated. Seconds, bytes, and bytes or parameters a second."""

    step: float | None
    mtbf: float | None
    trace: str | None
    trace_column: str | None
    stall: float | None
    restart: float | None
    base_delay: float | None
    replay: float | None
    measure_replay: bool
    slowdown: float
    flush_stall: float
    state: int | None
    gradients: int | None
    write: float | None
    read: float | None
    parameters: float | None
    replay_rate: float | None
    cores: int
    simulate: int | None
    weibull: float | None
    seed: int
    hosts: int | None
    scheme: tuple[str, ...]
    lose: int | None
    rack: int | None
    network: float | None
    host_memory: int | None
    html: str | None


def plan_options(command: F) -> F:
    """The options of a plan; the command gets them as one `PlanOptions`."""

    @wraps(command)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        return command(*args, options=take_options(PlanOptions, arguments), **arguments)

    time, rate, count, size = DurationType(), RateType(), CountType(), SizeType()
    peers = with_options(
        wrapper,
        click.option("--hosts", type=numbers(Ranks), help="Hosts that lend each other memory for states."),
        click.option(
            "--scheme",
            multiple=True,
            metavar="SCHEME",
            help="copies:N or parity:K+M. May be repeated.  [default: eight usual ones]",
        ),
        click.option("--lose", type=numbers(Ranks), metavar="M", help="Any M hosts may be lost at once.  [default: 1]"),
        click.option(
            "--rack",
            type=numbers(Ranks),
            metavar="N",
            help="N hosts in a row are a rack: they fail together.  [default: 1]",
        ),
        click.option("--network", type=rate, help="Rate of a host beside training, such as 10GiB/s."),
        click.option("--host-memory", type=size, help="Memory that a host has for states, such as 200GiB."),
        group="Memory of peers",
    )
    failures = with_options(
        peers,
        click.option(
            "--trace",
            type=FileToRead(),
            metavar="FILE",
            help="Times of failures, one a line: seconds or ISO times. Replaces --mtbf.",
        ),
        click.option("--trace-column", metavar="NAME", help="FILE is CSV with a header; this column has the times."),
        click.option(
            "--simulate",
            type=click.IntRange(2, 1_000_000),
            is_flag=False,
            flag_value=20_000,
            metavar="[N]",
            help="Also simulate N failures, and show the spread.  [N: 20000]",
        ),
        click.option(
            "--weibull",
            type=float,
            metavar="SHAPE",
            help="Weibull shape of the simulated failures. Below 1, they come in clusters.",
        ),
        click.option(
            "--seed", type=click.IntRange(0, 1 << 62), default=0, show_default=True, help="Seed of the simulation."
        ),
        group="Failures",
    )
    data = with_options(
        failures,
        click.option("--state", type=size, help="Stored size of a base, such as 84GiB.  [default: from CHAIN]"),
        click.option("--gradients", type=size, help="Logged size of a step, of all ranks.  [default: from CHAIN]"),
        click.option("--parameters", type=count, help="Number of parameters, such as 7B.  [default: from CHAIN]"),
        click.option("--write", type=rate, help="Write rate of all ranks together, such as 2GiB/s."),
        group="Data",
    )
    log = with_options(
        data,
        click.option(
            "--replay", type=time, help="Time to replay a logged step. Or give the options from which it follows:"
        ),
        click.option("--read", type=rate, help="Read rate of the log, such as 2GiB/s."),
        click.option("--replay-rate", type=count, help="Parameters a second that one core replays, such as 250M."),
        click.option("--measure-replay", is_flag=True, help="Measure that rate here, on steps of CHAIN."),
        click.option(
            "--cores", type=click.IntRange(1, 1 << 20), default=1, show_default=True, help="Cores that replay."
        ),
        click.option(
            "--slowdown",
            type=ShareType(),
            default="1%",
            show_default=True,
            help="By how much recording slows a step.",
        ),
        click.option(
            "--flush-stall", type=time, default="0s", show_default=True, help="Time that training stops for a flush."
        ),
        group="Log of gradients",
    )
    run = with_options(
        log,
        click.option("--step", type=time, help="Time of a step, without checkpoints and without a log."),
        click.option("--mtbf", type=time, help="Mean time between failures of the whole job, such as 3h."),
        click.option("--stall", type=time, help="Time that training stops for a base.  [default: --state by --write]"),
        click.option(
            "--restart", type=time, help="Time from a failure to the first new step, without replay.  [default: 0s]"
        ),
        click.option(
            "--base-delay",
            type=time,
            help="Time after the stall until a base can be restored.  [default: --state by --write, less --stall]",
        ),
        group="Run",
    )
    return cast(F, run)
