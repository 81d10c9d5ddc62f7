"""What holders cost the trainer of a recorded run: `python benchmarks/recording_peers.py [--rounds 5] [--mib 16]`.

Runs with `peers` and without take turns, each in a process of its own, with a chain in /dev/shm and three holders.
Figures are CPU seconds of the trainer's process alone over its steps, medians over the rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

HOSTS, STEPS = 3, 30


def train(folder: str, mib: int, hosts: str) -> None:
    """Train with a recorder, and print the CPU seconds of the steps."""
    import torch
    from torch import nn

    from ckpt_recorder import Peers, Recorder

    torch.set_num_threads(1)
    size = int((mib << 18) ** 0.5)
    model = nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    peers = Peers(hosts.split(",")) if hosts else None
    with Recorder(model, optimizer, Path(folder) / "run.chain", peers=peers, prove=False):
        begin = 0.0
        for step in range(STEPS + 3):
            if step == 3:
                begin = time.process_time()
            model(torch.randn(256, size)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=16, help="of weights in float32")
    options = parser.parse_args()
    command = [sys.executable, "-m", "ckpt_cli", "hold", "--memory", "4G", "--listen", "127.0.0.1:0", "--json"]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * options.rounds):
        has_peers = number % 4 in (1, 2)  # each comes first equally often
        folder = mkdtemp(dir="/dev/shm")
        holders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(HOSTS)]
        try:
            hosts = [json.loads(one.stdout.readline())["address"] for one in holders if one.stdout is not None]
            own = [sys.executable, __file__, "train", folder, str(options.mib), ",".join(hosts) if has_peers else ""]
            seconds[has_peers].append(float(subprocess.run(own, capture_output=True, text=True, check=True).stdout))
        finally:
            for one in holders:
                one.kill()
                one.communicate()
            shutil.rmtree(folder)
    without, beside = median(seconds[False]), median(seconds[True])
    print(f"without {without:.3f} s, with peers {beside:.3f} s of CPU for {STEPS} steps: {beside / without - 1:+.1%}")


if __name__ == "__main__" and sys.argv[1:2] == ["train"]:
    train(sys.argv[2], int(sys.argv[3]), sys.argv[4])
elif __name__ == "__main__":
    main()
