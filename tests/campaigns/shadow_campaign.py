"""Kill shadows at random moments while a log grows, and send noise to those that listen.

A round of `shadow_kills` starts the command on a log that grows, with `--base-every` and `--listen`, and kills it
(SIGKILL) after a random time; in every third round it follows a server of the chain. Then the files of the run must
have the bytes that the run wrote, every step of the chain must have the bits of the run, and the shadow that is started
again must reach the last step. The peers are those of `support/shadow_peers.py` and `support/http_peers.py`, and random
changes of what honest ones send, to a shadow and to a server of a chain; after all of them, the state is that of the
run.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from ckpt.pipeline import Execution
from ckpt.serving import server as serving
from ckpt.serving.server import ChainServer
from ckpt.shadow import listener
from ckpt.shadow import server as server_module
from ckpt.shadow.client import ShadowConnection
from ckpt.shadow.follow import follow
from ckpt.shadow.mirror import LogMirror
from ckpt.shadow.server import Server
from ckpt.shadow.shadow import Shadow
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.wire import PeerGone
from ckpt_formats.universal.chain import chain_file, states
from ckpt_formats.universal.chain import folder as chain_folder
from gradient_logs import restored
from growing_log import State, bits, grow, log_with_fingerprints
from http_peers import HTTP_HOSTILE, SEGMENT, http_noise, http_peer
from run import Round
from shadow_peers import HOSTILE, Peer, noise

STEPS = 30
NOISY = 60
"""Peers of a round that send random changes, beside those that are hostile in a known way."""


def kills(place: Path, seed: int) -> Iterator[Round]:
    """Kill shadows: two that follow files, one that follows a server over a socket, in turn."""
    draw = random.Random(seed)
    finished = place / "finished.chain"
    log_with_fingerprints(STEPS, 3).write(finished)
    truth = {step: bits(restored(finished, step)) for step in range(STEPS + 1)}
    for number in itertools.count():
        over_socket = number % 3 == 2
        name = "over a socket" if over_socket else "of files"
        grown = grow(finished, place / f"{number}.chain", seed + number, pieces=12)
        yield Round(name, partial(_kill, place / f"{number}.chain", finished, truth, grown, over_socket, draw))


def _kill(
    run: Path, finished: Path, truth: dict[int, State], writer: Iterator[None], over_socket: bool, draw: random.Random
) -> dict[str, int]:
    """Kill a shadow of a run that grows. Return at which moment."""
    next(writer)
    server, more, copied = None, ["--base-every", draw.choice(("3", "9", "15"))], run.with_name("mirror")
    if over_socket:
        server = ChainServer(run, NetworkAddress("127.0.0.1", 0))
        more = ["--mirror", str(copied)]
    chain = str(run) if server is None else server.url
    command = [sys.executable, "-m", "ckpt_cli", "shadow", chain, "--listen", "0", "--json", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it has started
        end = time.monotonic() + draw.random() ** 2 * 0.6
        for _ in writer:
            time.sleep(0.003)
            if time.monotonic() > end:
                break
        time.sleep(max(0.0, end - time.monotonic()))
        child.kill()
        events = [json.loads(line) for line in child.stdout if line.endswith("\n")]
    index_now = chain_file.load(run / chain_file.NAME)
    counts = {
        "kills": 1,
        "before a step": not any(event.get("steps") for event in events),
        "after a base": bool(index_now.members),
        "while a base was written": bool(chain_folder.leftovers(run, index_now)),
    }
    _check_run(run, finished, truth)
    _finish(run, finished)
    if server is not None:
        with LogMirror(server.url, place=copied) as mirror:
            _follow_to_the_end(Shadow(mirror, resources=Execution(workers=1)), truth)
        server.close()
    _follow_to_the_end(Shadow(run, resources=Execution(workers=1), base_every=3), truth)
    _check_run(run, finished, truth)
    assert not chain_folder.leftovers(run, chain_file.load(run / chain_file.NAME))
    shutil.rmtree(run)
    return counts


def _follow_to_the_end(shadow: Shadow, truth: dict[int, State]) -> None:
    follow(shadow, lambda event: None, threading.Event(), once=True)
    assert shadow.step == STEPS, shadow.step
    with shadow.frozen() as checkpoint:
        assert bits(checkpoint) == truth[STEPS]


def _finish(run: Path, finished: Path) -> None:
    """The rest of the log appears."""
    for logged in chain_file.load(finished / chain_file.NAME).segments:
        for path in sorted((finished / logged.folder).glob("rank-*.ckg")):
            here = run / logged.folder / path.name
            content = path.read_bytes()
            with here.open("ab") as file:
                file.write(content[here.stat().st_size :])


def _check_run(run: Path, finished: Path, truth: dict[int, State]) -> None:
    chain = chain_file.load(run / chain_file.NAME)
    for logged in chain.segments:
        for path in (run / logged.folder).iterdir():
            written = (finished / logged.folder / path.name).read_bytes()
            assert written.startswith(path.read_bytes()), f"{path} was changed"
    for member in chain.members:
        assert bits(restored(run, member.step)) == truth[member.step], member.step
    if states.open_steps(run, chain.segments[-1]).has_start:
        first = chain.members[0].step if chain.members else 0
        for step in range(first, states.last_step(run, chain) + 1):
            assert bits(restored(run, step)) == truth[step], step


def send_noise(place: Path, seed: int) -> dict[str, int]:
    """Let hostile peers connect to a shadow, several at a time."""
    listener.LOGIN_SECONDS = server_module.IDLE_SECONDS = 0.5
    server_module.WAIT_SECONDS = 5.0
    run = place / "listening.chain"
    log_with_fingerprints(STEPS, 3).write(run)
    shadow = Shadow(run, resources=Execution(workers=1))
    while shadow.step != 7:
        shadow.poll(upto=7)
    listening = Server(shadow, NetworkAddress("127.0.0.1", 0))
    wanted = bits(restored(run, 7))

    def honest() -> None:
        with ShadowConnection(listening.address) as connection:
            assert bits(connection.checkpoint) == wanted

    acts = [*HOSTILE.values(), *(noise(seed + n) for n in range(NOISY))]
    counts = _attack(listening.address, acts, honest)
    while shadow.step != STEPS:
        shadow.poll()
    with ShadowConnection(listening.address) as connection:
        assert bits(connection.checkpoint) == bits(restored(run, STEPS))
    listening.close()
    return {"peers": len(acts), **counts}


def send_noise_to_logs(place: Path, seed: int) -> dict[str, int]:
    """Let hostile peers connect to a server of a chain. Meanwhile, shadows follow it again and again."""
    serving.LOGIN_SECONDS = serving.IDLE_SECONDS = serving.SEND_SECONDS = 0.5
    run = place / "run.chain"
    log_with_fingerprints(STEPS, 3).write(run)
    (run / SEGMENT / "link").symlink_to("/etc/passwd")
    (run / SEGMENT / "rank-00007.ckg").symlink_to("/etc/passwd")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    truth = {STEPS: bits(restored(run, STEPS))}
    chain_server = ChainServer(run, NetworkAddress("127.0.0.1", 0))

    def honest() -> None:
        with LogMirror(chain_server.url, place=place / "mirror") as mirror:
            _follow_to_the_end(Shadow(mirror, resources=Execution(workers=1)), truth)

    acts = [*map(http_peer, HTTP_HOSTILE.values()), *(http_noise(seed + n) for n in range(NOISY))]
    counts = _attack(chain_server.address, acts, honest)
    honest()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    chain_server.close()
    return {"peers": len(acts), **counts}


def _attack(address: NetworkAddress, acts: list[Peer], honest: Callable[[], None]) -> dict[str, int]:
    """Four hostile peers at a time; honest readers meanwhile."""
    problems: list[object] = []
    threading.excepthook = problems.append
    waiting = list(acts)

    def attack() -> None:
        while waiting:
            act = waiting.pop()
            with socket.create_connection((address.host, address.port), 20) as peer, suppress(PeerGone):
                act(peer)  # it may be sent away sooner than it thinks

    threads = [threading.Thread(target=attack) for _ in range(4)]
    for thread in threads:
        thread.start()
    good = 0
    while any(thread.is_alive() for thread in threads):
        honest()
        good += 1
        time.sleep(0.05)
    assert not problems, problems
    return {"honest readers meanwhile": good}


def peers(place: Path, seed: int) -> Iterator[Round]:
    yield from _attacks("of a shadow", send_noise, place, seed)


def log_peers(place: Path, seed: int) -> Iterator[Round]:
    yield from _attacks("of a log", send_noise_to_logs, place, seed)


def _attacks(name: str, send: Callable[[Path, int], dict[str, int]], place: Path, seed: int) -> Iterator[Round]:
    for number in itertools.count():
        (folder := place / str(number)).mkdir()
        yield Round(name, partial(send, folder, seed + number * NOISY))
