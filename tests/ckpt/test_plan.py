"""How often to checkpoint: the formulas against integrals and simulated failures, the search against all intervals."""

import itertools
import math
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ckpt.planning.costs import DataRates, LogCosts, RunCosts
from ckpt.planning.schedule import plan_schedule
from ckpt.planning.search import best_bases, best_logged, lowest_at
from ckpt.planning.simulate import exponential, repeated, simulate, weibull
from ckpt.planning.trace import read_gaps
from ckpt.planning.waste import (
    daly_seconds,
    expected_seconds,
    expected_seconds_logged,
    first_order_logged,
    waste,
    waste_logged,
    young_seconds,
)
from ckpt_formats.core.errors import CorruptError, InvalidArgumentError, NotFoundError, UnsafeError, UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
RUN = RunCosts(step=1.0, mtbf=10_800, base_stall=20, restart=120)
LOG = LogCosts(replay=0.05, slowdown=0.02, flush_stall=0.05)
RUNS = [
    (RUN, LOG),
    (replace(RUN, mtbf=600, restart=60), LOG),
    (replace(RUN, mtbf=600, restart=0, base_stall=0.5), replace(LOG, replay=0.9, flush_stall=2.0)),
    (replace(RUN, step=7.5, mtbf=1800), replace(LOG, replay=0.0)),
    (replace(RUN, mtbf=43_200, restart=900), replace(LOG, flush_stall=0.0)),
]
NODES = np.polynomial.legendre.leggauss(60)


def integral(length: float, recovery: float, mtbf: float) -> float:
    """The expected seconds of work of a length that failures repeat, by the definition: failures at density 1/M."""
    nodes, weights = NODES
    times = (nodes + 1) * length / 2
    density = weights * length / 2 * np.exp(-times / mtbf) / mtbf
    failing = float(density.sum())
    return (float((density * (times + recovery)).sum()) + length * (1 - failing)) / (1 - failing)


def restarting(recovery: float, mtbf: float) -> float:
    """The expected seconds of a recovery that failures repeat."""
    return integral(recovery, 0.0, mtbf)


@pytest.mark.parametrize(("run", "log"), RUNS)
def test_the_formulas_are_the_integrals_over_all_failures(run: RunCosts, log: LogCosts) -> None:
    for steps in (1, 7, 300):
        recovery = restarting(run.restart, run.mtbf)
        expected = integral(steps * run.step + run.base_stall, recovery, run.mtbf)
        assert expected_seconds(run, steps) == pytest.approx(expected, rel=1e-9)
        for flush in (1, 5, steps, 400):
            assert expected_seconds_logged(run, log, steps, flush) == pytest.approx(
                intervals(run, log, steps, flush), rel=1e-9
            )


def intervals(run: RunCosts, log: LogCosts, steps: int, flush: int) -> float:
    """The expected seconds with a log: the intervals between durable points, one after another."""
    total, step = 0.0, run.step * (1 + log.slowdown)
    for first in range(0, steps, flush):
        last = min(first + flush, steps)
        stall = run.base_stall if last == steps else log.flush_stall
        recovery = restarting(run.restart + log.replay * first, run.mtbf)
        total += integral((last - first) * step + stall, recovery, run.mtbf)
    return total


def test_plan_without_restarts_is_the_first_order_formula() -> None:
    """(M + R) (exp((k t + C)/M) - 1): R is small against M there."""
    run = replace(RUN, restart=1.0)
    simple = (run.mtbf + run.restart) * math.expm1((300 + run.base_stall) / run.mtbf)
    assert expected_seconds(run, 300) == pytest.approx(simple, rel=1e-7)


@pytest.mark.parametrize(("run", "log"), RUNS)
def test_the_search_finds_the_best_of_all_intervals(run: RunCosts, log: LogCosts) -> None:
    steps = best_bases(run)
    assert waste(run, steps) == min(waste(run, k) for k in range(1, 4 * steps + 50))
    base, flush = best_logged(run, log)
    flushes = range(max(1, flush // 3), 3 * flush + 5)
    around = {max(1, round(base * x)) for x in np.geomspace(0.3, 3, 200)} | set(range(max(1, base - 40), base + 40))
    best = min(waste_logged(run, log, k, b) for b in flushes for k in around)
    assert waste_logged(run, log, base, flush) <= best * (1 + 2e-3)


def test_the_search_for_the_lowest_value_finds_it_wherever_it_is() -> None:
    for last in (1, 2, 3, 7, 50):
        for at in range(1, last + 1):
            assert lowest_at(lambda n, at=at: abs(n - at), 1, last) == at  # type: ignore[misc]
    assert lowest_at(lambda n: 1.0 if n > 100 else abs(n - 30) / 100, 1, 10**15) == 30


def test_first_order_intervals_are_near_the_best_where_failures_are_rare() -> None:
    run = replace(RUN, mtbf=1e6)
    assert best_bases(run) == pytest.approx(young_seconds(run), rel=0.01)
    bases, flush = first_order_logged(run, LOG)
    assert best_logged(run, LOG) == (pytest.approx(bases, rel=0.05), pytest.approx(flush, rel=0.05))


def test_young_and_daly_are_as_published() -> None:
    """Daly 2006, equation 37: for C = 5 min and M = 6 h, computed by hand."""
    run = RunCosts(step=1, mtbf=360, base_stall=5)
    assert young_seconds(run) == 60
    ratio = math.sqrt(5 / 720)
    assert daly_seconds(run) == pytest.approx(60 * (1 + ratio / 3 + ratio**2 / 9) - 5)
    assert daly_seconds(replace(run, base_stall=720)) == run.mtbf
    plan = plan_schedule(replace(RUN, mtbf=600, restart=60))
    assert plan.bases.waste <= plan.daly.waste <= plan.young.waste
    assert plan.daly.waste - plan.bases.waste < 1e-4  # Daly's estimate is that good here


def test_waste_grows_with_every_cost() -> None:
    plan = plan_schedule(RUN, LOG)
    assert plan.logged is not None
    for worse in (
        replace(RUN, mtbf=9000),
        replace(RUN, base_stall=25),
        replace(RUN, restart=200),
        replace(RUN, base_delay=60),
    ):
        other = plan_schedule(worse, LOG)
        assert other.logged is not None
        assert other.bases.waste > plan.bases.waste
        assert other.logged.waste > plan.logged.waste
    for slower in (replace(LOG, replay=0.1), replace(LOG, slowdown=0.03), replace(LOG, flush_stall=0.5)):
        other = plan_schedule(RUN, slower)
        assert other.logged is not None
        assert other.logged.waste > plan.logged.waste
        assert other.bases == plan.bases
    assert [plan_schedule(replace(RUN, mtbf=m)).bases.base_steps for m in (600, 3600, 86_400)] == sorted(
        plan_schedule(replace(RUN, mtbf=m)).bases.base_steps for m in (600, 3600, 86_400)
    )


def test_the_log_pays_only_where_its_waste_is_lower() -> None:
    """The cases of LowDiff's kind and their opposites: replay half as fast as training, and bases that hardly stall."""
    assert plan_schedule(RUN, LOG).log_pays
    slow = plan_schedule(RUN, replace(LOG, replay=0.5))
    assert not slow.log_pays
    assert slow.best is slow.bases
    assert not plan_schedule(replace(RUN, base_stall=0.5), LOG).log_pays
    assert not plan_schedule(RUN).log_pays


def test_the_gain_is_the_time_that_the_best_schedule_saves() -> None:
    plan = plan_schedule(RUN, LOG)
    assert plan.logged is not None
    bases, logged = (one.seconds / one.base_steps for one in (plan.bases, plan.logged))
    assert plan.gain(plan.bases) == pytest.approx(1 - logged / bases)
    assert plan.gain(plan.best) == 0


def test_a_base_is_written_before_the_next_begins() -> None:
    rates = DataRates(base_nbytes=84e9, step_nbytes=0.5e9, write_rate=1e9)
    run = replace(RUN, base_stall=0.01, base_delay=10)
    plan = plan_schedule(run, LOG, rates)
    assert plan.logged is not None
    assert plan.bases.base_steps >= plan.min_base_steps == 84
    assert plan.min_logged_steps == math.ceil((84e9 - 1e7) / (1e9 * 1.02 - 0.5e9))
    assert plan.logged.base_steps >= plan.min_logged_steps
    plan = plan_schedule(replace(RUN, base_stall=100), None, rates)
    assert plan.min_base_steps == 1  # the stall is long enough to write it
    assert plan_schedule(replace(RUN, base_stall=0.01, base_delay=300)).bases.base_steps >= 300


def test_bytes_a_day_are_those_of_a_cycle() -> None:
    rates = DataRates(base_nbytes=84e9, step_nbytes=1e8, write_rate=1e10)
    plan = plan_schedule(RUN, LOG, rates)
    assert plan.logged is not None
    cycle = 84e9 + plan.logged.base_steps * 1e8
    assert plan.logged.day_nbytes == pytest.approx(cycle * 86_400 / plan.logged.seconds)
    assert plan.bases.day_nbytes == pytest.approx(84e9 * 86_400 / plan.bases.seconds)
    assert plan_schedule(RUN, LOG).bases.day_nbytes is None


def test_replay_is_as_slow_as_the_slower_of_disk_and_cores() -> None:
    rates = DataRates(step_nbytes=1e9, read_rate=2e9, parameters=7e9, replay_rate=250e6, cores=16)
    assert rates.replay_parts == (0.5, 1.75)
    assert rates.replay == 1.75
    assert replace(rates, cores=64).replay == 0.5
    assert replace(rates, read_rate=None).replay == 1.75
    assert DataRates(parameters=7e9).replay is None
    plan = plan_schedule(RUN, LogCosts(1.75, slowdown=0.0), rates)
    assert plan.replay_cores == 28  # 7e9 / (1 s by 250e6), whatever `cores` is


@pytest.mark.parametrize("field", ["step", "mtbf", "base_stall", "restart", "base_delay"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, 1e13])
def test_figures_of_a_run_without_sense_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^RunCosts: {field} must be a number"):
        replace(RUN, **{field: value})


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_figures_of_a_log_without_sense_are_refused_by_name(value: float) -> None:
    for field in ("replay", "slowdown", "flush_stall"):
        with pytest.raises(InvalidArgumentError, match=rf"^LogCosts: {field} must be a number"):
            replace(LOG, **{field: value})
    for field in ("base_nbytes", "step_nbytes", "write_rate", "read_rate", "parameters", "replay_rate", "cores"):
        with pytest.raises(InvalidArgumentError, match=rf"^DataRates: {field} must be a number"):
            DataRates(**{field: value})


def test_plan_refuses_costs_that_cannot_work_with_a_hint() -> None:
    with pytest.raises(InvalidArgumentError, match="a restart takes 120 s, but a failure comes every 100 s") as refused:
        replace(RUN, mtbf=100)
    assert refused.value.where == "restart"
    with pytest.raises(UnsupportedError, match=r"a step adds 2e\+09 bytes to the log, but only 1\.02e\+09") as refused:
        plan_schedule(RUN, LOG, DataRates(step_nbytes=2e9, write_rate=1e9))
    assert (refused.value.where, "int8" in str(refused.value.hint)) == ("write_rate", True)
    with pytest.raises(UnsupportedError, match="no interval makes progress"):
        plan_schedule(RunCosts(step=10_000, mtbf=100, base_stall=1))
    with pytest.raises(UnsupportedError, match="no interval makes progress"):
        plan_schedule(RunCosts(step=1, mtbf=100, base_stall=1e9))
    for step in (0.0, math.nan):
        with pytest.raises(InvalidArgumentError):
            replace(RUN, step=step)


def test_extreme_figures_give_a_plan_or_an_error_of_ckpt() -> None:
    values = (1e-9, 1.0, 1e9, 1e12)
    for step, mtbf, stall, replay in itertools.product(values, values, (0.0, *values), (0.0, *values)):
        try:
            plan = plan_schedule(RunCosts(step, mtbf, stall), LogCosts(replay, 0.01, 0.0))
        except UnsupportedError:
            continue
        assert plan.logged is not None
        assert 0 <= plan.best.waste < 1 + 1e-12
        assert plan.best.base_steps >= 1


# Simulated failures


def stepwise(run: RunCosts, log: LogCosts | None, base_steps: int, flush_steps: int, gaps: list[float]) -> list[int]:
    """The steps that are done after each failure, by a loop over single steps."""
    done = base = 0
    written: list[tuple[float, int]] = []
    recovery, course = 0.0, []
    for gap in gaps:
        left, clock, durable = gap - recovery, 0.0, done
        written.clear()
        while left > 0:
            cost = run.step * (1 + (log.slowdown if log else 0.0))
            at = (done + 1) % base_steps
            if at == 0:
                cost += run.base_stall
            elif log and at % flush_steps == 0:
                cost += log.flush_stall
            if cost > left:
                break
            left, clock, done = left - cost, clock + cost, done + 1
            if at == 0:
                written.append((clock + run.base_delay, done))
            if log and (at == 0 or at % flush_steps == 0):
                durable = done
        if gap > recovery:
            base = max([base, *(step for moment, step in written if moment <= gap - recovery)])
            done = durable if log else base
            recovery = run.restart + (log.replay * (done - base) if log else 0.0)
        course.append(done)
    return course


@pytest.mark.parametrize("delay", [0.0, 11.3])
@pytest.mark.parametrize("log", [None, LogCosts(0.21, 0.013, 0.37), LogCosts(2.3, 0.0, 0.0)])
def test_the_simulation_is_that_of_single_steps(log: LogCosts | None, delay: float) -> None:
    run = RunCosts(1.07, 60, 3.1, 7.7, delay)
    for base_steps, flush_steps in ((23, 4), (20, 5), (13, 40), (31, 1)):
        gaps = exponential(100, 300, base_steps).tolist()
        course = stepwise(run, log, base_steps, flush_steps, gaps)
        result = simulate(run, log, base_steps, flush_steps, gaps)
        assert result.failures == 300
        assert result.waste == pytest.approx(1 - course[-1] * run.step / sum(gaps), abs=1e-12)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = spec_from_file_location("planning_failures", ROOT / "benchmarks" / "planning_failures.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "planning_failures", module)
        spec.loader.exec_module(module)
    return module


def test_plans_agree_with_20_000_failures(benchmark: ModuleType) -> None:
    """Six of the 36 runs of `benchmarks/planning_failures.py`."""
    rows = list(benchmark.rows(20_000, 1, [1, 4, 12, 15, 22, 28]))
    assert len(rows) == 6
    assert len(benchmark.grid()) >= 24
    for row in rows:
        assert max(map(abs, row.differences)) <= benchmark.GOAL, row
        assert max(row.errors) < 0.01


def test_the_best_interval_is_the_best_of_the_simulation() -> None:
    """The same failures for all intervals: those next to the plan's waste more."""
    run, gaps = replace(RUN, mtbf=1800), exponential(1800, 20_000, 3).tolist()
    plan = plan_schedule(run, LOG)
    assert plan.logged is not None
    base, flush = plan.logged.base_steps, plan.logged.flush_steps
    assert flush is not None
    best = simulate(run, LOG, base, flush, gaps).waste
    for others in ((base // 3, flush), (base * 3, flush), (base, flush // 4), (base, flush * 4)):
        assert simulate(run, LOG, *others, gaps).waste > best


def test_failures_are_the_same_for_the_same_seed_and_have_the_mean_that_is_stated() -> None:
    for draw in (exponential, lambda *a: weibull(a[0], 0.7, *a[1:])):
        first, again, other = draw(500.0, 20_000, 1), draw(500.0, 20_000, 1), draw(500.0, 20_000, 2)
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)
        assert first.mean() == pytest.approx(500, rel=0.03)
    assert weibull(500, 0.7, 20_000).std() > 1.3 * 500 > 1.2 * exponential(500, 20_000).std()


def test_the_spread_holds_nine_of_ten_runs() -> None:
    gaps = exponential(RUN.mtbf, 4000, 5).tolist()
    whole = simulate(RUN, LOG, 2904, 33, gaps)
    assert whole.low < whole.waste < whole.high
    starts = range(0, 4000, whole.batch)
    wastes = [simulate(RUN, LOG, 2904, 33, gaps[at : at + whole.batch]).waste for at in starts]
    assert 0.85 <= np.mean([whole.low <= one <= whole.high for one in wastes]) <= 0.95


def test_a_failure_can_come_while_the_run_restarts() -> None:
    """Two steps are done before the first failure; nothing is done in three gaps that are shorter than the restart."""
    run = RunCosts(step=1, mtbf=200, base_stall=0, restart=100)
    result = simulate(run, None, 1, None, [2.5, 10, 20, 30, 102.25])
    assert result.waste == pytest.approx(1 - 4 / 164.75)
    assert result.recovery == pytest.approx((10 + 20 + 30 + 100) / 5)
    assert result.redone == pytest.approx((0.5 + 0.25) / 5)


def test_numbers_of_failures_without_sense_are_refused() -> None:
    for failures in (0, 1, 10**9):
        with pytest.raises(InvalidArgumentError):
            exponential(100, failures)
    for shape in (0.0, -1.0, math.nan, 1e-3):
        with pytest.raises(InvalidArgumentError):
            weibull(100, shape, 10)
    with pytest.raises(InvalidArgumentError, match="too few"):
        simulate(RUN, None, 10, None, [5.0])
    assert repeated([1.0, 2.0, 3.0], 5).tolist() == [1, 2, 3, 1, 2]


# Traces


def trace(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_times_of_a_trace_are_seconds_or_dates_in_any_order(tmp_path: Path) -> None:
    assert read_gaps(trace(tmp_path, "# failures\n100\n\n 40.5 \n1e3\r\n")) == [59.5, 900]
    dates = "2026-11-23T09:00:00Z\n2026-11-23 10:30:00+01:00\n2026-11-23T10:00\n"
    assert read_gaps(trace(tmp_path, dates)) == [1800, 1800]
    table = 'node,"when, really"\na,10\nb,"30"\n\nc,20\n'
    assert read_gaps(trace(tmp_path, table), "when, really") == [10, 10]
    assert read_gaps(trace(tmp_path, "\ufeff10\n20\n30\n")) == [10, 10]


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("1\n2\nsoon\n", None, "line 3: `soon` is not a time"),
        ("1\n2\nnan\n", None, "line 3: nan is not a number of seconds"),
        ("1\n2\n1e300\n", None, "line 3: 1e300 is not"),
        ("1\n2\n", None, "2 times of failures"),
        ("", None, "0 times"),
        ("5\n5\n5\n", None, "the same time"),
        ("1\n2026-11-23\n3\n", None, "line 2 has another kind of time"),
        ("1\n" + "9" * 100_000 + "\n3\n", None, "line 2: `9999"),
        ("1\n\x1b[2J\n3\n", None, r"line 2: `\\x1b\[2J` is not a time"),
        ("0001-01-01T00:00:00+14:00\n" * 3, None, "the same time|not a time"),
        (b"\xff\xfe\x00", None, "UTF-8"),
        ("a,b\n1,2\n", "c", "does not have one column `c`: a, b"),
        ("a,a\n1,2\n", "a", "does not have one column"),
        ("a,b\n1,2\n3\n", "b", "line 3 has no column `b`"),
        ('a,b\n1,"2\n', "b", "not CSV"),
        ("a\n" + "1" * 200_000 + "\n", "a", "not CSV|not a time"),
    ],
)
def test_a_trace_that_is_none_is_refused_with_its_line(
    text: str | bytes, column: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptError, match=message) as refused:
        read_gaps(trace(tmp_path, text), column)
    assert refused.value.where == str(tmp_path / "trace")
    assert len(refused.value.what) < 2000


def test_a_trace_that_is_too_large_or_absent_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate((1 << 25) + 1)
    with pytest.raises(UnsafeError):
        read_gaps(tmp_path / "huge")
    with pytest.raises(NotFoundError):
        read_gaps(tmp_path / "nothing")
