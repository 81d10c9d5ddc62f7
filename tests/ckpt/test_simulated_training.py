"""`benchmarks/simulate_training.py`: events that are known by hand, the formulas of `ckpt plan`, and the page."""

import itertools
import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ckpt.planning.costs import LogCosts, RunCosts
from ckpt.planning.peers import largest_jump, uncovered_share
from ckpt.planning.schedule import plan_schedule
from ckpt.planning.simulate import exponential
from ckpt.planning.simulate import simulate as simulate_one
from ckpt.planning.waste import expected_seconds
from ckpt_formats.parity.scheme import PeerScheme
from pages import Page

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SVG = "http://www.w3.org/2000/svg"


def loaded(name: str, path: Path, package: Path | None = None) -> ModuleType:
    """A module of the benchmarks, which are no package that tests could import."""
    spec = spec_from_file_location(name, path, submodule_search_locations=package and [str(package)])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


loaded("simulation", BENCHMARKS / "simulation" / "__init__.py", BENCHMARKS / "simulation")
training = loaded("simulate_training", BENCHMARKS / "simulate_training.py")

from simulation.failures import Course, Outcome, Tier, drawn, simulate  # noqa: E402
from simulation.host_losses import burst_loss, burst_sizes, loss_share, second_loss  # noqa: E402
from simulation.page import page_of  # noqa: E402
from simulation.settings import FIGURES, SETTINGS, Figure  # noqa: E402
from simulation.systems import SYSTEMS  # noqa: E402


def failing(course: Course, gaps: list[float], chances: list[float] | None = None) -> Outcome:
    """One run that fails after these seconds; it begins with a restart."""
    return simulate(course, 1.0, np.array(gaps)[:, None], np.array(chances or [0.0] * len(gaps))[:, None])


def test_a_run_without_failures_takes_its_steps_and_stalls() -> None:
    course = Course(1.25, (Tier("storage", 10, load=0.0),), stalls=((10, 2.5),), stored=((10, 100.0),))
    result = failing(course, [15.0 * 7])
    assert result.effective == pytest.approx(70 / 105)
    assert result.overhead == pytest.approx(1 - 10 / 15)
    assert result.repeated == result.recovery == 0
    assert result.stored_day == pytest.approx(86_400 * 700 / 105)


def test_failures_at_known_times_repeat_what_was_not_stored() -> None:
    """Steps of 1 s, a base of 2 s each 10 steps that can be restored 3 s later, restarts of 5 s."""
    course = Course(1.0, (Tier("storage", 10, load=5.0, delay=3.0),), stalls=((10, 2.0),))
    # 40 s of work: 33 steps and the stalls; step 30 was there at 36 s, but can be restored at 39 s only.
    first = failing(course, [45.0])
    assert (first.effective, first.repeated, first.recovery) == (pytest.approx(30 / 45), 4.0, 5.0)
    sooner = failing(course, [43.5])
    assert (sooner.effective, sooner.repeated) == (pytest.approx(20 / 43.5), 38.5 - 24)
    # The second failure comes while the run restarts, the third takes a base that was not complete.
    again = failing(course, [45.0, 4.0, 5.0 + 14.0])
    assert (again.effective, again.repeated, again.recovery) == (pytest.approx(30 / 68), (4 + 0 + 14) / 3, 14 / 3)


def test_a_log_is_replayed_up_to_its_last_flush() -> None:
    log = Tier("log", 4, load=5.0, replay=0.5, base_every=10)
    course = Course(1.0, (log,), stalls=((4, 0.25), (10, 2.0)))
    # A period takes 12.5 s. After 22 s of work: 10 steps, then 8 with two flushes (8.5 s), then 1 s that is lost.
    first = failing(course, [27.0])
    assert (first.effective, first.repeated) == (pytest.approx(18 / 27), 1.0)
    # Then 8 steps are replayed before new ones: 4 s.
    second = failing(course, [27.0, 5.0 + 4.0 + 4.0])
    assert second.recovery == pytest.approx((5 + 9) / 2)
    assert second.effective == pytest.approx(20 / 40)  # 2 steps, the base, 0 of the next flush


def test_a_failure_that_takes_the_fast_place_goes_back_to_the_slow_one() -> None:
    tiers = (Tier("memory", 1, load=1.0, survives=0.5), Tier("storage", 20, load=6.0))
    course = Course(1.0, tiers)
    kept, lost = failing(course, [30.5], [0.4]), failing(course, [30.5], [0.6])
    assert (kept.effective, kept.repeated) == (pytest.approx(29 / 30.5), 0.5)
    assert (lost.effective, lost.repeated) == (pytest.approx(20 / 30.5), 9.5)
    # What was lost stays lost: the next failure finds the memory at 20 and what was done since.
    after = failing(course, [30.5, 9.0], [0.6, 0.0])
    assert (after.effective, after.recovery) == (pytest.approx(23 / 39.5), (1 + 6) / 2)


@pytest.mark.parametrize("log", [None, LogCosts(0.21, 0.013, 0.37), LogCosts(2.3)])
def test_the_events_are_those_of_the_simulation_of_plan(log: LogCosts | None) -> None:
    """Two programs, the same failures: the same steps."""
    for base, flush in ((23, 4), (20, 5), (31, 1)):
        run = RunCosts(1.07, 60, 3.1, 7.7, 0.0 if log else 11.3)
        gaps = exponential(100, 200, base)
        expected = simulate_one(run, log, base, None if log is None else flush, gaps.tolist())
        gaps[0] += run.restart
        result = simulate(plan_course(run, log, base, flush), run.step, gaps[:, None], np.zeros((200, 1)))
        assert result.effective * gaps.sum() == pytest.approx((1 - expected.waste) * (gaps.sum() - run.restart))


def plan_course(run: RunCosts, log: LogCosts | None, base: int, flush: int) -> Course:
    if log is None:
        tier = Tier("storage", base, run.restart, run.base_delay)
        return Course(run.step, (tier,), ((base, run.base_stall),))
    tier = Tier("log", flush, run.restart, replay=log.replay, base_every=base, base_delay=run.base_delay)
    stalls = ((flush, log.flush_stall), (base, run.base_stall))
    return Course(run.step * (1 + log.slowdown), (tier,), stalls)


def test_waste_is_that_of_plan_within_two_percent() -> None:
    """Where the closed form of `ckpt plan` applies: a grid of runs, with and without a log."""
    gaps, chances, phases = drawn(40, 1000, 5)
    grid = itertools.product((1800.0, 10_800.0), ((20.0, 0.0), (2.0, 40.0)), (0.5, 0.05))
    for mtbf, (stall, delay), replay in grid:
        run, log = RunCosts(0.8, mtbf, stall, 60, delay), LogCosts(0.8 * replay, 0.01, 0.05)
        plan = plan_schedule(run, log)
        assert plan.logged is not None
        assert plan.logged.flush_steps is not None
        courses = (
            (plan.bases.waste, plan_course(run, None, plan.bases.base_steps, 0)),
            (plan.logged.waste, plan_course(run, log, plan.logged.base_steps, plan.logged.flush_steps)),
        )
        for waste, course in courses:
            begin = (phases * course.period).astype(np.int64)
            result = simulate(course, run.step, gaps * mtbf, chances, begin)
            assert result.error < 0.01 * waste
            assert 1 - result.effective == pytest.approx(waste, rel=0.02)


def test_the_standard_error_is_the_spread_of_repetitions() -> None:
    course = Course(1.0, (Tier("storage", 50, load=10.0),), ((50, 5.0),))
    results = []
    for seed in range(60):
        gaps, chances, _ = drawn(20, 100, seed)
        results.append(simulate(course, 1.0, gaps * 500, chances))
    spread = np.std([one.effective for one in results], ddof=1)
    assert np.mean([one.error for one in results]) == pytest.approx(spread, rel=0.3)


def is_lost(scheme: PeerScheme, jump: int, gone: set[int], hosts: int) -> bool:
    """Whether something is lost: hosts that follow each other in the circle of copies, or too many of a group."""
    if scheme.is_copies:
        order = sorted(range(hosts), key=lambda host: (host % jump, host))
        rows = [{order[(at + k) % hosts] for k in range(scheme.spares + 1)} for at in range(hosts)]
        return any(row <= gone for row in rows)
    return any(len(gone & set(group)) > scheme.spares for group in scheme.groups(hosts, jump))


@pytest.mark.parametrize(
    ("text", "hosts"), [("copies:1", 12), ("copies:2", 11), ("copies:3", 7), ("parity:4+2", 12), ("parity:3+1", 9)]
)
def test_losses_at_random_are_counted_exactly(text: str, hosts: int) -> None:
    scheme = PeerScheme.parse(text)
    for losses in range(1, 7):
        sets = [set(one) for one in itertools.combinations(range(hosts), losses)]
        over = sum(is_lost(scheme, 1, one, hosts) for one in sets)
        assert uncovered_share(scheme, hosts, losses) == pytest.approx(over / len(sets), abs=1e-12)


@pytest.mark.parametrize("text", ["copies:1", "copies:2", "parity:4+2"])
def test_neighbours_that_a_scheme_covers_may_all_be_lost(text: str) -> None:
    scheme, hosts, jump = PeerScheme.parse(text), 48, 4
    for size in range(1, scheme.spares * jump + 1):
        assert scheme.lost_together(size, jump) <= scheme.spares
        assert not any(is_lost(scheme, jump, set(range(at, at + size)), hosts) for at in range(hosts - size + 1))
    size = scheme.spares * jump + 1
    assert any(is_lost(scheme, jump, set(range(at, at + size)), hosts) for at in range(hosts - size + 1))


def test_failures_that_peers_do_not_replace_are_those_of_drawn_bursts() -> None:
    """A drawn burst of a mean of 4 machines of 280, three in four of them neighbours; seed 4, 30,000 bursts."""
    random, hosts, count = np.random.default_rng(4), 280, 30_000
    sizes = burst_sizes(hosts)
    assert sum(size * chance for size, chance in sizes.items()) == pytest.approx(FIGURES.burst_machines.value, rel=1e-3)
    for text in ("copies:1", "parity:8+2"):
        scheme = PeerScheme.parse(text)
        jump = largest_jump(scheme, hosts, 8)
        order = sorted(range(hosts), key=lambda host: (host % jump, host))
        next_of = np.empty(hosts, np.int64)
        next_of[order] = np.roll(order, -1)
        group_of = np.empty(hosts, np.int64)
        for number, group in enumerate(scheme.groups(hosts, jump)):
            group_of[list(group)] = number
        drawn_sizes = random.choice(list(sizes), count, p=list(sizes.values()))
        near = random.random(count) < FIGURES.burst_neighbours.value
        over = -(-drawn_sizes // jump) > scheme.spares
        for i in np.flatnonzero(~near):
            lost = random.choice(hosts, drawn_sizes[i], replace=False)
            if scheme.is_copies:
                over[i] = np.isin(next_of[lost], lost).any()
            else:
                over[i] = np.bincount(group_of[lost]).max() > scheme.spares
        error = np.sqrt(over.mean() * (1 - over.mean()) / count)
        assert burst_loss(scheme, hosts) == pytest.approx(over.mean(), abs=4 * error + 1e-4)


def test_a_second_failure_before_memory_is_filled_again_counts() -> None:
    pair, parity = PeerScheme.parse("copies:1"), PeerScheme.parse("parity:8+2")
    assert second_loss(pair, 2, 0.1) == pytest.approx(0.1)
    assert second_loss(pair, 280, 0.1) == pytest.approx(0.1 * 2 / 279)  # the host before, and the one after
    assert second_loss(parity, 280, 0.1) == pytest.approx(0.1**2 * 9 / 279 * 8 / 278)
    large = SETTINGS["mt-nlg-530b"]
    shares = [loss_share(large, pair, large.mtbf.value, window) for window in (0.0, 3600.0, 1e9)]
    assert FIGURES.everything_share.value < shares[0] < shares[1] < shares[2] < 1


def test_peers_memory_wastes_what_the_closed_form_says() -> None:
    """530B at 20 Gbit/s: Daly's formula for what memory replaces, and the way back to storage for the rest."""
    large = SETTINGS["mt-nlg-530b"]
    mtbf, step = large.mtbf.value, large.step.value
    gaps, chances, phases = drawn(40, 1000, 6)
    effective = {}
    for name in ("copies", "parity"):
        course = SYSTEMS[name][1](large, mtbf)
        own, peers, storage = course.tiers
        lost = 1 - peers.survives
        load = own.survives * own.load + (peers.survives - own.survives) * peers.load + lost * storage.load
        back = storage.every * step / 2 + storage.delay - (peers.every * step / 2 + peers.delay)
        seconds = expected_seconds(RunCosts(step, mtbf, 0.0, load, peers.delay), peers.every)
        waste = 1 - peers.every * step / seconds + lost * back / mtbf
        begin = (phases * course.period).astype(np.int64)
        result = simulate(course, step, gaps * mtbf, chances, begin)
        assert 1 - result.effective == pytest.approx(waste, rel=0.02)
        effective[name] = result.effective
    assert min(effective.values()) > 0.993


def test_every_number_has_a_source() -> None:
    figures = [figure for one in SETTINGS.values() for figure in one.figures().values()] + list(vars(FIGURES).values())
    assert all(isinstance(figure, Figure) and len(figure.source) > 5 for figure in figures)
    assert all(len(figure.source) > len("assumed: ") + 8 for figure in figures if figure.assumed)
    assert {one.name for one in SETTINGS.values()} == set(SETTINGS)


def test_ours_never_stores_more_than_the_storage_takes() -> None:
    for setting, system in itertools.product(SETTINGS.values(), SYSTEMS):
        course = SYSTEMS[system][1](setting, setting.mtbf.value)
        assert course.nbytes_of_second(course.stored) <= 1.001 * setting.storage_rate.value, (setting.name, system)


def test_the_report_is_the_same_each_time_and_its_claims_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    command = ["simulate_training.py", "--setting", "gpt2-l", "--failures", "3000", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", [*command, "--json", "--html", str(page)])
    assert training.main() == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["system"] for one in facts["rows"]] == list(SYSTEMS)
    assert all(0 < one["effective"] < 1 and 0 < one["error"] < 0.01 for one in facts["rows"])
    monkeypatch.setattr(sys, "argv", [*command, "--sources"])
    assert training.main() == 0
    text = capsys.readouterr().out
    for one in facts["rows"]:
        assert f"{one['effective']:.2%} +- {one['error']:.2%}" in text
    assert "notes on LowDiff: W = 2 GB/s" in text
    shown = Page(page.read_text("ascii"))
    curves = (shown_facts := shown.facts()).pop("curves")
    assert shown_facts == facts
    assert set(curves["gpt2-l"]) == set(SYSTEMS)
    ids, (_, script) = {a["id"] for _, a in shown.elements if "id" in a}, shown.texts("script")
    assert set(re.findall(r'by\("([\w-]+)"\)', script)) - {"verdict"} <= ids
    code = script + "".join(shown.texts("style"))
    assert set(re.findall(r"https?://[^\"'\s]+", code)) == {SVG}
    assert all(a[k].startswith("#") for _, a in shown.elements for k in ("src", "href") if a.get(k))


def test_a_page_shows_hostile_names_as_text() -> None:
    hostile = "</script><img src=x onerror=alert(1)>&amp;\u202e"
    text = page_of({"systems": {hostile: hostile}, "rows": [], "curves": {}})
    assert text.isascii()
    assert "<img" not in text
    assert Page(text).facts()["systems"] == {hostile: hostile}
    assert "default-src 'none'" in text
