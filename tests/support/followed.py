"""Shadows that follow a run while engines train it: through its files, over sockets, and in two parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckpt.pipeline import Execution
from ckpt.serving.server import ChainServer
from ckpt.shadow.joined import JoinedShadows
from ckpt.shadow.mirror import LogMirror
from ckpt.shadow.server import Server
from ckpt.shadow.shadow import Shadow
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.gradients.parts import StatePart
from ckpt_formats.universal.gradients.record import Kind

WAYS = ("files", "socket", "parts")
HERE = NetworkAddress("127.0.0.1", 0)
ONE = Execution(workers=1)


class Stopped(Exception):
    """Whoever waits shall wait no longer."""


class Followed:
    """A run that is followed in every way. `step` and `at` may be called once the chain exists.

    files: a shadow reads the files of the run; its state is read in its own process. socket: a shadow fetches the log
    from a server of it, and its state is read over a socket, too. parts: two shadows read the files, each with its part
    of the state, and these are read over sockets as one.
    """

    def __init__(self, run: Path, stop: threading.Event, ways: tuple[str, ...] = WAYS) -> None:
        self._stop, self._open = stop, ExitStack()
        self._shadows: dict[str, list[Shadow]] = {}
        self._addresses: dict[str, list[NetworkAddress]] = {}
        while not (run / chain_file.NAME).exists():
            self._wait(0.05)  # a test waits for runs that begin minutes later
        try:
            for way in ways:
                self._begin(way, run)
        except BaseException:
            self._open.close()
            raise

    def close(self) -> None:
        self._open.close()

    @contextmanager
    def at(self, way: str, step: int) -> Iterator[Checkpoint]:
        """The state of the shadows of a way, which are brought to this step, and no further."""
        for shadow in self._shadows[way]:
            while shadow.step != step or not self._has_notes(shadow, step):
                if not shadow.poll(upto=step) and not shadow.has_more:
                    self._wait()
        if way == "files":
            with self._shadows[way][0].frozen() as checkpoint:
                yield checkpoint
        else:
            with JoinedShadows(self._addresses[way]) as joined:
                yield joined.checkpoint

    def verified(self, way: str) -> int | None:
        """The last step at which the shadows compared their states with the hashes of the run."""
        return min((shadow.verified for shadow in self._shadows[way]), key=lambda step: -1 if step is None else step)

    def _has_notes(self, shadow: Shadow, step: int) -> bool:
        """Did the shadow read what the run noted after this step? That comes after the gradients of the step."""
        assert shadow._state is not None
        return any(record.step == step for record in shadow._state.tail.last_step().records(0, Kind.NOTES))

    def _begin(self, way: str, run: Path) -> None:
        if way == "files":
            shadows = [Shadow(run, resources=ONE)]
        elif way == "parts":
            shadows = [Shadow(run, resources=ONE, part=StatePart(number, 2)) for number in (1, 2)]
        else:
            served = ChainServer(run, HERE)
            self._open.callback(served.close)
            shadows = [Shadow(self._open.enter_context(LogMirror(served.url)), resources=ONE)]
        self._shadows[way] = shadows
        if way != "files":
            servers = [Server(shadow, HERE) for shadow in shadows]
            for server in servers:
                self._open.callback(server.close)
            self._addresses[way] = [server.address for server in servers]

    def _wait(self, seconds: float = 0.005) -> None:
        if self._stop.is_set():
            raise Stopped
        time.sleep(seconds)
