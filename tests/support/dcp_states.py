"""State dicts of every shape, saved by PyTorch itself in one process, and what a reader should find in them."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

State = dict[str, Any]

NAMES = ("layers.0.w", "layers.0.b", "head.w")
MESHES = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]


def state(seed: int = 0, rows: int = 6) -> State:
    """A model with its optimizer and all that a script keeps beside them."""
    random = torch.Generator().manual_seed(seed)

    def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    model = {
        "layers.0.w": values(rows, 4),
        "layers.0.b": values(rows),
        "head.w": values(5, rows, dtype=torch.bfloat16),
        "seen": torch.arange(4),
        "fp8": values(3, 3).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "transposed": values(4, 5).t(),
        "channels": values(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "short": torch.tensor([1, 65535], dtype=torch.uint16),
        "mask": torch.tensor([True, False]),
    }
    kept = {
        name: {
            "exp_avg": values(*model[name].shape),
            "exp_avg_sq": values(*model[name].shape),
            "step": torch.tensor(3.0),
        }
        for name in NAMES
    }
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.95), "foreach": None, "params": list(NAMES[:2])},
        {"lr": 0.2, "betas": (0.9, 0.95), "foreach": None, "params": list(NAMES[2:])},
    ]
    return {
        "model": model,
        "optim": {"state": kept, "param_groups": groups},
        "lr_scheduler": {"last_epoch": 7, "base_lrs": [0.1, 0.2]},
        "train_state": {"step": 7, "note": "text"},
        "misc": {"tuple": (1, torch.ones(2)), "list": [torch.ones(3), {"x": 1}], "none": None, "bytes": b"raw"},
    }


def flat(nested: State) -> State:
    """The same, keyed as TorchTitan does."""
    optim = nested["optim"]
    states = {f"state.{n}.{k}": v for n, held in optim["state"].items() for k, v in held.items()}
    options = {
        f"param_groups.{n}.{k}": v
        for g in optim["param_groups"]
        for n in g["params"]
        for k, v in g.items()
        if k != "params"
    }
    rest = {key: value for key, value in nested.items() if key not in ("model", "optim", "misc")}
    return {**nested["model"], "optimizer": {**states, **options}, **rest}


def save(
    saved: Mapping[str, Any],
    folder: Path,
    flatten: bool = True,
    writer: FileSystemWriter | None = None,
    **options: Any,
) -> Path:
    """Let PyTorch save it."""
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = writer or FileSystemWriter(folder, sync_files=False, **options)
        dcp.save(dict(saved), storage_writer=writer, planner=planner, no_dist=True)
    return folder


class RankWriter(FileSystemWriter):
    """Saves as one of several ranks that do not talk to each other."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, sync_files=False)
        self.as_rank = rank

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, rank=self.as_rank, use_collectives=False)


def by_rank(at: Path, *states: State) -> Path:
    """Let PyTorch save each state as that of another rank, without collectives."""
    for rank, state in enumerate(states):
        save(state, at, writer=RankWriter(at, rank))
    return at


def loaded(folder: Path) -> State:
    """All that PyTorch's own converter finds in a checkpoint, without our record."""
    target = folder.parent / f"{folder.name}.whole.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(str(folder), str(target))
    content: State = torch.load(target, weights_only=False)
    target.unlink()
    content.pop("ckpt", None)
    return content


def raw(values: torch.Tensor) -> bytes:
    packed = values.detach().contiguous().reshape(-1)
    return packed.view(torch.uint8).numpy().tobytes() if packed.numel() else b""


def exact(value: Any) -> Any:
    """A form in which `==` compares types and bits too."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), raw(value)
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [exact(item) for item in value]
    if isinstance(value, float):
        return "float", np.float64(value).tobytes()
    return type(value).__name__, value
