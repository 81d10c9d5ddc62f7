"""Make and handle a big real checkpoint of FSDP2, in the processes that the benchmark measures.

    python benchmarks/big_dcp.py make OUT --millions 300 --world 4     train one step and save
    torchrun ... benchmarks/big_dcp.py reshard IN OUT --millions 300   load and save again: torch's only way to reshard
    python benchmarks/big_dcp.py weights IN OUT                        the weights to Hugging Face's files, by torch
    python benchmarks/big_dcp.py metadata OUT --chunks 250000          a `.metadata` that speaks of so many chunks

A decoder of Llama's sizes in fp32, AdamW: 12 bytes per parameter reach the disk.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "jobs"))
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from engines import ranks

WIDTH = 1024
INNER = 2816
ROWS = 4096
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH


class Layer(nn.Module):
    """Sizes and names of a layer; what it computes is as good as any, one step of it makes a state."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.wo(torch.sigmoid(self.wq(y)) * self.wk(y) + self.wv(y))
        y = self.ffn_norm(x)
        return x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))


class Decoder(nn.Module):
    def __init__(self, millions: float) -> None:
        super().__init__()
        count = max(1, round((millions * 1e6 - 2 * ROWS * WIDTH) / LAYER))
        self.tok_embeddings = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.output(self.norm(x)), tokens)


def sharded(millions: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in shards, of which each rank holds its own from the start, and its optimizer."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    with torch.device("meta"):
        model = Decoder(millions)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(distributed.get_rank())
    with torch.no_grad():
        for param in model.parameters():
            local: Any = param
            local.to_local().normal_(0, 0.02)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def make(out: Path, millions: float) -> None:
    """Called in every rank."""
    model, optimizer = sharded(millions)
    model(torch.arange(8) * 97 % ROWS).backward()
    optimizer.step()
    optimizer.zero_grad()
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": moments, "step": 1}, checkpoint_id=out)


def reshard(source: Path, out: Path, millions: float) -> None:
    """Called by torchrun in every rank."""
    distributed.init_process_group("gloo")
    state, moments = get_state_dict(*sharded(millions))
    tree = {"model": state, "optim": moments, "step": 0}
    dcp.load(tree, checkpoint_id=source)
    dcp.save(tree, checkpoint_id=out)
    distributed.barrier()
    distributed.destroy_process_group()


def weights(source: Path, out: Path) -> None:
    """As offline scripts do: load all of the model, save it as safetensors, consolidate."""
    kept = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    state = {name: torch.empty(layout.size) for name, layout in kept.items() if name.startswith("model.")}
    dcp.load(state, checkpoint_id=source, no_dist=True)
    writer = dcp.HuggingFaceStorageWriter(str(out), save_distributed=True, enable_consolidation=True)
    dcp.save(
        {name.removeprefix("model."): tensor for name, tensor in state.items()}, storage_writer=writer, no_dist=True
    )
    shutil.rmtree(out / "sharded")


def metadata(out: Path, chunks: int, world: int = 16) -> None:
    """A `.metadata` like those of large runs: weights and moments of many layers over `world` ranks; no data."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    places = {}
    for number in range(chunks // world):
        layer, state = divmod(number, 3)
        weight = f"layers.{layer}.feed_forward.w1.weight"
        path = ("model", weight) if state == 0 else ("optim", "state", weight, ("exp_avg", "exp_avg_sq")[state - 1])
        name = ".".join(path)
        boxes = [ChunkStorageMetadata(torch.Size((rank * 64, 0)), torch.Size((64, WIDTH))) for rank in range(world)]
        tensors[name] = TensorStorageMetadata(TensorProperties(), torch.Size((world * 64, WIDTH)), boxes)
        paths[name] = path
        for rank, box in enumerate(boxes):
            length = 64 * WIDTH * 4 + 1500
            place = _StorageInfo(f"__{rank}_0.distcp", number * length, length)
            places[MetadataIndex(name, box.offsets, rank)] = place
    out.mkdir(parents=True)
    stated = Metadata(tensors, paths, places, StorageMeta(out.name))
    (out / ".metadata").write_bytes(pickle.dumps(stated, protocol=4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "reshard", "weights", "metadata"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--millions", type=float, default=20)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=250_000)
    options = parser.parse_args()
    out: Path = options.paths[-1].resolve()
    if options.what == "make":
        with tempfile.TemporaryDirectory() as logs:
            ranks.run(
                options.world, partial(make, out, options.millions), Path(logs), timeout=3600, join=ranks.join_torch
            )
    elif options.what == "reshard":
        reshard(options.paths[0].resolve(), out, options.millions)
    elif options.what == "weights":
        weights(options.paths[0].resolve(), out)
    else:
        metadata(out, options.chunks)


if __name__ == "__main__":
    main()
