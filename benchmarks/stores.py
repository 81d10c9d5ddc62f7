"""Converting from an object store: `python benchmarks/stores.py --gigabytes 1 --rounds 3`.

DeepSpeed's ZeRO-1 state of a real training step (`big_zero.py`) lies in SeaweedFS on this machine. It is converted to
the universal format from the disk and from the store, and requested with obstore as the measure of what the store
gives: `requests` keeps nothing, `download` writes the files. A proxy adds 30 ms to each request, as the way to a store
of a cloud does; another one also limits the rate of all answers, as a network does. `blocks only` is ckpt without
requests ahead. Client, server and proxy share the cores here, so rates are lower bounds. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from measure import in_turn, medians, size

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

from object_stores import StoreServer, seaweedfs  # noqa: E402

CKPT = [sys.executable, "-m", "ckpt_cli"]
BLOCKS_ONLY = """
import sys
from contextlib import nullcontext
import ckpt.pipeline
from ckpt_formats.stores import read_ahead
sys.modules["ckpt.pipeline.write_files"].prefetched = lambda groups, *_: nullcontext([None] * len(groups))
read_ahead._MAX_RUN = 1
read_ahead.ReadAhead._ahead = lambda *_: None
from ckpt_cli.main import run
sys.argv[0] = "ckpt"
run()
"""
REQUESTS_ONLY = """
import obstore
from concurrent.futures import ThreadPoolExecutor
from obstore.store import from_url
store = from_url("s3://bucket", client_options={"allow_http": True})
def fetch(part):
    path, begin, size = part
    return len(obstore.get_range(store, path, start=begin, length=min(8 << 20, size - begin)))
metas = [meta for page in obstore.list(store, "run") for meta in page]
parts = [(meta["path"], begin, meta["size"]) for meta in metas for begin in range(0, meta["size"], 8 << 20)]
with ThreadPoolExecutor(16) as pool:
    assert sum(pool.map(fetch, parts)) == sum(meta["size"] for meta in metas)
"""
DOWNLOAD = """
import sys, obstore
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from obstore.store import from_url
store, target = from_url("s3://bucket", client_options={"allow_http": True}), Path(sys.argv[1])
def parts(meta):
    for begin in range(0, meta["size"], 8 << 20):
        yield meta["path"], begin, min(8 << 20, meta["size"] - begin)
def fetch(part):
    path, begin, nbytes = part
    data = obstore.get_range(store, path, start=begin, length=nbytes)
    with open(target / path.replace("/", "_"), "r+b") as file:
        file.seek(begin)
        file.write(data)
target.mkdir()
metas = [meta for page in obstore.list(store, "run") for meta in page]
for meta in metas:
    (target / meta["path"].replace("/", "_")).touch()
with ThreadPoolExecutor(16) as pool:
    list(pool.map(fetch, [part for meta in metas for part in parts(meta)]))
"""


@contextmanager
def delayed(server: StoreServer, seconds: float, rate: float = 0.0) -> Iterator[StoreServer]:
    """A proxy that passes each request on after a pause. `rate`: bytes a second of all answers together, if limited."""
    loop, begun = asyncio.new_event_loop(), threading.Event()
    free_at = [0.0]
    address = urlsplit(server.endpoint)
    ports: list[int] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause: float) -> None:
        try:
            while data := await reader.read(1 << 20):
                await asyncio.sleep(pause)
                if rate and not pause:
                    free_at[0] = max(free_at[0], loop.time()) + len(data) / rate
                    await asyncio.sleep(free_at[0] - loop.time())
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(address.hostname, address.port)
        await asyncio.gather(copy(reader, back, seconds), copy(there, writer, 0))

    async def serve() -> None:
        listening = await asyncio.start_server(accept, "127.0.0.1", 0)
        ports.append(listening.sockets[0].getsockname()[1])
        begun.set()
        await listening.serve_forever()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    begun.wait()
    yield StoreServer(f"http://127.0.0.1:{ports[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=200.0, help="MB/s of a network, in the last part")
    parser.add_argument("--json", type=Path, help="write the figures into this file, for benchmarks/scale.py")
    parser.add_argument("--source", type=Path, help="a checkpoint, instead of ZeRO's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = options.source
        if source is None:
            source = folder / "zero"
            command = [sys.executable, str(HERE / "big_zero.py"), str(source), "--gigabytes", str(options.gigabytes)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (folder / "data").mkdir()
        rate = options.rate * 1e6
        with seaweedfs(folder / "data") as server, delayed(server, 0.03) as far, delayed(server, 0.03, rate) as slow:
            server.put("run", source)
            nbytes, out = size(source), str(folder / "out" / "target")
            (folder / "out").mkdir()
            url = "s3://bucket/run"
            blocks = [sys.executable, "-c", BLOCKS_ONLY, "convert", url, out]
            near_env = {**os.environ, **server.environment}
            far_env = {**os.environ, **far.environment}
            slow_env = {**os.environ, **slow.environment}
            print(f"{nbytes / 1e9:.2f} GB, {options.rounds} rounds; medians", flush=True)
            local = {"disk": [*CKPT, "convert", str(source), out]}
            figures: dict[str, Any] = {"nbytes": nbytes, "runs": {}}
            from_store = {
                "requests": [sys.executable, "-c", REQUESTS_ONLY],
                "download": [sys.executable, "-c", DOWNLOAD, out],
                "store": [*CKPT, "convert", url, out],
                "store, blocks only": blocks,
            }
            for title, programs, env in (
                ("the disk", local, near_env),
                ("the store", from_store, near_env),
                ("the store, 30 ms a request", from_store, far_env),
                (f"30 ms, {options.rate:.0f} MB/s", from_store, slow_env),
            ):
                measured = figures["runs"].setdefault(title, {})
                runs, _ = in_turn(programs, options.rounds, folder / "out", env)
                for name, several in runs.items():
                    middle = medians(several)
                    measured[name] = {"seconds": middle.wall, "cpu": middle.cpu}
                    print(
                        f"{title:28}{name:20}{middle.wall:7.2f} s {nbytes / 1e6 / middle.wall:6.0f} MB/s "
                        f"{middle.cpu / nbytes * 1e9:5.2f} CPU s/GB {middle.process / 1e6:6.0f} MB",
                        flush=True,
                    )
            if options.json is not None:
                options.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
