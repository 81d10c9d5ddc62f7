"""Each fault on trial: the tests that reach it, in the order in which one is likely to fail soon."""

import re
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from mutating.faults import Fault
from mutating.reach import recorded
from mutating.session import Collected, Fork, Test

_FIRST = 4
"""So many tests of each file are run before the rest of any."""


def measure(
    faults: Sequence[Fault], chosen: Sequence[Fault], collected: Collected, results: Any, options: Namespace
) -> None:
    """Record what the tests reach of all faults, then try every chosen one that has no result yet."""
    tests = [
        t for t in recorded(faults, collected, options.folder / "reach.json", options) if t.quick or not options.quick
    ]
    if options.record_only:
        return
    numbers = {fault.key: number for number, fault in enumerate(faults)}
    todo = [numbers[fault.key] for fault in chosen if _is_due(results.known.get(fault.key), options)]
    print(f"{len(tests)} tests, {len(todo)} of {len(chosen)} faults to try", flush=True)
    _Trials(faults, tests, collected, results, options).run(todo)


def _is_due(known: dict[str, Any] | None, options: Namespace) -> bool:
    return known is None or (options.again and not known["found_by"])


class _Trials:
    """All that runs at one time: a fork for each of a few faults."""

    def __init__(
        self, faults: Sequence[Fault], tests: list[Test], collected: Collected, results: Any, options: Namespace
    ) -> None:
        self._faults, self._collected, self._results, self._options = faults, collected, results, options
        self._tests = {test.name: test for test in tests}
        self._sound: dict[str, bool] = {}
        """Tests that were run alone with no fault on: whether they pass."""

    def run(self, todo: Sequence[int]) -> None:
        running: dict[Fork, tuple[int, list[str]]] = {}
        try:
            self._run(list(todo)[::-1], running)
        finally:
            for fork in running:
                fork.stop()

    def _run(self, waiting: list[int], running: dict[Fork, tuple[int, list[str]]]) -> None:
        while waiting or running:
            while waiting and len(running) < self._options.jobs:
                number = waiting.pop()
                if order := self._order(number):
                    running[self._collected.start(number, order)] = (number, order)
                else:
                    self._note(number, [], None, "", 0, 0.0)
            time.sleep(0.02)
            for fork, (number, order) in list(running.items()):
                ending = fork.look(self._limit, self._options.budget)
                if ending is None:
                    continue
                del running[fork]
                if ending.failed and not self._passes_alone(ending.failed):
                    waiting.append(number)  # without this test
                    continue
                self._note(number, order, ending.failed, ending.message, ending.ran, ending.seconds)

    def _note(self, number: int, order: list[str], failed: str | None, message: str, ran: int, seconds: float) -> None:
        fault = self._faults[number]
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
        """Tests of `make quick` first; then those of files with a name like the module's, a case of each test first."""
        reaching = [t for t in self._tests.values() if number in t.reaches and self._sound.get(t.name, True)]
        words = set(re.findall("[a-z0-9]+", self._faults[number].module)) - {"ckpt", "formats", "codecs", "cli"}
        return [
            test.name for quick in (True, False) for test in _spread([t for t in reaching if t.quick == quick], words)
        ]


def _spread(tests: Sequence[Test], words: set[str]) -> Iterator[Test]:
    files: dict[str, list[Test]] = defaultdict(list)
    cases: Counter[str] = Counter()
    case_of: dict[str, int] = {}
    for test in sorted(tests, key=lambda t: t.seconds):
        function = test.name.partition("[")[0]
        case_of[test.name] = cases[function]
        cases[function] += 1
        files[test.file].append(test)
    for of in files.values():
        of.sort(key=lambda t: (case_of[t.name], t.seconds))
    in_order = sorted(files.items(), key=lambda file: (-_alike(file[0], words), median(t.seconds for t in file[1])))
    for file, of in in_order:
        yield from of[: _FIRST * (1 + 2 * _alike(file, words))]
    for file, of in in_order:
        yield from of[_FIRST * (1 + 2 * _alike(file, words)) :]


def _alike(file: str, words: set[str]) -> int:
    """How many words of a module's name a file of tests has in its own."""
    return len(words & set(re.findall("[a-z0-9]+", file)))
