"""Each fault on trial: the tests that reach it, in the order in which one is likely to fail soon."""

import json
import os
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mutating.faults import ROOT, Fault
from mutating.session import Collected, Fork, Test, shared_fixtures, stop

_FIRST = 4
"""So many tests of each file are run before the rest of any."""


def measure(
    faults: Sequence[Fault], chosen: Sequence[Fault], collected: Collected, results: Any, told: Namespace
) -> None:
    """Record what the tests reach of all faults, then try every chosen one that has no result yet."""
    record = told.folder / "reach.json"
    tests = [t for t in _record(faults, collected, record, told) if t.quick or not told.quick]
    if told.record_only:
        return
    todo = [faults.index(fault) for fault in chosen if _is_due(results.known.get(fault.key), told)]
    print(f"{len(tests)} tests, {len(todo)} of {len(chosen)} faults to try", flush=True)
    _Trials(faults, tests, collected, results, told).run(todo)


def _is_due(known: dict[str, Any] | None, told: Namespace) -> bool:
    return known is None or (told.again and not known["found_by"])


class _Trials:
    """All that runs at one time: a fork for each of a few faults."""

    def __init__(
        self, faults: Sequence[Fault], tests: list[Test], collected: Collected, results: Any, told: Namespace
    ) -> None:
        self._faults, self._collected, self._results, self._told = faults, collected, results, told
        self._tests = {test.name: test for test in tests}
        self._sound: dict[str, bool] = {}
        """Tests that were run alone with no fault on: whether they pass."""
        self._finders: Counter[str] = Counter()

    def run(self, todo: Sequence[int]) -> None:
        running: dict[Fork, tuple[int, list[str]]] = {}
        try:
            self._run(list(todo)[::-1], running)
        finally:
            for fork in running:
                fork.stop()

    def _run(self, waiting: list[int], running: dict[Fork, tuple[int, list[str]]]) -> None:
        while waiting or running:
            while waiting and len(running) < self._told.jobs:
                number = waiting.pop()
                if order := self._order(number):
                    running[self._collected.start(number, order)] = (number, order)
                else:
                    self._note(number, [], None, "", 0, 0.0)
            time.sleep(0.02)
            for fork, (number, order) in list(running.items()):
                ending = fork.look(self._limit, self._told.budget)
                if ending is None:
                    continue
                del running[fork]
                if ending.failed and not self._passes_alone(ending.failed):
                    waiting.append(number)  # without this test
                    continue
                self._note(number, order, ending.failed, ending.message, ending.ran, ending.seconds)

    def _note(self, number: int, order: list[str], failed: str | None, message: str, ran: int, seconds: float) -> None:
        fault = self._faults[number]
        self._finders.update([failed] if failed else [])
        self._results.add(
            fault,
            found_by=failed,
            quick=bool(failed and self._tests[failed].quick),
            message=message,
            reaching=len(order),
            ran=ran,
            seconds=round(seconds, 1),
            tests=[] if failed else order[:20],
        )
        print(
            f"{fault.place}: {f'found by {failed}' if failed else 'NOT FOUND'}, {ran} tests, {seconds:.1f} s",
            flush=True,
        )

    def _limit(self, name: str) -> float:
        return 30 + 10 * self._tests[name].seconds

    def _passes_alone(self, name: str) -> bool:
        if name not in self._sound:
            fork = self._collected.start(-1, [name])
            while (ending := fork.look(self._limit, 600)) is None:
                time.sleep(0.02)
            self._sound[name] = ending.failed is None
            if ending.failed:
                print(f"{name} fails without a fault, when run alone: left out", flush=True)
        return self._sound[name]

    def _order(self, number: int) -> list[str]:
        """Tests of `make quick` first; then those that found most so far, then a few of each file, then the rest."""
        reaching = [t for t in self._tests.values() if number in t.reaches and self._sound.get(t.name, True)]
        return [
            test.name for quick in (True, False) for test in self._spread([t for t in reaching if t.quick == quick])
        ]

    def _spread(self, tests: list[Test]) -> Iterator[Test]:
        files = defaultdict(list)
        for test in sorted(tests, key=lambda t: (-self._finders[t.name], t.seconds)):
            files[test.file].append(test)
        in_order = sorted(files.values(), key=lambda of: median(t.seconds for t in of))
        for of in in_order:
            yield from of[:_FIRST]
        for of in in_order:
            yield from of[_FIRST:]


def _record(faults: Sequence[Fault], collected: Collected, kept: Path, told: Namespace) -> list[Test]:
    """The tests that pass, with what each reaches. Recorded are files of tests that were not, or that have changed."""
    known = {} if told.record or not kept.exists() else json.loads(kept.read_text())
    keys = {fault.key for fault in faults}
    if not keys <= set(known.get("faults", ())):
        known = {"faults": sorted(keys), "files": {}}
    files: dict[str, list[str]] = defaultdict(list)
    for name in collected.items:
        files[name.split("::")[0]].append(name)
    missing = {file: names for file, names in files.items() if not _is_known(known["files"].get(file), file, names)}
    if missing:
        print(f"recording {sum(map(len, missing.values()))} tests of {len(missing)} files", flush=True)
    for batch in _batches(missing, told.jobs):
        _run_batch(batch, faults, collected, known["files"])
        kept.write_text(json.dumps(known))
    numbers = {fault.key: n for n, fault in enumerate(faults)}
    return [
        Test(name, seconds, is_quick(collected.items[name]), frozenset(numbers[k] for k in reached if k in numbers))
        for file in files
        for name, (outcome, seconds, reached) in known["files"][file]["tests"].items()
        if outcome == "passed" and name in collected.items
    ]


def is_quick(item: Any) -> bool:
    """Is this test one of `make quick`?"""
    return not any(item.get_closest_marker(name) for name in ("engines", "slow"))


def _is_known(known: dict[str, Any] | None, file: str, names: Sequence[str]) -> bool:
    return known is not None and known["changed"] == _changed(file) and set(names) <= set(known["tests"])


def _changed(file: str) -> float:
    return (ROOT / file).stat().st_mtime


def _batches(files: dict[str, list[str]], jobs: int) -> Iterator[list[list[str]]]:
    """Files, so many at a time; the smallest first, so that most is known soon."""
    left = sorted(files.values(), key=len)
    while left:
        yield [left.pop(0) for _ in range(min(jobs, len(left)))]


def _run_batch(
    batch: Sequence[Sequence[str]], faults: Sequence[Fault], collected: Collected, files: dict[str, Any]
) -> None:
    folder = Path(os.environ["CKPT_FAULTS"])
    began = time.monotonic()
    for i in range(len(batch)):
        for path in (folder / f"reach-{i}", folder / f"outcomes-{i}"):
            path.unlink(missing_ok=True)
        (folder / f"reach-{i}").touch()
    processes = [
        collected.record(names, folder / f"reach-{i}", folder / f"outcomes-{i}") for i, names in enumerate(batch)
    ]
    try:
        for process in processes:
            os.waitpid(process, 0)
    except BaseException:
        for process in processes:
            stop(process)
        raise
    for i, names in enumerate(batch):
        by_context = defaultdict(set)
        for line in (folder / f"reach-{i}").read_text().splitlines():
            number, _, context = line.partition("\t")
            by_context[context].add(faults[int(number)].key)
        file = names[0].split("::")[0]
        outcomes = map(json.loads, (folder / f"outcomes-{i}").read_text().splitlines())
        tests = {
            name: [outcome, seconds, sorted(_reached(collected.items[name], name, by_context))]
            for name, outcome, seconds in outcomes
        }
        files[file] = {"changed": _changed(file), "tests": {**{name: ["lost", 0, []] for name in names}, **tests}}
        bad = [name for name, (outcome, *_) in files[file]["tests"].items() if outcome in ("failed", "lost")]
        print(
            f"{file}: {len(tests)} tests, {time.monotonic() - began:.0f} s{f', failed: {bad[:5]}' if bad else ''}",
            flush=True,
        )


def _reached(item: Any, name: str, by_context: dict[str, set[str]]) -> set[str]:
    return set().union(*(by_context.get(context, ()) for context in (name, *shared_fixtures(item))))
