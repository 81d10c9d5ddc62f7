"""Loads that fail on one of two ranks: `failures.py OUT` writes OUT/rankN.json, what each rank raised and had then.

The source is a universal checkpoint of `Model`; in `flipped`, the last byte of the values of `wide.weight` has another
bit: of two FSDP2 ranks, only the second one reads that byte.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt_formats.core.errors import CkptError
from ckpt_training import load
from engines import ranks

WIDE = "wide.weight"


class Model(nn.Module):
    def __init__(self, seed: int, rows: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wide = nn.Linear(48, rows)
        self.head = nn.Linear(rows, 4)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def other_shape(out: Path, rank: int) -> tuple[Any, ...]:
    """The model of rank 1 has other shapes."""
    model = Model(1, rows=64 + rank)
    return model, adamw(model), out / "source", {}


def no_part(out: Path, rank: int) -> tuple[Any, ...]:
    """Rank 1 passes something that takes no state."""
    model = Model(1)
    return model, adamw(model), out / "source", {"schedule": object() if rank else _Part()}


def other_source(out: Path, rank: int) -> tuple[Any, ...]:
    """Rank 1 has another checkpoint in hand."""
    model = Model(1)
    return model, adamw(model), ckpt.open(out / ("flipped_step" if rank else "source")), {}


def flipped(out: Path, rank: int) -> tuple[Any, ...]:
    """Rank 1 alone reads the flipped bit."""
    model = fully_shard(Model(1))
    return model, adamw(model), out / "flipped", {}


CASES: dict[str, Callable[[Path, int], tuple[Any, ...]]] = {
    one.__name__: one for one in (other_shape, no_part, other_source, flipped)
}


class _Part:
    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("a load that fails gives no part its state")


def write_sources(out: Path) -> None:
    model = Model(0)
    optimizer = adamw(model)
    for number in range(2):
        model.head(model.wide(torch.randn(3, 48))).sum().backward()
        optimizer.step()
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": {"last": number}}
        torch.save(content, out / f"step{number}.pt")
    for step, name in enumerate(("flipped_step", "source")):
        ckpt.save(ckpt.open(out / f"step{step}.pt"), out / name, ckpt.Universal())
    shutil.copytree(out / "source", out / "flipped")
    last = model.get_parameter(WIDE).detach().numpy().tobytes()[-32:]
    pack = next(path for path in (out / "flipped").rglob("*") if path.is_file() and last in path.read_bytes())
    data = bytearray(pack.read_bytes())
    data[data.index(last) + 31] ^= 4
    pack.write_bytes(data)


def fail(out: Path) -> None:
    """Try all cases in this rank."""
    rank, report = distributed.get_rank(), {}
    for name, case in CASES.items():
        model, optimizer, source, parts = case(out, rank)
        before = [local(one).clone() for one in model.parameters()]
        try:
            load(source, model, optimizer, **parts)
            report[name] = {"kind": "nothing"}
        except CkptError as error:
            is_equal = all(torch.equal(local(one), old) for one, old in zip(model.parameters(), before, strict=True))
            unchanged = is_equal and not optimizer.state
            report[name] = {
                "kind": type(error).__name__,
                "text": str(error),
                "hint": error.hint,
                "unchanged": unchanged,
            }
    (out / f"rank{rank}.json").write_text(json.dumps(report))


def local(parameter: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return value.detach()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_sources(folder)
    ranks.run(2, lambda: fail(folder), folder / "logs", join=ranks.join_torch)
