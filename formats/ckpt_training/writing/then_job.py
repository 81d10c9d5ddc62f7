"""What follows each published save: a function of the user, called in a process of its own with the path of the save.

`python -m ckpt_training.writing.then_job FUNCTION ARGUMENTS PATH STATUS` is that process: a function by its module and
name, keyword arguments in JSON, the path, and a descriptor for the reason of a failure.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_training.writing.trainer_messages import text_of

_HINT = "Define it in a module, and pass it, or functools.partial(FUNCTION, name=value) with plain values."
_MODULE = "ckpt_training.writing.then_job"
_MAX_REASON = 1000


@dataclass(frozen=True)
class ThenJob:
    """A function that another process can import, and its keyword arguments."""

    function: str
    """`module:name`."""
    arguments: Mapping[str, Any]
    """Plain values: what JSON has."""

    @classmethod
    def of(cls, function: Callable[..., object]) -> "ThenJob":
        """The job that calls a function of a module, or a partial of one with keyword arguments.

        Raises `InvalidArgumentError` if another process could not import it, or for arguments that are not plain.
        """
        arguments: dict[str, Any] = {}
        called: object = function
        if isinstance(function, partial):
            if function.args:
                raise InvalidArgumentError("`then` gets the path as its first argument", hint=_HINT)
            called, arguments = function.func, dict(function.keywords)
        module, name = getattr(called, "__module__", None), getattr(called, "__qualname__", "<")
        if not isinstance(module, str) or module == "__main__" or "<" in name:
            raise InvalidArgumentError(f"another process cannot import {called!r:.100}", hint=_HINT)
        try:
            if attrgetter(name)(sys.modules[module]) is not called:
                raise AttributeError
        except (AttributeError, KeyError):
            raise InvalidArgumentError(f"{module}.{name} is not what `then` is", hint=_HINT) from None
        try:
            same = json.loads(json.dumps(arguments)) == arguments
        except (TypeError, ValueError):
            same = False
        if not same:
            raise InvalidArgumentError(f"`then` has arguments that are not plain: {arguments!r:.100}", hint=_HINT)
        return cls(f"{module}:{name}", arguments)

    def run(self, path: str) -> str | None:
        """Call the function in a process, and wait for its end. Returns why it failed; None if it did not."""
        own, status = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, self.function, json.dumps(self.arguments), path, str(status)],
                stdin=subprocess.DEVNULL,
                pass_fds=(status,),
            )
        except OSError as error:
            os.close(own)
            return f"its process cannot be started: {error.strerror}"
        finally:
            os.close(status)
        with open(own, "rb") as file:
            reason = file.read(_MAX_REASON).decode("utf-8", "replace")
        code = process.wait()
        return reason or (f"its process has ended with {code}" if code else None)


def main() -> int:
    function, arguments, path, status = sys.argv[1:]
    os.set_inheritable(int(status), False)  # processes of the function must not keep it open
    module, _, name = function.partition(":")
    try:
        attrgetter(name)(import_module(module))(path, **json.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        with suppress(OSError):
            os.write(int(status), text_of(error).encode()[:_MAX_REASON])
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
