"""A pytest session that collects once, then runs chosen tests in forked processes: first to see what each reaches, then
for each fault, until one fails.

Nothing is run in the process that collects, so every fork starts as clean as it did: no caches filled, no threads.
"""

import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any

import fault_switch  # tests/campaigns/mutating/site
import pytest

_MEMORY = 24 << 30
"""Address space of a fork: a fault in a check of sizes shall not take the machine along."""


@dataclass(frozen=True)
class Test:
    """A test that passes, and how long it takes."""

    name: str
    seconds: float
    quick: bool
    reaches: frozenset[int]

    @property
    def file(self) -> str:
        return self.name.split("::")[0]


@dataclass(frozen=True)
class Ending:
    """How a fork ended: the test that failed, if any, what it said, and how many tests were run."""

    failed: str | None
    message: str
    ran: int
    seconds: float
    out_of_time: bool = False


class Plugin:
    """Hands the collected tests to `work` instead of running them."""

    def __init__(self, work: Callable[["Collected"], None]) -> None:
        self._work = work

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """After `conftest` has made its settings, before tests are imported: always the same examples, none shrunk."""
        from hypothesis import Phase, settings

        settings.register_profile(
            "faults", settings.default, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
        )
        settings.load_profile("faults")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("tests cannot be collected")
        self._work(Collected(session))
        return True


class Collected:
    """The collected tests, by name."""

    def __init__(self, session: pytest.Session) -> None:
        self.items: dict[str, pytest.Item] = {item.nodeid: item for item in session.items}
        self._config = session.config

    def record(self, names: Sequence[str], reach: Path, outcomes: Path) -> int:
        """Fork, run these tests with no fault on, and write what each asks for and how it ends. Returns the process."""
        if process := os.fork():
            return process
        with self._fork():
            recorder = _Recorder(reach, outcomes, [self.items[name] for name in names])
            self._config.pluginmanager.register(recorder)
            self._run(names)
        os._exit(0)

    def start(self, number: int, names: Sequence[str]) -> "Fork":
        """Fork, turn a fault on (-1: none), and run these tests until one fails."""
        out, into = os.pipe()
        process = os.fork()
        if not process:
            os.close(out)
            with self._fork():
                fault_switch.switch(number)
                self._config.pluginmanager.register(_FirstFailure(into))
                self._run(names)
                os.write(into, b'["end"]\n')
            os._exit(0)
        os.close(into)
        return Fork(process, out)

    def _run(self, names: Sequence[str]) -> None:
        items = [self.items[name] for name in names]
        for item, after in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)

    @contextlib.contextmanager
    def _fork(self) -> Iterator[None]:
        """A process group, folders and streams of its own, and no way back into pytest."""
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        folder = Path(tempfile.mkdtemp(prefix=f"fork-{os.getpid()}-", dir=os.environ["CKPT_FAULTS"]))
        self._config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        for stream, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
            os.dup2(os.open(os.devnull, flags), stream)
        try:
            yield
        except BaseException as error:
            Path(os.environ["CKPT_FAULTS"], f"crash-{os.getpid()}").write_text(repr(error))
            os._exit(1)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Fork:
    """A running fork, as seen from outside."""

    def __init__(self, process: int, out: int) -> None:
        self.process = process
        self.out = out
        self._began = time.monotonic()
        self._test: str | None = None
        self._deadline = self._began + 60
        self._ran = 0
        self._rest = b""

    def look(self, limits: Callable[[str], float], budget: float) -> Ending | None:
        """What has come of it; None while it runs. A test over its limit counts as failed, and is stopped."""
        ready = bool(select([self.out], [], [], 0)[0])
        if ready:
            text = os.read(self.out, 1 << 16)
            if not text:
                return self._end(self._test, "the process died")
            *lines, self._rest = (self._rest + text).split(b"\n")
            for line in map(json.loads, lines):
                match line:
                    case ["start", test]:
                        self._test, self._deadline = test, time.monotonic() + limits(test)
                        self._ran += 1
                    case ["fail", message]:
                        return self._end(self._test, message)
                    case ["end"]:
                        return self._end(None, "")
        now = time.monotonic()
        if now > self._deadline:
            return self._end(self._test, "takes too long")
        if now > self._began + budget:
            return self._end(None, "", out_of_time=True)
        return None

    def _end(self, failed: str | None, message: str, out_of_time: bool = False) -> Ending:
        self.stop()
        return Ending(failed, message, self._ran, time.monotonic() - self._began, out_of_time)

    def stop(self) -> None:
        """End it, whatever it does, with all that it has started."""
        stop(self.process)
        os.close(self.out)


def stop(process: int) -> None:
    """End a fork with all that it has started, and remove its folder."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)
    for folder in Path(os.environ["CKPT_FAULTS"]).glob(f"fork-{process}-*"):
        for mount in Path("/proc/mounts").read_text().splitlines():
            if (where := mount.split()[1]).startswith(str(folder)):
                subprocess.run(["umount", where], check=False)
        shutil.rmtree(folder, ignore_errors=True)


class _FirstFailure:
    """Tells the parent which test begins, and of the first that fails."""

    def __init__(self, into: int) -> None:
        self._into = into

    def _say(self, *words: str) -> None:
        os.write(self._into, json.dumps(words).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._say("fail", _message(report))
            time.sleep(60)  # the parent ends this process, and all that the test has started


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)[:300]


class _Recorder:
    """Writes which faults each test asks for, and how each test ends.

    What a fixture of a module or of the session runs is counted for every test that uses it, and what a cache of the
    product keeps is computed for each test anew.
    """

    def __init__(self, reach: Path, outcomes: Path, items: Iterable[pytest.Item]) -> None:
        self._record = fault_switch.record(str(reach))
        self._outcomes = outcomes.open("w")
        self._seconds = 0.0
        self._failed = self._skipped = False

    def _enter(self, context: str) -> None:
        self._record.enter(context)
        os.environ["CKPT_REACH_CONTEXT"] = context

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _forget()
        self._enter(nodeid)
        self._seconds, self._failed, self._skipped = 0.0, False, False

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = self._record.context
        if name := _shared(fixturedef):
            self._enter(name)
        try:
            return (yield)  # type: ignore[return-value]
        finally:
            self._enter(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed
        self._skipped |= report.skipped
        self._seconds += report.duration
        if report.when == "teardown":
            outcome = "failed" if self._failed else "skipped" if self._skipped else "passed"
            self._outcomes.write(json.dumps([report.nodeid, outcome, round(self._seconds, 4)]) + "\n")
            self._outcomes.flush()


def _shared(fixturedef: Any) -> str | None:
    return None if fixturedef.scope == "function" else f"fixture {fixturedef.baseid}::{fixturedef.argname}"


def shared_fixtures(item: pytest.Item) -> list[str]:
    """The fixtures of this test that other tests use too, as the record names them."""
    known = getattr(item, "_fixtureinfo", None)
    names = [_shared(definitions[-1]) for definitions in known.name2fixturedefs.values()] if known else []
    return [name for name in names if name]


def _forget() -> None:
    """Empty the product's caches of functions."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ckpt"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == name:
                    value.cache_clear()
