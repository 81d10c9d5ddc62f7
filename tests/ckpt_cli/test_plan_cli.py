"""`ckpt plan`: options, chains, traces, JSON, and the page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ckpt.chains.recorded_costs import recorded_costs
from ckpt.planning.costs import DataRates, LogCosts, RunCosts
from ckpt.planning.schedule import plan_schedule
from ckpt_cli.options.types import CountType, DurationType, RateType, ShareType
from ckpt_formats.core.errors import NotFoundError
from ckpt_formats.core.text import format_share
from ckpt_formats.universal.gradients.segment import open_segment
from damage import BROKEN, NOT_FOUND, OUTPUT, SAMPLES, UNSUPPORTED, ckpt
from pages import Page

CHAIN = SAMPLES / "recorded-1" / "run.chain"
USAGE = 2
RUN = ("--step", "0.8s", "--mtbf", "3h", "--stall", "20s", "--restart", "2m")
LOG = ("--replay", "40ms", "--flush-stall", "50ms")
GIB = 1 << 30


def planned(*arguments: object) -> dict[str, Any]:
    done = ckpt("plan", *arguments, "--json")
    assert done.code == 0, done.err
    fields: dict[str, Any] = json.loads(done.out)
    return fields


def texts(fields: dict[str, Any]) -> str:
    return "\n".join(note["text"] for note in fields["notes"])


def test_options_are_the_figures_of_the_library() -> None:
    fields = planned(*RUN, *LOG, "--slowdown", "2%", "--state", "84GB", "--gradients", "700MB", "--write", "3GB/s")
    rates = DataRates(84.0 * GIB, 700.0 * (1 << 20), 3.0 * GIB)
    plan = plan_schedule(RunCosts(0.8, 10_800, 20, 120, 8), LogCosts(0.04, 0.02, 0.05), rates)
    assert plan.logged is not None
    assert fields["run"] == {"step": 0.8, "mtbf": 10_800, "base_stall": 20, "restart": 120, "base_delay": 8}
    for name, schedule in (("bases", plan.bases), ("logged", plan.logged), ("young", plan.young), ("daly", plan.daly)):
        assert fields[name]["base_steps"] == schedule.base_steps
        assert fields[name]["waste"] == schedule.waste
        assert fields[name]["day_nbytes"] == schedule.day_nbytes
        assert fields[name]["gain"] == plan.gain(schedule)
    assert fields["best"] == ("logged" if plan.log_pays else "bases")
    assert fields["simulated"] == {}


def test_the_text_says_what_json_says() -> None:
    fields, done = planned(*RUN, *LOG), ckpt("plan", *RUN, *LOG)
    assert done.code == 0
    bases, logged = fields["bases"], fields["logged"]
    assert f"a base every {bases['base_steps']:,} steps" in done.out
    assert f"a base every {logged['base_steps']:,} steps" in done.out
    assert f"a flush every {logged['flush_steps']} steps" in done.out
    assert f"wastes {format_share(logged['waste'], 1)}" in done.out
    assert f"the log pays: the run takes {format_share(bases['gain'], 1)} less time" in done.out
    assert "does not pay" in ckpt("plan", *RUN, "--replay", "0.7s").out


def test_plan_has_bases_only_without_costs_of_a_log() -> None:
    fields = planned(*RUN)
    assert fields["logged"] is None
    assert not fields["log_pays"]
    assert "a log of gradients is not planned" in texts(fields)


def test_notes_of_a_plan_name_figures_that_are_not_stated() -> None:
    fields = planned("--step", "1s", "--mtbf", "3h", "--state", "10GB", "--write", "1GB/s")
    assert fields["run"]["base_stall"] == 10
    assert fields["run"]["base_delay"] == 0
    assert "training stops while a base is written, for 10 s" in texts(fields)
    assert "a restart takes no time" in texts(fields)
    half = planned(*RUN, "--gradients", "1GB", "--read", "2GB/s")
    assert half["log"]["replay"] == 0.5
    assert "--replay-rate is not stated" in texts(half)
    both = planned(*RUN, "--gradients", "1GB", "--read", "2GB/s", "--parameters", "7B", "--replay-rate", "250M")
    assert both["log"]["replay"] == 28
    assert both["replay_cores"] == 35
    assert "is not stated" not in texts(both)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", "1s"), "either --mtbf or --trace"),
        (("--mtbf", "3h"), "--step is missing"),
        (("--mtbf", "3h", "--step", "1s"), "--stall is missing"),
        ((*RUN, "--trace", "x"), "either --mtbf or --trace"),
        ((*RUN, "--trace-column", "x"), "--trace-column needs --trace"),
        ((*RUN, "--weibull", "0.7"), "--weibull needs --simulate"),
        ((*RUN, "--measure-replay"), "--measure-replay needs CHAIN"),
        ((CHAIN, "--mtbf", "3h"), "--step is missing: how long a step takes (the log does not state times)"),
        ((CHAIN, *RUN), "the log does not state how fast it replays"),
        (("--step", "soon"), "is not a duration"),
        (("--step", "nan"), "is not a duration"),
        (("--step", "-1s"), "is not a duration"),
        (("--step", "1e999"), "is not a duration"),
        (("--write", "fast"), "is not a rate"),
        (("--slowdown", "-1%"), "is not a share"),
        (("--parameters", "0"), "is not a number"),
        ((*RUN, "--simulate", "1"), "1"),
        ((*RUN, "--simulate", "10", "--weibull", "nan"), "nan cannot be a Weibull shape"),
        ((*RUN[:2], "--mtbf", "1m", *RUN[4:]), "a restart takes"),
        ((*RUN, "--step", "0"), "step must be a number above 0"),
        ((*RUN, "--mtbf", "0"), "mtbf must be a number above 0"),
    ],
)
def test_plan_refuses_missing_figures_as_wrong_usage(arguments: tuple[object, ...], message: str) -> None:
    done = ckpt("plan", *arguments, "--json")
    assert done.code == USAGE
    assert message in json.loads(done.out)["error"]["what"]


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ((*RUN, *LOG, "--gradients", "84GB", "--write", "2GB/s"), "write_rate"),
        ((*RUN, "--stall", "400d"), "mtbf"),
    ],
)
def test_figures_that_contradict_each_other_are_refused_with_a_hint(arguments: tuple[object, ...], where: str) -> None:
    done = ckpt("plan", *arguments, "--json")
    error = json.loads(done.out)["error"]
    assert done.code == UNSUPPORTED
    assert error["where"] == where
    assert error["hint"]


def test_durations_sizes_and_rates_are_read_as_they_are_written() -> None:
    durations = {"3h": 10_800, "40ms": 0.04, "2m30s": 150, "1.5": 1.5, "1d 2h": 93_600, "10min": 600, "5us": 5e-6}
    assert {text: DurationType().convert(text, None, None) for text in durations} == pytest.approx(durations)
    assert RateType().convert("2GB/s", None, None) == 2 * GIB == RateType().convert("2g", None, None)
    assert [CountType().convert(text, None, None) for text in ("350M", "7B", "7e9", "250M/s")] == [35e7, 7e9, 7e9, 25e7]
    assert [ShareType().convert(text, None, None) for text in ("1%", "0.01", "2.5 %")] == [0.01, 0.01, 0.025]


# Chains


def test_a_chain_states_bytes_and_parameters() -> None:
    fields = planned(CHAIN, *RUN, *LOG)
    recorded = fields["recorded"]
    assert (recorded["folder"], recorded["steps"], recorded["parameters"]) == ("gradients-0000000003", 3, 279_907)
    assert fields["rates"]["parameters"] == 279_907
    assert fields["rates"]["base_nbytes"] == recorded["base_nbytes"] == 79_521
    log = json.loads(ckpt("log", CHAIN, "--json").out)["segments"][-1]
    assert fields["rates"]["step_nbytes"] / 279_907 == pytest.approx(log["nbytes_per_parameter"], abs=1e-4)
    stated = planned(CHAIN, *RUN, *LOG, "--state", "1GB", "--gradients", "1MB", "--parameters", "5")
    assert [stated["rates"][name] for name in ("base_nbytes", "step_nbytes", "parameters")] == [GIB, 1 << 20, 5]


def test_the_rate_of_replay_is_that_of_steps_without_the_state_before_them() -> None:
    """By a clock: the first chunk takes 1 s without steps and 3 s with three; 8 s are over then, and it ends."""
    looks = iter((0.0, 10.0, 11.0, 14.0))
    costs = recorded_costs(CHAIN, 8.0, lambda: next(looks))
    begin, end = open_segment(CHAIN / costs.folder).layout.ranks[0].chunk_bounds(0)
    assert costs.replay_rate == 3 * (end - begin) / (3 - 1)
    assert recorded_costs(CHAIN).replay_rate is None


def test_a_measured_rate_gives_the_time_of_a_step() -> None:
    measured = planned(CHAIN, *RUN, "--measure-replay", "--cores", "4")
    assert measured["log"]["replay"] == pytest.approx(279_907 / measured["recorded"]["replay_rate"] / 4)


def test_a_chain_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no recorded step"):
        recorded_costs(bare(tmp_path))
    assert ckpt("plan", tmp_path / "nothing", *RUN, *LOG).code == NOT_FOUND


def bare(folder: Path) -> Path:
    """A chain of one state."""
    done = ckpt("append", folder / "run.chain", next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2")))
    assert done.code == 0, done.err
    return folder / "run.chain"


# Failures


def test_simulated_failures_are_the_same_each_time_and_agree_with_the_plan() -> None:
    first, again = (planned(*RUN, *LOG, "--simulate", "20000", "--seed", "7") for _ in range(2))
    assert first == again
    for name in ("bases", "logged"):
        simulated = first["simulated"][name]
        assert simulated["waste"] == pytest.approx(first[name]["waste"], rel=0.02)
        assert simulated["low"] < simulated["waste"] < simulated["high"]
        assert simulated["failures"] == 20_000
    assert first["failures"] == {"source": "exponential", "seed": 7}
    other = planned(*RUN, *LOG, "--simulate", "20000", "--seed", "8")
    assert other["simulated"] != first["simulated"]
    clusters = planned(*RUN, "--weibull", "0.7", "--simulate")
    assert clusters["simulated"]["bases"]["waste"] < clusters["bases"]["waste"]
    assert "20,000 failures waste" in ckpt("plan", *RUN, "--simulate").out


def test_a_trace_gives_the_mean_and_the_failures(tmp_path: Path) -> None:
    file = tmp_path / "failures.csv"
    file.write_text("time,node\n" + "".join(f"{at},n\n" for at in (0, 9000, 12_000, 30_000, 50_000)))
    run = ("--step", "0.8s", "--stall", "20s", "--restart", "2m")
    fields = planned(*run, "--trace", file, "--trace-column", "time", "--simulate", "400")
    assert fields["run"]["mtbf"] == 12_500
    assert fields["failures"] == {"source": "trace", "gaps": 4}
    assert fields["bases"] == planned(*run, "--mtbf", "12500s")["bases"]
    done = ckpt("plan", *run, "--trace", file, "--json")
    error = json.loads(done.out)["error"]
    assert done.code == BROKEN
    assert "line 1: `time,node` is not a time" in error["what"]
    assert "--trace-column" in error["hint"]
    assert ckpt("plan", *run, "--trace", tmp_path / "none").code == NOT_FOUND


# The page


def test_the_page_says_what_json_says_and_needs_nothing_else(tmp_path: Path) -> None:
    arguments = (*RUN, *LOG, "--state", "84GB", "--simulate", "500")
    assert ckpt("plan", *arguments, "--html", tmp_path / "plan.html").code == 0
    text = (tmp_path / "plan.html").read_text("ascii")
    page, fields = Page(text), planned(*arguments)
    del fields["notes"]
    facts = page.facts()
    curves = facts.pop("curves")
    assert facts == fields
    for name in ("bases", "logged"):
        points = curves[name]
        assert points == sorted(points)
        assert min(waste for _, waste in points) == pytest.approx(fields[name]["waste"], rel=1e-3)
        assert points[0][0] < fields[name]["base_steps"] < points[-1][0]
    links = [a[k] for _, a in page.elements for k in ("src", "href", "action", "data", "srcset") if k in a]
    assert all(link and link.startswith("#") for link in links)
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    ids, (_, script) = {a["id"] for _, a in page.elements if "id" in a}, page.texts("script")
    assert set(re.findall(r'by\("([\w-]+)"\)', script)) - {"verdict"} <= ids
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "XMLHttpRequest"):
        assert way not in script
    (style,) = page.texts("style")
    assert "prefers-color-scheme: dark" in style


def test_a_page_replaces_only_pages_of_plan(tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    for _ in range(2):
        assert ckpt("plan", *RUN, "--html", target).code == 0
    target.write_text("<!doctype html>\n<!-- Made by ckpt diff. -->\n")
    done = ckpt("plan", *RUN, "--html", target)
    assert done.code == OUTPUT
    assert "not a page of `ckpt plan`" in done.err
    assert ckpt("plan", *RUN, "--html", tmp_path / "none" / "plan.html").code == OUTPUT


PEERS = (*RUN, "--state", "280GiB", "--hosts", "280", "--network", "1GiB/s")


def test_plan_of_peers_states_memory_bytes_and_losses_of_each_scheme() -> None:
    fields = planned(*PEERS, "--rack", "8")["peers"]
    schemes = {one["scheme"]: one for one in fields["schemes"]}
    pair, parity = schemes["copies:1"], schemes["parity:8+2"]
    # A host's own piece has 1 GiB; there are two generations.
    assert (pair["memory_nbytes"], pair["sent_nbytes"], pair["send_seconds"]) == (2 * GIB, GIB, 1)
    assert (parity["memory_nbytes"], parity["sent_nbytes"], parity["send_seconds"]) == (2.5 * GIB, 2 * GIB, 2)
    assert (pair["losses"], pair["jump"], pair["neighbours"]) == (1, 8, 8)
    assert (parity["losses"], parity["jump"], parity["neighbours"]) == (2, 8, 16)
    assert pair["uncovered"][0] == pytest.approx(2 / 279)  # the host before or after
    assert parity["uncovered"][0] == 0
    run = RunCosts(0.8, 10_800, 20, 120, 2)
    assert parity["schedule"]["waste"] == plan_schedule(run).bases.waste


def test_plan_of_peers_recommends_what_covers_losses_with_the_least_memory() -> None:
    assert planned(*PEERS)["peers"]["recommended"] == "copies:1"
    assert planned(*PEERS, "--lose", "2")["peers"]["recommended"] == "parity:16+2"
    assert planned(*PEERS, "--lose", "2", "--scheme", "copies:2")["peers"]["recommended"] == "copies:2"
    few = planned(*PEERS[:-4], "--hosts", "12", "--rack", "3", "--scheme", "parity:8+2", "--scheme", "copies:1")[
        "peers"
    ]
    # Two groups of parity would need 20 hosts, so neighbours are in one group; a copy is 3 hosts further.
    assert [one["covers"] for one in few["schemes"]] == [False, True]
    assert few["recommended"] == "copies:1"
    small = planned(*PEERS, "--host-memory", "1GiB")
    assert small["peers"]["recommended"] is None
    assert "within the memory of a host: more --host-memory" in texts(small)


def test_text_of_a_plan_of_peers_is_what_json_says() -> None:
    fields, done = planned(*PEERS, "--lose", "2")["peers"], ckpt("plan", *PEERS, "--lose", "2")
    assert "280 hosts, each with 1.0 GiB of the state" in done.out
    best = next(one for one in fields["schemes"] if one["scheme"] == fields["recommended"])
    assert f"recommended {best['scheme']}, jump=1: a state every {best['schedule']['base_steps']:,} steps" in done.out
    assert done.out.count("loses too few hosts") == sum(not one["covers"] for one in fields["schemes"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--rack", "8"), USAGE, "--hosts is missing"),
        (("--hosts", "8"), USAGE, "--state is missing"),
        (("--hosts", "8", "--state", "1GiB", "--scheme", "parity:8"), USAGE, "`parity:8` is not copies:N"),
        (("--hosts", "1", "--state", "1GiB"), UNSUPPORTED, "copies:1 needs 2 hosts, but the run has 1"),
    ],
)
def test_plan_of_peers_says_what_is_missing(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = ckpt("plan", *RUN, *arguments)
    assert done.code == code, done.err
    assert message in done.err
