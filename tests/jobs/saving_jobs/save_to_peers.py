"""Save a live run twice, also in the memory of peers: `save_to_peers.py RANKS WORK ADDRESSES SCHEME`.

The ranks are forks of this process, and are killed with its group. They have the same model, so each saves a share of
it. When the holders of a rank have a save, the rank writes WORK/held-STEP-RANK with the id of its writer; it saves
again when WORK/go appears, and then waits to be killed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # which the first step of an optimizer would import in each rank
from torch import distributed, nn

from ckpt.holding.peers import HELD
from ckpt_training import Peers, Saver

SECONDS = 60.0


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def main(rank: int, world: int, work: Path, addresses: list[str], scheme: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{work}/store", rank=rank, world_size=world)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 900), nn.Linear(900, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    peers = Peers(addresses, scheme)
    hosts = len(peers.holders_of(rank)) + len(peers.parities_of(rank))
    with Saver(model, optimizer, work / "run", peers=peers, stall_seconds=SECONDS) as saver:
        for step in (1, 2):
            if step == 2:
                wait_for(work / "go")
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
            saver.save(step).wait(SECONDS)
            deadline = time.monotonic() + SECONDS
            while len(saver.peers) < hosts or set(saver.peers.values()) != {HELD}:
                assert time.monotonic() < deadline, saver.peers
                time.sleep(0.05)
            draft = work / f"draft-{rank}"
            draft.write_text(str(saver.writer_pid))
            draft.rename(work / f"held-{step}-{rank}")
        time.sleep(SECONDS)


if __name__ == "__main__":
    world, work, addresses, scheme = sys.argv[1:]
    for rank in range(int(world)):
        if os.fork() == 0:
            main(rank, int(world), Path(work), addresses.split(","), scheme)
            os._exit(0)
    while True:
        os.wait()
