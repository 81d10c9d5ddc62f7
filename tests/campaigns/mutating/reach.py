"""Which tests reach which faults: recorded once, for each file of tests, and kept until the file changes."""

import json
import os
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from mutating.faults import ROOT, Fault
from mutating.session import Collected, Test, shared_fixtures, stop

_PATIENCE = 1500
"""Seconds: the longest test takes less, also where its fixture trains all models and the machine is busy."""


def recorded(faults: Sequence[Fault], collected: Collected, path: Path, options: Namespace) -> list[Test]:
    """The tests that pass, with what each reaches. A file of tests is recorded if it was not yet, or has changed."""
    known = {} if options.record or not path.exists() else json.loads(path.read_text())
    keys = {fault.key for fault in faults}
    if not keys <= set(known.get("faults", ())):
        known = {"faults": sorted(keys), "files": {}}
    files: dict[str, list[str]] = defaultdict(list)
    for name in collected.items:
        files[name.split("::")[0]].append(name)
    missing = {
        file: list(_some(names, options.cases))
        for file, names in files.items()
        if not _is_known(known["files"].get(file), file, names, options.cases)
    }
    if missing:
        print(f"recording {sum(map(len, missing.values()))} tests of {len(missing)} files", flush=True)
        _Recording(faults, collected, known, path, options.cases).run(missing, options.jobs)
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


def _is_known(known: Mapping[str, Any] | None, file: str, names: Sequence[str], cases: int | None) -> bool:
    """Is it recorded as it is now, with all of these tests, or with some if only some are asked for?"""
    if known is None or known["content"] != _content(file):
        return False
    return set(names) <= set(known["tests"]) or bool(cases and known["cases"])


def _some(names: Sequence[str], cases: int | None) -> Iterator[str]:
    """At most so many cases of each test, spread over all of them."""
    functions: dict[str, list[str]] = {}
    for name in names:
        functions.setdefault(name.partition("[")[0], []).append(name)
    for of_one in functions.values():
        step = max(1, len(of_one) / cases) if cases else 1
        yield from (of_one[int(i * step)] for i in range(int(len(of_one) / step)))


def _content(file: str) -> str:
    return sha256((ROOT / file).read_bytes()).hexdigest()


class _Recording:
    """Forks, one for each file of tests, a few at a time."""

    def __init__(
        self, faults: Sequence[Fault], collected: Collected, known: dict[str, Any], path: Path, cases: int | None
    ) -> None:
        self._faults, self._collected, self._known, self._path, self._cases = faults, collected, known, path, cases
        self._folder = Path(os.environ["CKPT_FAULTS"])

    def run(self, files: Mapping[str, Sequence[str]], jobs: int) -> None:
        waiting = sorted(files, key=lambda file: len(files[file]), reverse=True)
        running: dict[int, tuple[str, float]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    file = waiting.pop()  # the one with fewest tests, so that most is known soon
                    process = self._collected.record(files[file], self._lines("reach", file), self._lines("ends", file))
                    running[process] = file, time.monotonic()
                process, how = self._first_to_end(running)
                file, began = running.pop(process)
                stop(process)
                self._note(file, files[file], time.monotonic() - began, how)
        finally:
            for process in running:
                stop(process)

    def _first_to_end(self, running: Mapping[int, tuple[str, float]]) -> tuple[int, str]:
        """The next fork that ends, or in which no test has ended for `_PATIENCE` seconds: it waits for something."""
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process in running:
                return process, f", ended with {os.waitstatus_to_exitcode(status)}" if status else ""
            for fork, (file, began) in running.items():
                ends = self._lines("ends", file)
                last = ends.stat().st_mtime if ends.exists() else time.time() - (time.monotonic() - began)
                if time.time() - last > _PATIENCE:
                    return fork, f", killed: no test ended in {_PATIENCE} s"
            time.sleep(0.05)

    def _lines(self, what: str, file: str) -> Path:
        return self._folder / f"{what}-{file.replace('/', '-')}"

    def _note(self, file: str, names: Sequence[str], seconds: float, how: str) -> None:
        by_context = defaultdict(set)
        for line in self._lines("reach", file).read_text().splitlines():
            number, _, context = line.partition("\t")
            by_context[context].add(self._faults[int(number)].key)
        tests = {name: ["lost", 0, []] for name in names}
        for name, outcome, took in map(json.loads, self._lines("ends", file).read_text().splitlines()):
            contexts = (name, *shared_fixtures(self._collected.items[name]))
            tests[name] = [outcome, took, sorted(set().union(*(by_context.get(c, ()) for c in contexts)))]
        self._known["files"][file] = {"content": _content(file), "cases": self._cases, "tests": tests}
        self._path.write_text(json.dumps(self._known))
        bad = [name for name, (outcome, *_) in tests.items() if outcome in ("failed", "lost")]
        print(f"{file}: {len(tests)} tests, {seconds:.0f} s{how}{f', failed: {bad[:9]}' if bad else ''}", flush=True)
