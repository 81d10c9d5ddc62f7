"""The cases of a test that `make quick` runs: so many as its mark `quick(n)` says, else four, evenly spread."""

from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from typing import Any, TypeVar

import pytest

import durations
from effort import QUICK_CASES

Case = TypeVar("Case")


def mark_others_slow(items: Iterable[pytest.Item]) -> None:
    """Leave some cases of each test to `make quick`; the others are slow."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not durations.is_slow(item):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        quick = set(_some(of_one, of_one[0]))
        for item in of_one:
            if item not in quick:
                item.add_marker("slow")


def _some(cases: Sequence[Case], test: pytest.Item) -> list[Case]:
    mark = test.get_closest_marker("quick")
    count = mark.args[0] if mark else QUICK_CASES
    if len(cases) <= count:
        return [*cases]
    return [cases[i * len(cases) // count] for i in range(count)]


class QuickCases:
    """A plugin of pytest for `make quick`: of what is slow no items are made, which is a third of collecting."""

    def __init__(self, slow: durations.SlowTests) -> None:
        self.slow = slow
        self.omitted: list[str] = []
        """The names of tests and cases of which there are no items."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: pytest.Module | pytest.Class, name: str, obj: object) -> Any:
        if not collector.istestfunction(obj, name):
            return None
        nodeid = f"{collector.nodeid}::{name}"
        marks = [*collector.iter_markers(), *getattr(obj, "pytestmark", [])]
        if not (self.slow.name_of(nodeid) or durations.SLOW_MARKS & {mark.name for mark in marks}):
            return None
        self.omitted.append(nodeid)
        return []

    @pytest.hookimpl(wrapper=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> Generator[None]:
        yield
        cases = {f"{metafunc.definition.nodeid}[{call.id}]": call for call in metafunc._calls}
        fast = [
            name
            for name, call in cases.items()
            if not (self.slow.name_of(name) or durations.SLOW_MARKS & {mark.name for mark in call.marks})
        ]
        if fast:  # else pytest would run it once, without parameters
            quick = _some(fast, metafunc.definition)
            self.omitted += cases.keys() - set(quick)
            metafunc._calls = [cases[name] for name in quick]
