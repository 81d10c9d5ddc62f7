"""The list of slow tests: what it covers, what a survey writes, and what fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import durations
from durations import LIMIT, SlowTests, Stopwatch, is_marked_slow, listed
from quick_cases import QuickCases

LIST = SlowTests({"tests/a.py::test_x[one case]": 0.7, "tests/a.py::test_y": 2.0, "tests/b.py": 9.0, "tests/c": 1.0})


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("tests/a.py::test_x[one case]", "tests/a.py::test_x[one case]"),
        ("tests/a.py::test_x[two]", None),
        ("tests/a.py::test_y[a/b::c]", "tests/a.py::test_y"),
        ("tests/a.py::test_yes", None),
        ("tests/b.py::Class::test_z", "tests/b.py"),
        ("tests/b.py", "tests/b.py"),
        ("tests/c/d/e.py::test", "tests/c"),
        ("tests/cd.py::test", None),
    ],
)
def test_a_name_covers_its_cases_its_tests_and_its_files(test: str, name: str | None) -> None:
    assert LIST.name_of(test) == name


@pytest.mark.parametrize(
    ("text", "is_slow"),
    [
        ("pytestmark = pytest.mark.engines\n", True),
        ("pytestmark = [pytest.mark.timeout(9), pytest.mark.slow]\n", True),
        ("pytestmark = [\n    pytest.mark.timeout(9),\n    pytest.mark.engines,\n]\n", True),
        ("pytestmark = pytest.mark.timeout(9)\n\n\n@pytest.mark.slow\ndef test_x() -> None: ...\n", False),
        ("pytestmark = [\n    pytest.mark.timeout(9),\n]\n\n\n@pytest.mark.slow\ndef test_x() -> None: ...\n", False),
        ("pytestmark = pytest.mark.slower\n", False),
    ],
)
def test_a_file_whose_mark_makes_all_of_it_slow_is_known_by_its_text(tmp_path: Path, text: str, is_slow: bool) -> None:
    (file := tmp_path / "test_x.py").write_text(text)
    assert is_marked_slow(file) == is_slow
    assert not is_marked_slow(tmp_path)


def test_the_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    LIST.save(tmp_path / "list")
    assert SlowTests.load(tmp_path / "list") == LIST


def test_every_name_of_the_list_is_that_of_a_test(request: pytest.FixtureRequest) -> None:
    tests = request.config.stash[durations.COLLECTED]
    some = {argument.partition("::")[0] for argument in request.config.args if "::" in argument}
    slow = SlowTests.load()
    paths = {path for test in tests if (path := test.partition("::")[0]) not in some and not slow.name_of(path)}
    unknown = slow.unknown(tests, paths)
    assert not unknown, "no such tests: run `python tests/support/durations.py` with their files, which lists them anew"


def test_the_longest_files_are_there() -> None:
    longest = SlowTests.load(durations.LONGEST).seconds
    assert len(longest) > 20
    assert [name for name in longest if not (durations.ROOT / name).is_file()] == []


def test_a_name_of_no_test_is_unknown_also_when_its_file_is_gone() -> None:
    slow = SlowTests({"tests/conftest.py::test_x": 1.0, "tests/conftest.py::test_y": 1.0, "tests/gone.py": 1.0})
    tests = ["tests/conftest.py::test_x[a]", "tests/conftest.py::test_z"]
    assert slow.unknown(tests, ["tests/conftest.py"]) == ["tests/conftest.py::test_y", "tests/gone.py"]
    assert slow.unknown([], []) == ["tests/gone.py"]


def test_a_survey_lists_cases_tests_and_files_and_keeps_what_it_did_not_see() -> None:
    here = "tests/conftest.py"
    before = SlowTests(
        {f"{here}::test_old": 3.0, f"{here}::test_gone": 4.0, "tests/support/held.py": 5.0, "tests/gone.py": 1.0}
    )
    measured = {
        f"{here}::test_x[a]": 0.1,
        f"{here}::test_x[b]": 0.6,
        f"{here}::test_y[a]": 0.7,
        f"{here}::test_y[b]": 0.8,
    }
    slow = [f"{here}::test_old", f"{here}::test_by_hand", "tests/by_hand.py::test"]
    assert listed(before, measured, slow, [*measured, *slow]).seconds == {
        "tests/support/held.py": 5.0,
        f"{here}::test_old": 3.0,
        f"{here}::test_x[b]": 0.6,
        f"{here}::test_y": 0.8,
        "tests/by_hand.py": 0.0,
    }


def _report(item: Any) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, ("a.py", 1, "test"), {}, "passed", None, "call")


@pytest.mark.parametrize(("seconds", "outcome"), [(LIMIT * 2.9, "passed"), (LIMIT * 3.1, "failed")])
def test_a_quick_test_that_grew_fails_and_says_what_to_run(seconds: float, outcome: str) -> None:
    item: Any = SimpleNamespace(nodeid="tests/a.py::test_x")
    report = _report(item)
    Stopwatch().judge(item, seconds, [report])
    assert report.outcome == outcome
    if outcome == "failed":
        assert "python tests/support/durations.py tests/a.py" in str(report.longrepr)


def _test_of(marks: list[pytest.MarkDecorator], cases: dict[str, list[pytest.Mark]]) -> Any:
    """What pytest gives to `pytest_generate_tests` for a test with such cases."""
    by_name = {mark.name: mark.mark for mark in marks}
    definition = SimpleNamespace(nodeid="tests/a.py::test_x", get_closest_marker=by_name.get)
    return SimpleNamespace(definition=definition, _calls=[SimpleNamespace(id=n, marks=m) for n, m in cases.items()])


@pytest.mark.parametrize(
    ("marks", "cases", "quick"),
    [
        ([], "abc", "abc"),
        ([], "abcdefgh", "aceg"),
        ([pytest.mark.quick(2)], "abcdefgh", "ae"),
        ([pytest.mark.quick(9)], "abcdefgh", "abcdefgh"),
    ],
)
def test_quick_cases_are_evenly_spread_and_slow_ones_are_not_among_them(
    marks: list[pytest.MarkDecorator], cases: str, quick: str
) -> None:
    slow = {"one case": [], "by hand": [pytest.mark.slow.mark], "by engine": [pytest.mark.engines.mark]}
    plugin = QuickCases(LIST)
    test = _test_of(marks, {**slow, **{case: [] for case in cases}})
    for _ in plugin.pytest_generate_tests(test):
        pass
    assert "".join(call.id for call in test._calls) == quick
    omitted = {*slow, *cases} - {*quick}
    assert sorted(plugin.omitted) == sorted(f"tests/a.py::test_x[{case}]" for case in omitted)


def test_a_test_whose_cases_are_all_slow_stays_as_it_is() -> None:
    test = _test_of([], {"one case": []})
    for _ in QuickCases(LIST).pytest_generate_tests(test):
        pass
    assert [call.id for call in test._calls] == ["one case"]


@pytest.mark.parametrize(
    ("name", "marks", "is_left_out"),
    [("test_y", [], True), ("test_z", [pytest.mark.slow.mark], True), ("test_z", [], False), ("helper", [], False)],
)
def test_quick_cases_leave_out_tests_that_are_slow_as_a_whole(
    name: str, marks: list[pytest.Mark], is_left_out: bool
) -> None:
    def is_test(_: object, name: str) -> bool:
        return name.startswith("test")

    file: Any = SimpleNamespace(nodeid="tests/a.py", istestfunction=is_test, iter_markers=lambda: iter(()))
    plugin = QuickCases(LIST)
    assert (plugin.pytest_pycollect_makeitem(file, name, SimpleNamespace(pytestmark=marks)) == []) == is_left_out
    assert plugin.omitted == ([f"tests/a.py::{name}"] if is_left_out else [])
