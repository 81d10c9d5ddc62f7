"""Dataclasses whose methods the command compiles late are those that Python makes."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any

import pytest

from ckpt_cli import compile_dataclasses_late
from damage import SAMPLES


def point(below: bool) -> Any:
    """A class with what ours use: defaults, factories, fields left out, an order, slots, and a class below it."""

    @dataclass(frozen=True, order=True, slots=True)
    class Point:
        x: int
        y: int = 2
        names: list[str] = field(default_factory=list, compare=False)
        secret: str = field(default="s", repr=False)
        total: int = field(init=False, default=0)

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", self.x + self.y)

    @dataclass(frozen=True, order=True, kw_only=True)
    class Deep(Point):
        """A point."""

        z: Any = None

    return Deep if below else Point


@dataclass(frozen=True)
class Answer:
    """What a class does with the same arguments."""

    value: object
    error: str | None


def answers(make: Callable[..., Any]) -> Iterator[Answer]:
    def tried(call: Callable[[], object]) -> Answer:
        try:
            return Answer(call(), None)
        except (TypeError, FrozenInstanceError) as error:
            return Answer(None, f"{type(error).__name__}: {error}")

    yield tried(lambda: repr(make(1)))
    yield tried(lambda: make(1) == make(1) and make(1) != make(2))
    yield tried(lambda: hash(make(1, 5)))
    yield tried(lambda: make(1) < make(1, 3) <= make(4))
    yield tried(lambda: make(1) < 3)
    yield tried(lambda: make())
    yield tried(lambda: make(1, 2, w=3))
    yield tried(lambda: setattr(make(1), "x", 2))
    yield tried(lambda: delattr(make(1), "x"))
    yield tried(lambda: repr(replace(make(1), y=7)))
    yield tried(lambda: (make(1).total, make(1).names is make(1).names, make.__match_args__))
    yield tried(lambda: [make.__init__.__qualname__, make.__eq__.__name__, make.__repr__.__qualname__])


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(dataclasses), "exec", exec)  # as it is, when the test ends
    monkeypatch.setitem(sys.modules, "ckpt_points", sys.modules[__name__])  # classes made here are ours
    monkeypatch.setitem(globals(), "__name__", "ckpt_points")
    compile_dataclasses_late()


@pytest.mark.parametrize("below", [False, True])
def test_a_dataclass_that_is_compiled_late_answers_as_one_of_python(below: bool, late: None) -> None:
    late_answers = list(answers(point(below)))
    vars(dataclasses)["exec"] = exec
    assert late_answers == list(answers(point(below)))


def test_a_method_that_was_called_once_stands_in_the_class_itself(late: None) -> None:
    cls = point(below=False)
    stub = cls.__init__
    cls(1)
    assert cls.__init__ is not stub
    assert cls.__init__.__code__.co_varnames[:2] == ("self", "x")


def test_a_method_of_a_class_above_is_compiled_into_that_class(late: None) -> None:
    @dataclass
    class Base:
        x: int

    class Below(Base):
        def __init__(self, x: int) -> None:
            super().__init__(x)

    assert Below(3).x == 3
    assert "__init__" in vars(Below)
    assert [Base(4).x, Below(5).x] == [4, 5]
    assert Base.__init__.__code__.co_varnames == ("self", "x")


def test_a_class_of_a_library_is_made_at_once(late: None) -> None:
    other: Any = dataclass(type("Other", (), {"__annotations__": {"x": int}, "__module__": "collections"}))
    assert other.__init__.__code__.co_varnames == ("self", "x")


COMPILED = """
import builtins, json, sys
sources = []
def counted(source, *names):
    sources.append(source)
    return builtins.exec(source, *names)
import ckpt_cli
ckpt_cli.exec = counted
sys.argv = ["ckpt", "inspect", {source!r}]
from ckpt_cli.__main__ import start
try: start()
except SystemExit as end: assert not end.code
print(json.dumps([source for source in sources if source.startswith("def __create_fn__")]), file=sys.stderr)
"""


def test_inspect_compiles_few_methods_of_its_dataclasses() -> None:
    """Of about 600 methods that 110 classes have."""
    code = COMPILED.format(source=str(SAMPLES / "universal-1-plain"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert 10 < len(json.loads(done.stderr.splitlines()[-1])) < 90
