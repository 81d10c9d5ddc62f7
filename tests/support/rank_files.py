"""Files of any number of ranks, written by PyTorch itself in this one process.

Its `fake` process group lets a process be any rank of any world: collectives do nothing, and everything that is only
arithmetic, such as cutting a tensor, is as ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_formats.containers.torchfile import open_file, reading_chunks, write_file
from ckpt_formats.core.files import Reader

State = Mapping[str, Any]


@contextmanager
def being(rank: int, world: int) -> Iterator[None]:
    """This process is that rank."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def write(folder: Path, world: int, **roles: Callable[[int], State]) -> Path:
    """The files of every rank, named as verl does: `model=`, `optim=`, `extra_state=`, each a function of the rank."""
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank in range(world):
            with being(rank, world):
                for role, state in roles.items():
                    torch.save(state(rank), folder / f"{role}_world_size_{world}_rank_{rank}.pt")
    return folder


def spread(tensor: torch.Tensor, mesh: Sequence[int] | Sequence[Any], placements: Sequence[Placement]) -> DTensor:
    """What this rank holds of a tensor that is cut over a mesh of ranks, given nested as an array is."""
    grid = DeviceMesh("cpu", torch.tensor(mesh), _init_backend=False)
    return distribute_tensor(tensor, grid, placements, src_data_rank=None)


def rows(tensor: torch.Tensor, world: int) -> DTensor:
    """Cut as FSDP2 cuts."""
    return spread(tensor, list(range(world)), [Shard(0)])


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite a file with its tree changed in place, or replaced by what `change` returns."""
    root = open_file(path).root
    changed = change(root)
    with Reader(check=False) as reader:
        draft = path.with_suffix(".edited")
        write_file(draft, root if changed is None else changed, reading_chunks(reader), "archive")
    draft.replace(path)
