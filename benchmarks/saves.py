"""Saves of a live run of FSDP2 beside those of torch: how long training waits, what the CPU does, and what is stored.

    python benchmarks/saves.py [--size 4] [--saves 3] [--only WAY]

Two ranks of a small model with AdamW train on the CPU, and are saved after every second step. Ways:

    none              nothing is saved
    plain, chain      a Saver into a folder, and into a chain, whose members are deltas
    items             a Saver into a folder, in the format of `dcp.save`
    torch, dcp        `torch.save` of each rank's own shards and a flush, and `dcp.save`
    thread, process   `dcp.async_save`, by a thread and by a process

Printed for each: the waits of training for each save, CPU seconds of a trainer and of its writer for a save, bytes of
the saves, and how much the memory of a trainer grew. `append` states what `ckpt append` stores of the same states.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt_training import Saver

RANKS, WIDTH = 2, 1024
WAYS = ("none", "plain", "items", "chain", "torch", "dcp", "thread", "process")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = values + self.down(nn.functional.gelu(self.up(values)))
        return result


def train(rank: int, way: str, folder: Path, size: int, saves: int) -> None:
    """One rank. Writes its measurements into `folder`."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    own_group = distributed.new_group(backend="gloo")  # the thread of async_save must not share that of the training
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(size)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def forward_backward(step: int) -> None:
        model(
            torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step * 10 + rank))
        ).square().mean().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    forward_backward(0)
    update()
    target = folder / ("run.chain" if way == "chain" else "saves")
    saver = None
    if way in ("plain", "items", "chain"):
        saver = Saver(model, optimizer, target, format=ckpt.DCP() if way == "items" else None, memory=128 << 20)
    save = saving(way, saver, model, optimizer, target, rank, own_group)
    before, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    waits, handles, passes = list[float](), list[Any](), list[float]()
    for step in range(1, 2 * saves + 1):
        begin = time.perf_counter()
        forward_backward(step)
        passes.append(time.perf_counter() - begin)
        waited = 0.0 if saver is None else saver.waited
        update()
        if saver is not None and waits:
            waits[-1] += saver.waited - waited
        if step % 2 == 0:
            begin = time.perf_counter()
            handles.append(save(step))
            waits.append(time.perf_counter() - begin)
    for handle in handles:
        if hasattr(handle, "result"):
            handle.result() if callable(handle.result) else handle.wait()
    results = [handle.result for handle in handles] if saver is not None else []
    measured = {
        "waits": waits,
        "pass": median(passes),
        "cpu": time.process_time() - cpu,
        "memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3,
        "writer_cpu": [result.cpu_seconds for result in results],
    }
    if saver is not None:
        saver.close()
    (folder / f"rank{rank}.json").write_text(json.dumps(measured))


def saving(
    way: str, saver: Saver | None, model: nn.Module, optimizer: Any, target: Path, rank: int, group: Any
) -> Callable[[int], Any]:
    """Saves a step in one of the ways. Returns what has the result later, if it has one."""

    def by_torch(step: int) -> None:
        weights, states = get_state_dict(model, optimizer)
        own = {name: {k: v.to_local() if hasattr(v, "to_local") else v for k, v in one.items()} for name, one in states["state"].items()}  # fmt: skip  # noqa: E501
        path = target / f"step{step}-{rank}.pt"
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            torch.save({"model": {name: one.to_local() for name, one in weights.items()}, "optimizer": own}, file)
            file.flush()
            os.fsync(file.fileno())

    def by_dcp(step: int) -> Any:
        weights, states = get_state_dict(model, optimizer)
        tree, path = {"model": weights, "optimizer": states}, target / f"step{step}"
        if way == "dcp":
            return dcp.save(tree, checkpoint_id=path)
        kind = AsyncCheckpointerType.PROCESS if way == "process" else AsyncCheckpointerType.THREAD
        if pending:
            pending.pop().result()  # it refuses two at once
        pending.append(dcp.async_save(tree, checkpoint_id=path, async_checkpointer_type=kind, process_group=group))
        return pending[-1]

    pending: list[Any] = []
    if saver is not None:
        return saver.save
    return {"none": lambda step: None, "torch": by_torch}.get(way, by_dcp)


def forked(way: str, folder: Path, size: int, saves: int) -> list[dict[str, Any]]:
    """The measurements of all ranks."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            code = 1
            try:
                train(rank, way, folder, size, saves)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"{way}: ranks ended with {codes}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def sizes(folder: Path) -> list[float]:
    """The bytes of each save in MB."""
    saves = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    files = list(folder.iterdir())
    groups = saves or [[path for path in files if path.name.startswith(f"step{n}-")] for n in range(2, 99, 2)]
    found = [
        sum(path.stat().st_size for path in (one.rglob("*") if isinstance(one, Path) else one) if path.is_file())
        for one in groups
    ]
    return [round(nbytes / 1e6, 1) for nbytes in found if nbytes]


def appended(folder: Path) -> list[float]:
    """What `ckpt append` stores of plain saves, in MB."""
    chain = folder / "appended.chain"
    for path in sorted((folder / "saves").iterdir()):
        subprocess.run([sys.executable, "-m", "ckpt_cli", "append", chain, path], check=True, capture_output=True)
    return sizes(chain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4, help="blocks of 4.2 million parameters")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--only", choices=WAYS)
    arguments = parser.parse_args()
    for way in WAYS if arguments.only is None else (arguments.only,):
        folder = Path(tempfile.mkdtemp())
        of_ranks = forked(way, folder, arguments.size, arguments.saves)
        print(f"{way:8} pass {max(one['pass'] for one in of_ranks):.2f} s", end="")
        if way != "none":
            waits = [round(max(pair), 2) for pair in zip(*(one["waits"] for one in of_ranks), strict=True)]
            writers = [round(max(pair), 2) for pair in zip(*(one["writer_cpu"] for one in of_ranks), strict=True)]
            trainer, memory = (max(one[key] for one in of_ranks) for key in ("cpu", "memory"))
            stored = sizes(folder / ("run.chain" if way == "chain" else "saves"))
            print(f", waits {waits} s, writer {writers} CPU s, +{memory:.0f} MB, saves {stored} MB", end="")
            print(f", trainer {trainer:.2f} CPU s", end="")
        print(flush=True)
        if way == "plain":
            print(f"append   saves {appended(folder)} MB", flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
