"""Which checkpointing wastes how much of a training? Ours and those of the literature, by simulated failures.

    python benchmarks/simulate_training.py [--setting NAME]... [--failures 40000] [--seed 0] [--sources]
                                           [--json] [--html FILE]

For each setting and system: the effective training time ratio (the share of time in which the run advances as if
nothing were stored and nothing failed) with its standard error, the steps that a failure makes the run do again, the
seconds to the first new step, and bytes a day to durable storage and to other machines. All figures have a source;
`--sources` prints them. Nothing here was measured on GPUs: what is said of a system follows from its published
mechanism and figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from simulation.failures import Course, Outcome, Tier, drawn, simulate
from simulation.settings import FIGURES, SETTINGS, Figure, Setting
from simulation.systems import SYSTEMS, snapshot_stall

from ckpt_formats.core.errors import UnsupportedError

RUNS = 1000
CURVE_SECONDS = tuple(float(f"{x:.3g}") for x in np.geomspace(600, 7 * 86_400, 13))
"""Mean times between failures of the curves."""


@dataclass(frozen=True)
class Row:
    """A system in a setting."""

    setting: str
    system: str
    mtbf: float
    step: float
    """Seconds of a step without checkpointing."""
    course: Course
    outcome: Outcome

    @property
    def every(self) -> int:
        """Steps between states from which the fastest place restores."""
        return self.course.tiers[0].every

    def to_json(self) -> dict[str, Any]:
        one = self.course
        return {
            "setting": self.setting,
            "system": self.system,
            "mtbf": self.mtbf,
            "step": self.step,
            "slow_step": one.step,
            "every": self.every,
            "bases_every": one.tiers[0].base_every or None,
            "repeated_steps": self.outcome.repeated / one.step,
            "notes": list(one.notes),
            **asdict(self.outcome),
        }


def row(setting: Setting, system: str, mtbf: float, failures: int, seed: int, shape: float = 1.0) -> Row | None:
    """Simulate a system; None if its run makes no progress. Equal seeds: the same failures for all systems."""
    try:
        course = SYSTEMS[system][1](setting, mtbf)
    except UnsupportedError:
        return None
    gaps, chances, phases = drawn(max(2, failures // RUNS), RUNS, seed, shape)
    begin = (phases * course.period).astype(np.int64)
    step = setting.step.value
    return Row(setting.name, system, mtbf, step, course, simulate(course, step, gaps * mtbf, chances, begin))


def rows(settings: list[Setting], failures: int, seed: int, shape: float) -> Iterator[Row | None]:
    for setting in settings:
        for system in SYSTEMS:
            yield row(setting, system, setting.mtbf.value, failures, seed, shape)


def claims(failures: int, seed: int) -> list[dict[str, Any]]:
    """What papers publish, beside what the simulation gives: a name, the claim with its source, both numbers."""
    result = []

    def claim(name: str, source: str, published: str, simulated: str, holds: bool) -> None:
        result.append({"claim": name, "source": source, "published": published, "simulated": simulated, "holds": holds})

    llama = row(SETTINGS["llama3-405b"], "torch.save", SETTINGS["llama3-405b"].mtbf.value, failures, seed)
    assert llama is not None
    claim(
        "effective training time of Llama 3 405B, with the simplest checkpoints",
        "Llama 3 paper, as reported by datacenterdynamics.com",
        *("> 90 %", f"{llama.outcome.effective:.1%}", llama.outcome.effective > 0.9),
    )
    for every, text in ((5, "80 %"), (34.5, "97.1 %")):
        less = repeated_work(every, failures, seed)
        claim(
            f"repeated work, at {every:g} times more frequent checkpoints",
            "Checkmate (arXiv 2507.13522), abstract",
            *(f"{text} less", f"{less:.1%} less", abs(less - (1 - 1 / every)) < 0.02),
        )
    small = SETTINGS["gpt2-l"]
    one, bound = row(small, "checkfreq", small.mtbf.value, failures, seed), FIGURES.checkfreq_overhead
    assert one is not None
    slow = one.outcome.overhead
    claim("CheckFreq: overhead without failures, GPT2-L", bound.source, "<= 3.5 %", f"{slow:.1%}", slow <= bound.value)
    stall = snapshot_stall(SETTINGS["gpt2-xl"])
    claim(
        "the update of GPT2-XL waits for the copy of its state",
        "notes on Checkflow: trial with events for each layer",
        *("33 to 45 ms", f"{stall * 1e3:.0f} ms", 0.033 <= stall <= 0.046),
    )
    large = SETTINGS["mt-nlg-530b"]
    stored, peers = (row(large, name, large.mtbf.value, failures, seed) for name in ("bases", "copies"))
    assert stored is not None
    assert peers is not None
    slow, fast = (one.outcome.repeated + one.outcome.recovery for one in (stored, peers))
    claim(
        "Gemini: a failure costs less with copies in peers' memory; here ours, 530B, beside frequent states in storage",
        "Gemini (SOSP '23), abstract: failure recovery more than 13 times faster",
        *("> 13 x", f"{slow / fast:.1f} x", slow / fast > 13),
    )
    per_step = small.step.value + small.copy + small.write
    less = 1 - small.step.value * (1 + FIGURES.lowdiff_slowdown.value) / per_step
    claim(
        "LowDiff: less training time with a state each step, GPT2-L; here against torch.save",
        "LowDiff v3 (arXiv 2509.04084), abstract, which states neither model nor baseline",
        *("up to 89.2 %", f"{less:.1%}", abs(less - 0.892) < 0.05),
    )
    return result


def repeated_work(every: float, failures: int, seed: int) -> float:
    """The share of repeated work that goes if checkpoints are `every` times as frequent: from 2 `every` steps to 2."""
    gaps, chances, phases = drawn(max(2, failures // RUNS), RUNS, seed)
    again = []
    for interval in (round(2 * every), 2):
        course = Course(1.0, (Tier("storage", interval, 0.0),))
        begin = (phases * course.period).astype(np.int64)
        again.append(simulate(course, 1.0, gaps * 5000, chances, begin).repeated)
    return 1 - again[1] / again[0]


def curves(settings: list[Setting], failures: int, seed: int, shape: float) -> dict[str, dict[str, list[list[float]]]]:
    """By setting and system: mean time between failures in seconds, effective training time ratio, standard error."""
    result: dict[str, dict[str, list[list[float]]]] = {}
    for setting in settings:
        points = result.setdefault(setting.name, {})
        for system in SYSTEMS:
            curve = [row(setting, system, mtbf, failures, seed, shape) for mtbf in CURVE_SECONDS]
            points[system] = [[one.mtbf, one.outcome.effective, one.outcome.error] for one in curve if one]
    return result


def report(settings: list[Setting], failures: int, seed: int, shape: float) -> dict[str, Any]:
    """All that is shown, as plain data."""
    return {
        "failures": failures // RUNS * RUNS,
        "seed": seed,
        "weibull": shape,
        "systems": {name: title for name, (title, _) in SYSTEMS.items()},
        "settings": {one.name: {"title": one.title, "figures": sources(one)} for one in settings},
        "figures": {name: asdict(figure) for name, figure in vars(FIGURES).items()},
        "rows": [one.to_json() for one in rows(settings, failures, seed, shape) if one is not None],
        "claims": claims(failures, seed),
    }


def sources(setting: Setting) -> dict[str, dict[str, Any]]:
    return {name: asdict(figure) for name, figure in setting.figures().items()}


def lines(facts: dict[str, Any], with_sources: bool) -> Iterator[str]:
    """The report as text."""
    from ckpt_cli.views.plan import format_seconds
    from ckpt_formats.core.text import format_nbytes

    yield f"{facts['failures']:,} failures for each row, seed {facts['seed']}; +- is one standard error"
    for name, setting in facts["settings"].items():
        chosen = [one for one in facts["rows"] if one["setting"] == name]
        mtbf = format_seconds(setting["figures"]["mtbf"]["value"])
        yield f"\n{setting['title']} ({name}): a failure every {mtbf}"
        yield (
            f"{'':24} {'effective':>17} {'overhead':>8} {'state each':>11} {'repeated':>19} "
            f"{'back after':>12} {'stored a day':>12} {'sent a day':>11}"
        )
        best = max(one["effective"] for one in chosen)
        for one in chosen:
            mark = "*" if one["effective"] == best else " "
            again = f"{one['repeated_steps']:.1f} +- {one['repeated_error'] / one['slow_step']:.1f} steps"
            yield (
                f"{facts['systems'][one['system']]:24} {one['effective']:8.2%} +- {one['error']:5.2%}{mark} "
                f"{one['overhead']:8.2%} {one['every']:6} steps {again:>19} {format_seconds(one['recovery']):>12} "
                f"{format_nbytes(one['stored_day']):>12} {format_nbytes(one['sent_day']):>11}  "
                f"{'; '.join(one['notes'])}"
            )
        if with_sources:
            yield from (_source(key, Figure(**one)) for key, one in setting["figures"].items())
    if with_sources:
        yield "\nfigures of systems"
        yield from (_source(key, Figure(**one)) for key, one in facts["figures"].items())
    yield "\npublished, and simulated here"
    for one in facts["claims"]:
        verdict = "holds" if one["holds"] else "DIFFERS"
        yield f"  {verdict:8} {one['claim']}: {one['published']}, simulated {one['simulated']} ({one['source']})"


def _source(name: str, figure: Figure) -> str:
    return f"    {name:22} {figure.value:12.6g}   {figure.source}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=list(SETTINGS), help="only this one; may be repeated")
    parser.add_argument("--failures", type=int, default=40_000, help=f"of each row, a multiple of {RUNS:,}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--weibull", type=float, default=1.0, metavar="SHAPE", help="below 1: failures come in clusters"
    )
    parser.add_argument("--sources", action="store_true", help="where each number is from")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--html", type=Path, metavar="FILE", help="a page with curves over the time between failures")
    options = parser.parse_args()
    if options.failures < 2 * RUNS:
        parser.error(f"--failures must be at least {2 * RUNS:,}")
    settings = [SETTINGS[name] for name in options.setting or SETTINGS]
    if options.html:
        from ckpt_cli.views import page

        page.check_place(options.html, "simulate_training")
    facts = report(settings, options.failures, options.seed, options.weibull)
    if options.html:
        from simulation.page import page_of

        drawn_curves = curves(settings, options.failures, options.seed, options.weibull)
        page.write(page_of({**facts, "curves": drawn_curves}), options.html, "simulate_training")
    if options.json:
        print(json.dumps(facts, allow_nan=False))
    else:
        print("\n".join(lines(facts, options.sources)))
    return int(not all(one["holds"] for one in facts["claims"]))


if __name__ == "__main__":
    sys.exit(main())
