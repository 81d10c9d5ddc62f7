"""Loads modules with all their faults in them, each behind a switch; in pytest's process and in those that tests start.

The code of each such module was compiled before, into `FOLDER/MODULE.code`. It asks `__ckpt_fault__(number)` wherever a
fault could happen. The answer is True for the one fault that is on; while reach is recorded, it is always False, and
each question leaves a line in `CKPT_REACH`: what ran, and the fault's number.
"""

from __future__ import annotations

import builtins
import marshal
import os
import sys
from importlib._bootstrap_external import spec_from_file_location  # importlib.util imports much more
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False  # typing is not to be imported where a test counts what is
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

_NONE = -1
_write = os.write  # tests may put something else there


class _Loader(SourceFileLoader):
    """A module's code with faults in it; its source, path and data files stay the file's own."""

    def __init__(self, name: str, path: str, code: Any) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> Any:
        return self._code


class _Finder:
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("ckpt"):
            return None
        try:
            with open(f"{self._folder}/{name}.code", "rb") as file:
                origin, code = marshal.load(file)
        except FileNotFoundError:
            return None
        return spec_from_file_location(name, origin, loader=_Loader(name, origin, code))


class _Record:
    """Which faults were asked for, by what."""

    def __init__(self, path: str, context: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._seen: dict[str, set[int]] = {}
        self.enter(context)

    def enter(self, context: str) -> None:
        self.context = context
        self._now = self._seen.setdefault(context, set())

    def __call__(self, number: int) -> bool:
        if number not in self._now:
            self._now.add(number)
            try:  # noqa: SIM105 -- contextlib is not to be imported either
                _write(self._file, f"{number}\t{self.context}\n".encode())
            except OSError:
                pass  # the test has set a limit to the size of files
        return False


def install(folder: str) -> None:
    """Import the modules in `folder` with their faults; which one is on, the environment says."""
    sys.meta_path.insert(0, _Finder(folder))  # type: ignore[arg-type]
    if reach := os.environ.get("CKPT_REACH"):
        record(reach, os.environ.get("CKPT_REACH_CONTEXT", ""))
    else:
        switch(int(os.environ.get("CKPT_FAULT", _NONE)))


def switch(number: int = _NONE) -> None:
    """Turn on one fault, or none, here and in processes started from now on."""
    os.environ["CKPT_FAULT"] = str(number)
    os.environ.pop("CKPT_REACH", None)
    builtins.__ckpt_fault__ = number.__eq__  # type: ignore[attr-defined]


def record(path: str, context: str = "") -> _Record:
    """Turn on no fault, and write down which ones are asked for."""
    os.environ["CKPT_REACH"] = path
    recorder = _Record(path, context)
    builtins.__ckpt_fault__ = recorder  # type: ignore[attr-defined]
    return recorder
