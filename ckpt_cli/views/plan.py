"""The plan of a run: figures of the user and of a chain, one plan, and its text or JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.planning.costs import DataRates, LogCosts, RunCosts
from ckpt.planning.schedule import FailurePlan, Schedule, plan_schedule
from ckpt.planning.search import max_steps
from ckpt.planning.waste import waste, waste_logged
from ckpt_cli import notes
from ckpt_cli.options.plan import PlanOptions
from ckpt_cli.progress import doing
from ckpt_cli.views.report import data
from ckpt_formats.core.notices import Weight
from ckpt_formats.core.text import format_nbytes, format_share

if TYPE_CHECKING:
    from ckpt.chains.recorded_costs import RecordedCosts
    from ckpt.planning.peers import PeerHosts, PeerPlan
    from ckpt.planning.simulate import Simulation

_MEASURED_SECONDS = 2.0
_POINTS = 160
_SPAN = 30.0
"""The curves reach from the shortest interval of the plan by this to the longest times this."""


@dataclass(frozen=True)
class PlanReport:
    """All that the command shows."""

    plan: FailurePlan
    recorded: "RecordedCosts | None"
    simulations: "dict[str, Simulation]"
    """By name of the schedule: `bases`, `logged`."""
    failures: dict[str, Any]
    """Where the simulated failures come from."""
    peers: "PeersReport | None" = None


@dataclass(frozen=True)
class PeersReport:
    """What states in the memory of peers cost."""

    hosts: "PeerHosts"
    plans: "tuple[PeerPlan, ...]"
    recommended: "PeerPlan | None"


def show_plan(chain: str | None, options: PlanOptions, as_json: bool) -> None:
    """Compute the plan, and show it as text, JSON, or a page."""
    from ckpt_cli.views import page

    if options.html:
        page.check_place(Path(options.html), "plan")
    report = _report(chain, options)
    if options.html:
        page.write(page_of(report, to_json(report)), Path(options.html), "plan")
    if as_json:
        data(to_json(report))
        return
    notes.flush()
    for line in lines(report):
        click.echo(line)


def page_of(report: PlanReport, fields: dict[str, Any]) -> str:
    """The page that `--html` writes: the waste as a curve over the interval between bases.

    It has ASCII characters only. `fields`: those of `--json`. Equal plans give equal pages.
    """
    from ckpt_cli.views.page import page

    return page("plan", ("charts", "plan"), {**fields, "curves": curves(report.plan)})


def curves(plan: FailurePlan) -> dict[str, list[tuple[int, float]]]:
    """For bases only, and with a log that is flushed at the best interval: steps between bases, and the waste."""
    schedules = [plan.bases, *([] if plan.logged is None else [plan.logged])]
    first = max(1.0, min(one.base_steps for one in schedules) / _SPAN)
    last = max(first + 1, min(max(one.base_steps for one in schedules) * _SPAN, max_steps(plan.run)))
    steps = sorted({round(first * (last / first) ** (i / (_POINTS - 1))) for i in range(_POINTS)})
    result = {"bases": [(k, waste(plan.run, k)) for k in steps]}
    if plan.log is not None and plan.logged is not None and plan.logged.flush_steps is not None:
        flush = plan.logged.flush_steps
        result["logged"] = [(k, waste_logged(plan.run, plan.log, k, flush)) for k in steps]
    return result


def _report(chain: str | None, options: PlanOptions) -> PlanReport:
    gaps = _gaps(options)
    if options.step is None:
        reason = "the log does not state times" if chain is not None else "no plan without it"
        raise click.UsageError(f"--step is missing: how long a step takes ({reason}).")
    recorded = _recorded(chain, options)
    rates = _rates(options, recorded)
    mtbf = options.mtbf if gaps is None else sum(gaps) / len(gaps)
    assert mtbf is not None
    plan = plan_schedule(_run_costs(options, rates, mtbf), _log_costs(chain, options, rates), rates)
    if recorded is not None and "approximate" in recorded.exactness:
        notes.note("replayed steps of this run are approximate (`ckpt log`)", weight=Weight.UNSURE)
    simulations, failures = _simulated(plan, options, gaps)
    return PlanReport(plan, recorded, simulations, failures, _peers(plan, options))


def _gaps(options: PlanOptions) -> list[float] | None:
    """The seconds between the failures of the trace; None without a trace."""
    if (options.mtbf is None) == (options.trace is None):
        raise click.UsageError("State either --mtbf or --trace: how often the job fails.")
    if options.trace is None:
        if options.trace_column is not None:
            raise click.UsageError("--trace-column needs --trace.")
        return None
    if options.weibull is not None:
        raise click.UsageError("--weibull draws failures; --trace has its own.")
    from ckpt.planning.trace import read_gaps

    return read_gaps(Path(options.trace), options.trace_column)


def _recorded(chain: str | None, options: PlanOptions) -> "RecordedCosts | None":
    if chain is None:
        if options.measure_replay:
            raise click.UsageError("--measure-replay needs CHAIN, whose steps it replays.")
        return None
    from ckpt.chains.recorded_costs import recorded_costs

    with doing("replaying steps of the log" if options.measure_replay else "reading the log"):
        return recorded_costs(Path(chain), _MEASURED_SECONDS if options.measure_replay else 0.0)


def _rates(options: PlanOptions, recorded: "RecordedCosts | None") -> DataRates:
    """What the user states, and else what the chain states."""
    base, step, parameters = options.state, options.gradients, options.parameters
    replay_rate = options.replay_rate
    step_nbytes = None if step is None else float(step)
    if recorded is not None:
        base = recorded.base_nbytes if base is None else base
        step_nbytes = recorded.step_nbytes if step_nbytes is None else step_nbytes
        parameters = float(recorded.parameters) if parameters is None else parameters
        replay_rate = recorded.replay_rate if replay_rate is None else replay_rate
    return DataRates(base, step_nbytes, options.write, options.read, parameters, replay_rate, options.cores)


def _run_costs(options: PlanOptions, rates: DataRates, mtbf: float) -> RunCosts:
    writing = None
    if rates.base_nbytes is not None and rates.write_rate is not None:
        writing = rates.base_nbytes / rates.write_rate
    stall = options.stall
    if stall is None:
        if writing is None:
            raise click.UsageError(
                "--stall is missing: how long training stops for a base (or --state and --write: it stops while a "
                "base is written)."
            )
        notes.note(f"--stall is not stated: training stops while a base is written, for {format_seconds(writing)}")
        stall = writing
    if options.restart is None:
        notes.note("--restart is not stated: a restart takes no time", weight=Weight.UNSURE)
    delay = options.base_delay
    if delay is None:
        delay = 0.0 if writing is None else max(0.0, writing - stall)
    assert options.step is not None
    return RunCosts(options.step, mtbf, stall, options.restart or 0.0, delay)


def _log_costs(chain: str | None, options: PlanOptions, rates: DataRates) -> LogCosts | None:
    replay = rates.replay if options.replay is None else options.replay
    if replay is None:
        ways = "--replay, --read, or --replay-rate"
        if chain is not None:
            raise click.UsageError(f"The log does not state how fast it replays: give {ways}, or --measure-replay.")
        notes.note(f"without {ways} (with --gradients or --parameters), a log of gradients is not planned")
        return None
    if options.replay is None and None in rates.replay_parts:
        known, other = ("reading", "--replay-rate") if rates.replay_parts[1] is None else ("computing", "--read")
        notes.note(f"replay takes as long as {known} a step; {other} is not stated", weight=Weight.UNSURE)
    return LogCosts(replay, options.slowdown, options.flush_stall)


def _peers(plan: FailurePlan, options: PlanOptions) -> PeersReport | None:
    if options.hosts is None:
        stated = (options.scheme, options.lose, options.rack, options.network, options.host_memory)
        if any(one is not None and one != () for one in stated):
            raise click.UsageError("--hosts is missing: how many hosts lend each other memory.")
        return None
    if plan.rates.base_nbytes is None:
        raise click.UsageError("--state is missing: how large the state is that hosts keep in memory.")
    from ckpt.planning.peers import SCHEMES, PeerHosts, plan_peers, recommended

    hosts = PeerHosts(options.hosts, plan.rates.base_nbytes, options.network, options.host_memory, options.rack or 1)
    stall = options.stall
    if stall is None:
        stall = 0.0 if hosts.network_rate is None else hosts.piece_nbytes / hosts.network_rate
        text = f"--stall is not stated: for a state in peers' memory, training stops for {format_seconds(stall)}"
        notes.note(text, weight=Weight.UNSURE)
    if hosts.network_rate is None:
        notes.note("--network is not stated: states reach peers at once", weight=Weight.UNSURE)
    run = replace(plan.run, base_stall=stall, base_delay=0.0)
    plans = plan_peers(hosts, run, options.scheme or SCHEMES, options.lose or 1)
    best = recommended(plans)
    if best is None:
        few = not any(one.covers for one in plans)
        advice = "smaller --rack or --lose, or more hosts" if few else "more --host-memory, or a scheme with less"
        notes.note(f"no scheme of these covers what fails together within the memory of a host: {advice}")
    return PeersReport(hosts, plans, best)


def _simulated(
    plan: FailurePlan, options: PlanOptions, gaps: list[float] | None
) -> "tuple[dict[str, Simulation], dict[str, Any]]":
    if options.simulate is None:
        if options.weibull is not None:
            raise click.UsageError("--weibull needs --simulate: the formulas are for failures without clusters.")
        return {}, {}
    from ckpt.planning.simulate import exponential, repeated, simulate, weibull

    count, seed = options.simulate, options.seed
    if gaps is not None:
        drawn, source = repeated(gaps, count), {"source": "trace", "gaps": len(gaps)}
    elif options.weibull is not None:
        drawn = weibull(plan.run.mtbf, options.weibull, count, seed)
        source = {"source": "weibull", "shape": options.weibull, "seed": seed}
    else:
        drawn, source = exponential(plan.run.mtbf, count, seed), {"source": "exponential", "seed": seed}
    times = drawn.tolist()
    results = {"bases": simulate(plan.run, None, plan.bases.base_steps, None, times)}
    if plan.log is not None and plan.logged is not None:
        one = plan.logged
        results["logged"] = simulate(plan.run, plan.log, one.base_steps, one.flush_steps, times)
    return results, source


def to_json(report: PlanReport) -> dict[str, Any]:
    """The plan as plain data: seconds, bytes, steps, shares."""
    plan = report.plan
    reading, applying = plan.rates.replay_parts
    return {
        "best": "logged" if plan.log_pays else "bases",
        "log_pays": plan.log_pays,
        "bases": _schedule_json(plan, plan.bases),
        "logged": None if plan.logged is None else _schedule_json(plan, plan.logged),
        "young": _schedule_json(plan, plan.young),
        "daly": _schedule_json(plan, plan.daly),
        "min_base_steps": plan.min_base_steps,
        "min_logged_steps": plan.min_logged_steps,
        "replay_cores": plan.replay_cores,
        "replay_reading_seconds": reading,
        "replay_applying_seconds": applying,
        "run": asdict(plan.run),
        "log": None if plan.log is None else asdict(plan.log),
        "rates": asdict(plan.rates),
        "recorded": None if report.recorded is None else asdict(report.recorded),
        "simulated": {name: asdict(one) for name, one in report.simulations.items()},
        "failures": report.failures,
        "peers": None if report.peers is None else _peers_json(plan, report.peers),
    }


def _peers_json(plan: FailurePlan, peers: PeersReport) -> dict[str, Any]:
    return {
        "hosts": asdict(peers.hosts),
        "schemes": [
            {**asdict(one), "schedule": None if one.schedule is None else _schedule_json(plan, one.schedule)}
            for one in peers.plans
        ],
        "recommended": None if peers.recommended is None else peers.recommended.scheme,
    }


def _schedule_json(plan: FailurePlan, schedule: Schedule) -> dict[str, Any]:
    return {
        **asdict(schedule),
        "base_seconds": schedule.base_steps * plan.run.step,
        "flush_seconds": None if schedule.flush_steps is None else schedule.flush_steps * plan.run.step,
        "gain": plan.gain(schedule),
    }


def lines(report: PlanReport) -> Iterator[str]:
    """The plan as lines of text."""
    plan = report.plan
    if report.recorded is not None:
        one = report.recorded
        yield (
            f"recorded    {one.folder}: {one.steps} steps of {one.parameters:,} parameters, "
            f"{format_nbytes(one.step_nbytes)} a step; a base takes {format_nbytes(one.base_nbytes)}"
        )
        if one.replay_rate is not None:
            yield f"replay      {one.replay_rate / 1e6:,.0f} million parameters a second on one core, measured here"
    yield f"bases only  {_shown(plan, plan.bases)}"
    if plan.logged is not None:
        yield f"with a log  {_shown(plan, plan.logged)}"
        if plan.log_pays:
            yield f"            the log pays: the run takes {format_share(plan.gain(plan.bases), 1)} less time"
        else:
            yield "            the log does not pay: bases only waste less"
    for name, other in (("Young", plan.young), ("Daly", plan.daly)):
        yield f"{name:<11} {_shown(plan, other)}; the plan takes {format_share(plan.gain(other), 1)} less time"
    yield from _limits(plan)
    for name, simulation in report.simulations.items():
        label = "bases only" if name == "bases" else "with a log"
        shares = (simulation.waste, simulation.standard_error, simulation.low, simulation.high)
        waste, error, low, high = (format_share(share, 1) for share in shares)
        yield (
            f"simulated   {label}: {simulation.failures:,} failures waste {waste} (standard error {error}); "
            f"90 of 100 runs with {simulation.batch} failures waste {low} to {high}"
        )
        yield (
            f"            a failure repeats {format_seconds(simulation.redone)} of work, and "
            f"{format_seconds(simulation.recovery)} pass until the next new step"
        )
    if report.peers is not None:
        yield from _peers_lines(plan, report.peers)


def _peers_lines(plan: FailurePlan, peers: PeersReport) -> Iterator[str]:
    from ckpt.planning.peers import RANDOM_HOSTS
    from ckpt_cli.views.columns import table

    hosts = peers.hosts
    yield (
        f"peers       {hosts.hosts:,} hosts, each with {format_nbytes(hosts.piece_nbytes)} of the state; "
        "memory has two states"
    )
    at_random = RANDOM_HOSTS.index(4)
    head = ("scheme", "memory a host", "sent a save", "takes", "may lose", "neighbours", "4 at random", "waste", "")
    rows = [
        (
            one.scheme,
            format_nbytes(one.memory_nbytes),
            format_nbytes(one.sent_nbytes),
            "-" if one.send_seconds is None else format_seconds(one.send_seconds),
            f"any {one.losses}",
            f"{one.neighbours}",
            format_share(one.uncovered[at_random], 1),
            "-" if one.schedule is None else format_share(one.schedule.waste, 1),
            _why_not(one),
        )
        for one in peers.plans
    ]
    yield table(head, rows, right=range(1, 8), indent=12)
    if peers.recommended is not None:
        one = peers.recommended
        shown = "" if one.schedule is None else f": {_shown(plan, replace(one.schedule, day_nbytes=None))}"
        yield f"recommended {one.scheme}, jump={one.jump}{shown.replace('a base', 'a state')}"


def _why_not(one: "PeerPlan") -> str:
    if not one.covers:
        return "loses too few hosts"
    return "" if one.fits else "too much memory"


def _limits(plan: FailurePlan) -> Iterator[str]:
    reading, applying = plan.rates.replay_parts
    if plan.log is not None and plan.log.replay:
        limit = ""
        if reading is not None and applying is not None:
            limit = ", limited by the reading of its bytes" if reading > applying else ", limited by the cores"
        yield f"replay      a step takes {format_seconds(plan.log.replay)}{limit}"
    if plan.replay_cores is not None:
        cores = "1 core replays" if plan.replay_cores == 1 else f"{plan.replay_cores:,} cores replay"
        yield f"shadow      {cores} as fast as the run trains"
    for label, steps, schedule in (
        ("bases only", plan.min_base_steps, plan.bases),
        ("with a log", plan.min_logged_steps, plan.logged),
    ):
        if steps > 1 and schedule is not None and schedule.base_steps == steps:
            yield f"write rate  {label}: a base takes {steps:,} steps to write, so the interval is not shorter"


def _shown(plan: FailurePlan, schedule: Schedule) -> str:
    parts = [f"a base every {_steps(plan, schedule.base_steps)}"]
    if schedule.flush_steps is not None:
        parts.append(f"a flush every {_steps(plan, schedule.flush_steps)}")
    volume = "" if schedule.day_nbytes is None else f", {format_nbytes(schedule.day_nbytes)} a day"
    return f"{', '.join(parts)}: wastes {format_share(schedule.waste, 1)}{volume}"


def _steps(plan: FailurePlan, steps: int) -> str:
    return f"{steps:,} step{'s' * (steps > 1)} ({format_seconds(steps * plan.run.step)})"


def format_seconds(seconds: float) -> str:
    """A duration for people.

    >>> format_seconds(5025), format_seconds(0.04), format_seconds(61.2)
    ('1 h 24 min', '40 ms', '1 min 1 s')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds else "0 s"
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    for unit, size, smaller, divisor in (("min", 60, "s", 1), ("h", 3600, "min", 60), ("d", 86_400, "h", 3600)):
        if seconds < 24 * 3600 * (unit == "h") or seconds < 3600 * (unit == "min") or unit == "d":
            major, rest = divmod(round(seconds / divisor), size // divisor)
            return f"{major:,} {unit} {rest} {smaller}" if rest else f"{major:,} {unit}"
    raise AssertionError
