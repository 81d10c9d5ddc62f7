"""Save a real FSDP2 run rank by rank in each of torch's ways, or load what was saved: `rank_saves.py save|load OUT`.

`save` trains on four ranks and writes OUT/WAY for each way, and OUT/truth.pt. `load` reads OUT/WAY with torch's own
`dcp.load` on two ranks and on one, in a run that began with other weights, and compares every bit with the truth.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from engines import ranks

WORLD = 4
WRITERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "threads": {"thread_count": 2},
    "file_per_item": {"single_file_per_rank": False},
    "zstd": {"_extensions": [ZStandard()]},
}
WAYS = (*WRITERS, "async_thread", "async_process", "replicated", "no_dist")
"""`replicated`: two groups of two ranks have the same shards. `no_dist`: each rank saves as if it were alone."""


def start(seed: int, mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    fully_shard(model, mesh=mesh or init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer)
    rank = distributed.get_rank()
    return {"model": weights, "optim": states, "step": step, "seed": rank, f"loader_{rank}": {"at": rank}}


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def save(out: Path) -> None:
    model, optimizer = start(1)
    replicas = start(1, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    for way in WAYS:
        rank = distributed.get_rank()
        folder = out / way / f"rank_{rank}" if way == "no_dist" else out / way
        writer = dcp.FileSystemWriter(folder, sync_files=False, **WRITERS.get(way, {}))
        saved = state(*(replicas if way == "replicated" else (model, optimizer)), 3)
        if way.startswith("async"):
            kind = AsyncCheckpointerType(way.partition("_")[2])
            dcp.async_save(saved, storage_writer=writer, async_checkpointer_type=kind, use_collectives=False).result()  # type: ignore[union-attr]
        else:
            dcp.save(saved, storage_writer=writer, use_collectives=way == "no_dist", no_dist=way == "no_dist")
    truths = {"replicated": full(*replicas), "others": full(model, optimizer)}
    if distributed.get_rank() == 0:
        torch.save(truths, out / "truth.pt")


def load(out: Path) -> None:
    truths = torch.load(out / "truth.pt", weights_only=False)
    for way in WAYS:
        model, optimizer = start(2)
        weights, states = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optim": states, "step": 0, "seed": -1, "loader_3": {"at": -1}}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(out / way))
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        weights, states = full(model, optimizer)
        assert (loaded["step"], loaded["seed"], loaded["loader_3"]) == (3, 0, {"at": 3}), loaded
        if distributed.get_rank() == 0:
            expected = truths.get(way, truths["others"])
            assert same(weights, expected[0]), f"{way}: weights"
            assert same(states, expected[1]), f"{way}: optimizer"
            print(f"{way} on {distributed.get_world_size()}: {len(weights)} weights, {len(states['state'])} states")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def main() -> None:
    warnings.simplefilter("ignore")
    what, out = sys.argv[1], Path(sys.argv[2])
    if what == "save":
        ranks.run(WORLD, lambda: save(out), out / "save", join=ranks.join_torch)
        return
    for world in (2, 1):
        ranks.run(world, lambda: load(out), out / f"load-{world}", join=ranks.join_torch)
        print((out / f"load-{world}" / "rank0.log").read_text())


if __name__ == "__main__":
    main()
