"""Kill shadows at random moments while a log grows, and send noise to those that listen. By hand; the check tries few.

    python tests/shadow_campaign.py [--kills 200] [--peers 200] [--seed 0]

Each round starts the command on a log that grows, with `--base-every` and `--listen`, and kills it (SIGKILL) after a
random time. Then the files of the run must have the bytes that the run wrote, every step that the chain has must have
the bits of the run, and the shadow that is started again must reach the last step. The peers are those of
`shadow_peers`, and random changes of what honest ones send; after all of them, the state is that of the run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ckpt.pipeline import Resources
from ckpt.shadow import listener, server
from ckpt.shadow.client import ShadowConnection
from ckpt.shadow.follow import follow
from ckpt.shadow.server import Server
from ckpt.shadow.shadow import Shadow
from ckpt.shadow.wire import NetworkAddress
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain import folder as chain_folder
from ckpt_formats.universal.chain import states
from gradient_logs import restored
from growing_log import State, bits, grow, log_with_fingerprints
from shadow_peers import HOSTILE, noise

STEPS = 30


def kill_shadows(rounds: int, place: Path, seed: int) -> dict[str, int]:
    """Kill so many shadows. Returns how often a base was added before, and how often a restart was needed for it."""
    draw = random.Random(seed)
    finished = place / "finished.chain"
    log_with_fingerprints(STEPS, 3).write(finished)
    truth = {step: bits(restored(finished, step)) for step in range(STEPS + 1)}
    counts = {"kills": 0, "kills after a base": 0, "kills while a base was written": 0}
    for number in range(rounds):
        run = place / f"{number}.chain"
        writer = grow(finished, run, seed + number, pieces=12)
        next(writer)
        command = [sys.executable, "-m", "ckpt_cli", "shadow", str(run), "--base-every", "3", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()  # it has started
            end = time.monotonic() + draw.random() * 0.6
            for _ in writer:
                time.sleep(0.003)
                if time.monotonic() > end:
                    break
            time.sleep(max(0.0, end - time.monotonic()))
            child.kill()
        counts["kills"] += 1
        chain = index.load(run / index.NAME)
        counts["kills after a base"] += bool(chain.members)
        counts["kills while a base was written"] += bool(chain_folder.leftovers(run, chain))
        _check_run(run, finished, truth)
        _finish(run, finished)
        shadow = Shadow(run, Resources(workers=1), base_every=3)
        follow(shadow, lambda event: None, threading.Event(), once=True)
        assert shadow.step == STEPS, shadow.step
        _check_run(run, finished, truth)
        assert not chain_folder.leftovers(run, index.load(run / index.NAME))
        shutil.rmtree(run)
    return counts


def _finish(run: Path, finished: Path) -> None:
    """The rest of the log appears."""
    for logged in index.load(finished / index.NAME).segments:
        for path in sorted((finished / logged.folder).glob("rank-*.ckg")):
            here = run / logged.folder / path.name
            content = path.read_bytes()
            with here.open("ab") as file:
                file.write(content[here.stat().st_size :])


def _check_run(run: Path, finished: Path, truth: dict[int, State]) -> None:
    chain = index.load(run / index.NAME)
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


def send_noise(peers: int, place: Path, seed: int) -> dict[str, int]:
    """Let so many hostile peers connect, several at a time."""
    listener.LOGIN_SECONDS = server.IDLE_SECONDS = 0.5
    run = place / "listening.chain"
    log_with_fingerprints(STEPS, 3).write(run)
    shadow = Shadow(run, Resources(workers=1))
    while shadow.step != 7:
        shadow.poll(upto=7)
    listening = Server(shadow, NetworkAddress("127.0.0.1", 0))
    wanted = bits(restored(run, 7))
    crashes: list[object] = []
    threading.excepthook = crashes.append
    acts = [(name, act) for name, act in HOSTILE.items()]
    acts += [(f"noise {n}", noise(seed + n)) for n in range(peers - len(acts))]
    waiting = list(acts)

    def attack() -> None:
        while waiting:
            _, act = waiting.pop()
            with socket.create_connection((listening.address.host, listening.address.port), 20) as peer:
                act(peer)

    threads = [threading.Thread(target=attack) for _ in range(4)]
    for thread in threads:
        thread.start()
    good = 0
    while any(thread.is_alive() for thread in threads):
        with ShadowConnection(listening.address) as connection:
            assert bits(connection.checkpoint) == wanted
        good += 1
        time.sleep(0.05)
    assert not crashes, crashes
    while shadow.step != STEPS:
        shadow.poll()
    with ShadowConnection(listening.address) as connection:
        assert bits(connection.checkpoint) == bits(restored(run, STEPS))
    listening.close()
    return {"hostile peers": len(acts), "honest readers meanwhile": good, "crashes": len(crashes)}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("kills", 200), ("peers", 200), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(send_noise(options.peers, Path(place), options.seed)), flush=True)
        print(json.dumps(kill_shadows(options.kills, Path(place), options.seed)), flush=True)


if __name__ == "__main__":
    main()
