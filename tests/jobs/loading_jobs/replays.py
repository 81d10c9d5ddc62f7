"""Replicas load what is replayed: `replays.py OUT` writes OUT/ENGINE-rankN.json, what rank N decoded of each source.

The sources: a chain with deltas, and one that is recorded. Of each, two ranks of DDP and four of HSDP load a step; each
notes the deltas, or the gradients, that it decoded.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt_formats.universal.gradients.record import Kind, LogRecord
from ckpt_formats.universal.replay import StoredDelta
from ckpt_recorder import Recorder
from ckpt_training import Saver, load
from engines import ranks

STEPS = 3


class Model(nn.Module):
    """Of several chunks, none of which ends with a tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(600, 1000), nn.GELU(), nn.Linear(1000, 700), nn.GELU(), nn.Linear(700, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(x)
        return scores


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def write(out: Path) -> None:
    """Train in one process, and save and record each step."""
    model = Model(0)
    optimizer = adamw(model)
    with Recorder(model, optimizer, out / "recorded.chain"), Saver(model, optimizer, out / "deltas.chain") as saver:
        for step in range(1, STEPS + 1):
            model(torch.randn(4, 600, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saver.save(step).wait()
    torch.save([model.state_dict(), optimizer.state_dict()], out / "truth")


class Decoded:
    """Counts what this process decodes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        delta, record = StoredDelta.decoded, LogRecord.read_chunk

        def decoded(one: StoredDelta, index: int, *rest: Any) -> Any:
            self.counts[f"{one.stored.path} {one.stored.offset} {index}"] += 1
            return delta(one, index, *rest)

        def read_chunk(one: LogRecord, path: Path, index: int, *rest: Any) -> Any:
            if one.kind is Kind.GRADIENTS:
                self.counts[f"{path} {one.begin} {index}"] += 1
            return record(one, path, index, *rest)

        StoredDelta.decoded, LogRecord.read_chunk = decoded, read_chunk  # type: ignore[method-assign]


def load_all(out: Path, engine: str) -> None:
    """Load each source in this rank, shared and not."""
    decoded, report = Decoded(), dict[str, Any]()
    truth, of_optimizer = torch.load(out / "truth")
    for source in ("deltas.chain", "recorded.chain"):
        for cooperate in ("auto", "off"):
            model: Any = Model(1)
            if engine == "ddp":
                model = nn.parallel.DistributedDataParallel(model)
            else:
                fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
            optimizer = adamw(model)
            decoded.counts.clear()
            load(f"{out / source}@{STEPS}", model, optimizer, cooperate=cooperate)  # type: ignore[arg-type]
            report[f"{source} {cooperate}"] = dict(decoded.counts)
            for number, (name, parameter) in enumerate(model.named_parameters()):
                states = optimizer.state[parameter]
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(full(states[key]), of_optimizer["state"][number][key]), (source, name, key)
                assert torch.equal(full(parameter.detach()), truth[name.removeprefix("module.")]), (source, name)
    (out / f"{engine}-rank{distributed.get_rank()}.json").write_text(json.dumps(report))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ranks.run(
        1, lambda: write(folder), folder / "write", join=ranks.join_torch
    )  # forked processes have no threads of it
    ranks.run(2, lambda: load_all(folder, "ddp"), folder / "ddp", join=ranks.join_torch)
    ranks.run(4, lambda: load_all(folder, "hsdp"), folder / "hsdp", join=ranks.join_torch)
