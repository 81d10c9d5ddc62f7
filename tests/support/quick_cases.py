"""Choose the cases of a test with parameters that `make quick` runs: as many as its mark `quick(n)` says, else four.

They are spread evenly over those that are not slow by themselves. Each run of pytest marks the others `slow`
(`mark_others_slow`), so that the mark means the same everywhere. `make quick` chooses before: it makes no items of what
it leaves out, which is two thirds of them (`QuickCases`). Both choose alike.
"""

from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from typing import Any, TypeVar

import pytest

import durations
from effort import QUICK_CASES

Case = TypeVar("Case")


def mark_others_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the cases slow that `make quick` does not run."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not durations.is_slow(item):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        quick = set(_chosen(of_one, of_one[0]))
        for item in of_one:
            if item not in quick:
                item.add_marker("slow")


def _chosen(cases: Sequence[Case], test: pytest.Item) -> list[Case]:
    """Those of the cases of a test that `make quick` runs; none of `cases` is slow by itself."""
    mark = test.get_closest_marker("quick")
    count = mark.args[0] if mark else QUICK_CASES
    if len(cases) <= count:
        return [*cases]
    return [cases[i * len(cases) // count] for i in range(count)]


class QuickCases:
    """A plugin of pytest that makes no items of slow tests and cases.

    Attributes:
        omitted: The names of the tests and cases that it has left out.
    """

    def __init__(self, slow: durations.SlowTests) -> None:
        """`slow`: the tests that are slow without a mark."""
        self._slow = slow
        self.omitted: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: pytest.Module | pytest.Class, name: str, obj: object) -> Any:
        """Return no items (`[]`) for a function that is slow as a whole; None leaves it to pytest."""
        if not collector.istestfunction(obj, name):
            return None
        nodeid = f"{collector.nodeid}::{name}"
        if not self._is_slow(nodeid, [*collector.iter_markers(), *getattr(obj, "pytestmark", [])]):
            return None
        self.omitted.append(nodeid)
        return []

    @pytest.hookimpl(wrapper=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> Generator[None]:
        """Leave only the chosen cases of a test, after pytest has made all of them from its parameters."""
        yield
        cases = {f"{metafunc.definition.nodeid}[{call.id}]": call for call in metafunc._calls}
        fast = [name for name, call in cases.items() if not self._is_slow(name, call.marks)]
        if not fast:  # pytest runs a test whose cases are all taken away once, without parameters: `-m` leaves them out
            return
        chosen = _chosen(fast, metafunc.definition)
        self.omitted += cases.keys() - set(chosen)
        metafunc._calls = [cases[name] for name in chosen]

    def _is_slow(self, nodeid: str, marks: Iterable[pytest.Mark | pytest.MarkDecorator]) -> bool:
        return bool(self._slow.name_of(nodeid) or durations.SLOW_MARKS & {mark.name for mark in marks})
