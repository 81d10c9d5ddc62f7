"""Write the sample of an old DCP: `python sample_checkpoints/make_dcp_old.py`, with torch 2.2, safetensors and NumPy 1.

Up to 2.3, PyTorch kept whatever holds no tensor in one item, such as all of `optim.param_groups`, FSDP1 saved
`ShardedTensor`s, and `.metadata` said neither a version nor what saved it. Current releases cannot write this.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "jobs"))
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from engines import ranks
from engines.model import Block, Gpt, batch, fill

HERE = Path(__file__).resolve().parent
NAME = Path("dcp-2.2-fsdp1-w2")
STEPS = 5
WORLD = 2


def sample() -> None:
    """Train and save; called in every rank."""
    # FSDP1 of that time asks after a GPU before it gathers, even where there is none.
    torch.cuda.synchronize = torch.cuda.memory_summary = lambda: None
    module = Gpt(hidden=32, layers=2)
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(fill(name, tuple(param.shape)))
    shapes = {name: param.shape for name, param in module.named_parameters()}
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in module.state_dict()}
    model = FullyShardedDataParallel(
        module, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )
    named = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}
    groups = [
        {
            "params": [param for name, param in named.items() if (len(shapes[name]) > 1) == matrix],
            "weight_decay": 0.1 * matrix,
        }
        for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, foreach=False)
    for step in range(STEPS):
        tokens, targets = (part.chunk(WORLD)[distributed.get_rank()] for part in batch(step))
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    truth = _gathered(named, optimizer, shapes)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        states = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    train_state = {"step": STEPS, "seen": [1, 2], "note": "no tensor here"}
    tree = {**states, "train_state": train_state, "random": [torch.arange(4), {"epoch": 1}]}
    dcp.save(tree, storage_writer=dcp.FileSystemWriter(NAME))
    if distributed.get_rank() == 0:
        truth |= {f"{name}/param": buffer for name, buffer in buffers.items()}
        about = {"step": str(STEPS), "param_groups": json.dumps(_options(optimizer, named))}
        save_file(truth, NAME / "truth.safetensors", about)


def _gathered(
    named: dict[str, Tensor], optimizer: torch.optim.Optimizer, shapes: dict[str, torch.Size]
) -> dict[str, Tensor]:
    """Every state whole: the slices of the ranks in their order. FSDP1's own gathering mixes the states up here."""
    mine = {
        f"{name}/{key}": value.detach().clone()
        for name, param in named.items()
        for key, value in {"param": param, **optimizer.state.get(param, {})}.items()
    }
    everyone: list[dict[str, Tensor]] = [{} for _ in range(WORLD)]
    distributed.all_gather_object(everyone, mine)
    out = {}
    for place in dict.fromkeys(place for tensors_of_rank in everyone for place in tensors_of_rank):
        name, _, key = place.rpartition("/")
        pieces = [tensors_of_rank[place] for tensors_of_rank in everyone if place in tensors_of_rank]
        out[place] = pieces[0] if key == "step" else torch.cat(pieces).reshape(shapes[name])
    return out


def _options(optimizer: torch.optim.Optimizer, named: dict[str, Tensor]) -> list[dict[str, Any]]:
    names = {id(param): name for name, param in named.items()}
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"names": [names[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def main() -> None:
    os.chdir(HERE)
    with tempfile.TemporaryDirectory() as logs:
        ranks.run(WORLD, sample, Path(logs), join=ranks.join_torch)


if __name__ == "__main__":
    main()
