"""A slow network in front of a server: each byte arrives later, and only so many of them in a second."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

_BLOCK = 1 << 16
_WINDOW = 1 << 24
"""Bytes on their way in one direction of a connection, after which it waits."""


@dataclass
class Line:
    """One direction of the network, which all connections share."""

    delay: float
    bytes_per_second: float
    free_at: float = 0.0

    def arrival(self, nbytes: int, now: float) -> float:
        """Return when bytes that are sent now have arrived."""
        self.free_at = max(self.free_at, now) + nbytes / self.bytes_per_second
        return self.free_at + self.delay


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line) -> None:
    """Let what is read arrive at the writer, until the end."""
    now = asyncio.get_running_loop().time
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WINDOW // _BLOCK)

    async def send() -> None:
        while True:
            due, data = await queue.get()
            if (pause := due - now()) > 0:
                await asyncio.sleep(pause)
            if not data:
                break
            writer.write(data)
            await writer.drain()

    sending = asyncio.create_task(send())
    with suppress(OSError):
        while data := await reader.read(_BLOCK):
            await queue.put((line.arrival(len(data), now()), data))
    await queue.put((line.arrival(0, now()), b""))
    with suppress(OSError):
        await sending
    with suppress(OSError):
        writer.close()


async def serve(host: str, port: int, round_trip: float, bytes_per_second: float, ready: Connection) -> None:
    there, back = (Line(round_trip / 2, bytes_per_second) for _ in range(2))

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(round_trip)  # the handshake
        with suppress(OSError):
            answers, requests = await asyncio.open_connection(host, port)
            await asyncio.gather(carry(reader, requests, there), carry(answers, writer, back))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _run(*given: object) -> None:
    asyncio.run(serve(*given))  # type: ignore[arg-type]


@contextmanager
def slow(endpoint: str, round_trip: float, bytes_per_second: float) -> Iterator[str]:
    """Yield the endpoint of a server behind a slow network, which is a process of its own.

    Args:
        endpoint: Such as `http://127.0.0.1:8333`.
        round_trip: Seconds; half of them in each direction, and one round trip for each new connection.
        bytes_per_second: In each direction, of all connections together.
    """
    url, (here, child) = urlsplit(endpoint), multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(url.hostname, url.port, round_trip, bytes_per_second, child), daemon=True
    )
    process.start()
    try:
        yield f"{url.scheme}://127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()
