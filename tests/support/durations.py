"""Which tests are slow? Measures the processor seconds of each quick test, and lists those above the limit.

    .venv/bin/python tests/support/durations.py                      all quick tests: 15 minutes on a quiet machine
    .venv/bin/python tests/support/durations.py tests/ckpt_formats   these alone; other lines stay as they are
    .venv/bin/python tests/support/durations.py --again tests/x.py   slow tests, too: some may have become quick

A test takes what its set-up, its body and its teardown take, in this process and in the processes that it starts and
waits for. What tests share, a fixture of a module say, is divided among those that use it. A test above the limit is
run twice, since the first one of a process may import torch; the shorter time counts. Seconds are those of the machine
on which a fixed piece of work takes `WORK` seconds: the work is done again beside each slow test, and on a machine that
is twice as slow the time is halved.

`conftest.py` marks what `slow_tests.txt` names as slow, and fails a quick test that takes `TOLERANCE` times the limit.
A test can also be marked `slow` by hand, where it is slow by its nature.
"""

import argparse
import re
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "slow_tests.txt"
LONGEST = ROOT / "tests" / "longest_files.txt"
"""The seconds of whole files that take longest, in the same form."""
LIMIT = 0.2
"""Processor seconds that a quick test may take."""
TOLERANCE = 3
"""Times above the limit at which a quick test fails: machines differ, and so do moments."""
WORK = 0.013
"""Processor seconds that `_work` takes on the machine of the list, when it does nothing else; others took 0.030."""
COLLECTED = pytest.StashKey[list[str]]()
"""In pytest's configuration: the names of all collected tests, also of those that their marks then leave out."""
QUICK = "not engines and not slow"
SLOW_MARKS = {"engines", "slow"}
_ENOUGH = 3  # slow cases of one test, after which the script takes the others to be slow, too
_HEAD = f"""\
# Tests that take more than {LIMIT} processor seconds, set-up counted: all cases of a test, or one, or a whole file.
# Written by `python tests/support/durations.py`, which says how they are measured; do not edit.
"""


@dataclass(frozen=True)
class SlowTests:
    """The list: seconds by the name of a case, a test, a file or a folder."""

    seconds: Mapping[str, float]

    @staticmethod
    def load(path: Path = LIST) -> "SlowTests":
        lines = (line for line in path.read_text("utf-8").splitlines() if line and line[0] != "#")
        return SlowTests({name: float(seconds) for seconds, name in (line.split(maxsplit=1) for line in lines)})

    def save(self, path: Path = LIST) -> None:
        lines = (f"{self.seconds[name]:7.1f}  {name}\n" for name in sorted(self.seconds))
        path.write_text(_HEAD + "".join(lines), "utf-8")

    def unknown(self, tests: Iterable[str], paths: Iterable[str]) -> list[str]:
        """Return the names that stand for none of `tests`, of the files that are among `paths` or are gone."""
        known, paths = {name for test in tests for name in _names(test)}, set(paths)
        return [
            name
            for name in self.seconds
            if name not in known and (name.partition("::")[0] in paths or not _exists(name))
        ]

    def name_of(self, nodeid: str) -> str | None:
        """Return the name in the list that covers this test or file, or None."""
        return next((name for name in _names(nodeid) if name in self.seconds), None)


def _names(nodeid: str) -> Iterator[str]:
    """The name of a case, then of all that it is part of: the test, its class, the file, the folders."""
    test, bracket, _ = nodeid.partition("[")
    if bracket:
        yield nodeid
    while test:
        yield test
        path, colons, _ = test.rpartition("::")
        test = path if colons else test.rpartition("/")[0]


def _work() -> float:
    """Do a fixed piece of work, of Python and of C; the processor seconds that it took."""
    begin = time.process_time()
    data = bytes(range(256)) * 1000
    for level in range(1, 4):
        zlib.compress(data, level)
    total = {n: str(n * n) for n in range(60_000)}
    sum(len(text) for text in total.values())
    return time.process_time() - begin


def slowness() -> float:
    """Return how many times as long this machine takes at this moment as the machine of the list."""
    return max(1.0, min(_work() for _ in range(2)) / WORK)


def processor_seconds() -> float:
    """Of this process, and of its children that have ended."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


def is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in SLOW_MARKS)


def is_marked_slow(path: Path) -> bool:
    """Does a file mark all of its tests? Its text says so, without an import of the engine."""
    mark = _MARK_OF_ALL.search(path.read_text("utf-8")) if path.suffix == ".py" else None
    return mark is not None and bool(_SLOW_MARK.search(mark[0]))


_MARK_OF_ALL = re.compile(r"^pytestmark = (?:\[\n(?: .*\n)*|.*)", re.MULTILINE)
_SLOW_MARK = re.compile(r"\bpytest\.mark\.(?:engines|slow)\b")


class Stopwatch:
    """A plugin of pytest that measures quick tests, and fails those that take much longer than the limit."""

    def __init__(self, tolerance: float = TOLERANCE) -> None:
        self.allowed = LIMIT * tolerance
        self._shares: dict[tuple[str, str], float] = {}
        self._shared = 0.0  # of the test that runs: seconds of set-up that it shares with others
        self._depth = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if is_slow(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        seconds, reports = self._run(item, nextitem)
        if seconds > self.allowed and all(report.passed for report in reports):
            seconds /= slowness()
            if seconds > self.allowed:
                again, reports = self._run(item, nextitem)
                seconds = min(seconds, again / slowness())
        self.judge(item, seconds, reports)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> tuple[float, list[pytest.TestReport]]:
        self._shared, begin = 0.0, processor_seconds()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        own = processor_seconds() - begin - self._shared
        return own + sum(self._shares_of(item)), reports

    def _shares_of(self, item: pytest.Item) -> Iterator[float]:
        names = set(getattr(item, "fixturenames", ()))
        for (name, node), share in self._shares.items():
            if name in names and item.nodeid.startswith(node):
                yield share

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        """Divide what tests share among those that use it, in whichever of them it is made."""
        if fixturedef.scope == "function" or self._depth:
            return (yield)
        with self._inside():
            begin = processor_seconds()
            try:
                return (yield)
            finally:
                spent = processor_seconds() - begin
                self._shared += spent
                name, node = fixturedef.argname, request.node.nodeid
                users = sum(
                    name in getattr(item, "fixturenames", ()) and item.nodeid.startswith(node)
                    for item in request.session.items
                )
                self._shares[name, node] = spent / max(1, users)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def judge(self, item: pytest.Item, seconds: float, reports: list[pytest.TestReport]) -> None:
        """Make a test that took too long a failed one."""
        if seconds <= self.allowed or any(report.failed or report.skipped for report in reports):
            return
        call = next(report for report in reports if report.when == "call")
        call.outcome = "failed"
        call.longrepr = (
            f"{item.nodeid} takes {seconds:.1f} processor seconds; a quick test may take {LIMIT}. Make it faster, "
            f"or list it: python tests/support/durations.py {item.nodeid.partition('::')[0]}"
        )


class Survey(Stopwatch):
    """Measures, and keeps what each test took; of a test with many slow cases, some are enough."""

    def __init__(self) -> None:
        super().__init__(tolerance=1)
        self.seconds: dict[str, float] = {}
        self.tests: set[str] = set()
        self.slow: set[str] = set()  # by the list, or marked by hand
        self._slow_cases: defaultdict[str, int] = defaultdict(int)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = {item.nodeid for item in session.items}
        self.slow = {item.nodeid for item in session.items if is_slow(item)}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        test = item.nodeid.partition("[")[0]
        if is_slow(item) or self._slow_cases[test] >= _ENOUGH:
            if not is_slow(item):
                self.seconds[item.nodeid] = LIMIT * 1.01
            item.session._setupstate.teardown_exact(nextitem)  # of the test before, which knew that this one follows
            return True
        return super().pytest_runtest_protocol(item, nextitem)

    def judge(self, item: pytest.Item, seconds: float, reports: list[pytest.TestReport]) -> None:
        self.seconds[item.nodeid] = seconds
        if seconds > LIMIT:
            self._slow_cases[item.nodeid.partition("[")[0]] += 1
            print(f"\n{seconds:7.1f}  {item.nodeid}", flush=True)


def listed(
    before: SlowTests, measured: Mapping[str, float], slow_ones: Iterable[str], tests: Iterable[str]
) -> SlowTests:
    """Return the list after a survey of `tests`, of which `slow_ones` were not run and `measured` took these seconds.

    A test or a file whose cases are all slow stands for them. What was not surveyed stays; what is gone goes.
    """
    tests = set(tests)
    paths = {test.partition("::")[0] for test in tests}
    kept = {name: s for name, s in before.seconds.items() if name.partition("::")[0] not in paths and _exists(name)}
    slow = {test: seconds for test, seconds in measured.items() if seconds > LIMIT}
    for test in slow_ones:
        name = before.name_of(test)
        slow[test] = before.seconds[name] if name else 0.0
    by_test = _whole(slow, tests, "[")
    by_file = _whole(by_test, {test.partition("[")[0] for test in tests}, "::")
    return SlowTests(kept | {name: seconds for name, seconds in by_file.items() if seconds or "::" not in name})


def _whole(slow: Mapping[str, float], tests: Iterable[str], mark: str) -> dict[str, float]:
    """Replace the parts of each whole by the whole, with the longest time, where all of them are slow."""
    parts: defaultdict[str, set[str]] = defaultdict(set)
    for test in tests:
        parts[test.partition(mark)[0]].add(test)
    result = dict(slow)
    for whole, names in parts.items():
        if all(name in slow for name in names):
            seconds = max(slow[name] for name in names)
            result = {name: value for name, value in result.items() if name not in names} | {whole: seconds}
    return result


def _exists(name: str) -> bool:
    return (ROOT / name.partition("::")[0]).exists()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="measure what the list has, too")
    parser.add_argument("paths", nargs="*")
    options = parser.parse_args()
    before, survey = SlowTests.load(), Survey()
    if options.again:
        SlowTests({n: s for n, s in before.seconds.items() if not n.startswith(tuple(options.paths))}).save()
    try:
        pytest.main(["-q", "-p", "no:xdist", "--hypothesis-profile", "quick", *options.paths], [survey])
    finally:
        # What another survey wrote in the meantime stays.
        listed(SlowTests.load(), survey.seconds, survey.slow, survey.tests).save()
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / room) for room in (".", "tests", "tests/support", "tests/jobs")]
    sys.exit(main())
