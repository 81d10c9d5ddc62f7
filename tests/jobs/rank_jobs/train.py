"""Train for real and save what each rank holds: `python tests/jobs/rank_jobs/train.py OUT KIND...`.

Writes OUT/KIND/ckpt, and OUT/KIND/truth.pt: the model, the optimizer's states by name, and its groups, gathered by
torch itself. Exits 1 and names the kinds that failed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.pop("TORCHDYNAMO_DISABLE", None)  # without it, torch.compile wraps nothing

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from engines import ranks
from rank_jobs.kinds import KINDS, Kind
from rank_jobs.model import Block, Tiny, filled, loss

STEPS = 3

_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module)(?=\.)")


def run(kind: Kind, out: Path) -> None:
    """Train, save, and gather the truth; called in every rank."""
    rank = distributed.get_rank()
    model = wrapped(filled(kind.inner, kind.tied, frozen=kind.wrapper != "fsdp1" or kind.orig), kind)
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    one_group = kind.wrapper == "fsdp1" or kind.optimizer == "named"
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained if one_group else groups, lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        loss(model, step, 0 if kind.tp > 1 else rank).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    save(kind, out / "ckpt", model, optimizer, scheduler)
    truth = gathered(kind, model, optimizer)
    if rank == 0:
        torch.save(truth, out / "truth.pt")


def wrapped(module: Tiny, kind: Kind) -> nn.Module:
    if kind.wrapper == "ddp":
        return DistributedDataParallel(module)
    mesh = mesh_of(kind)
    if kind.wrapper == "fsdp1":
        strategy = ShardingStrategy.HYBRID_SHARD if kind.replicas > 1 else ShardingStrategy.FULL_SHARD
        return Fsdp(
            module,
            use_orig_params=kind.orig,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            sharding_strategy=strategy,
            device_mesh=mesh if kind.mesh else None,
            process_group=None
            if kind.mesh or kind.replicas == 1
            else (mesh.get_group("shards"), mesh.get_group("replicas")),
        )
    if kind.tp > 1:
        tp = mesh["tp"]
        for block in module.blocks:
            even = kind.inner % kind.tp == 0
            up = ColwiseParallel() if even else ColwiseParallel(output_layouts=Replicate())
            parallelize_module(block, tp, {"up": up, "down": RowwiseParallel()} if even else {"up": up})
        mesh = mesh["shards"]
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    # The names are what counts here, not the kernels.
    return torch.compile(module, backend="eager") if kind.compiled else module


def mesh_of(kind: Kind) -> DeviceMesh:
    sizes = {"replicas": kind.replicas, "shards": kind.shards, "tp": kind.tp}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
    return init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))


def save(kind: Kind, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> None:
    rank = distributed.get_rank()
    folder.mkdir(exist_ok=True)
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": torch.full((8,), rank, dtype=torch.uint8)}
    if kind.saver == "accelerate":
        by_accelerate(kind, folder, model, optimizer)
        torch.save(extra, folder / f"random_states_{rank}.pkl")
        return
    way = StateDictType.LOCAL_STATE_DICT if kind.state == "local" else StateDictType.SHARDED_STATE_DICT
    files = {
        role: folder / f"{role}_world_size_{kind.world}_rank_{rank}.pt" for role in ("model", "optim", "extra_state")
    }
    with Fsdp.state_dict_type(model, way) if kind.wrapper == "fsdp1" else nullcontext():
        torch.save(model.state_dict(), files["model"])
        if kind.optimizer != "none":
            state = optimizer.state_dict() if kind.optimizer == "raw" else named(kind, model, optimizer)
            torch.save(state, files["optim"])
    torch.save(extra, files["extra_state"])


def by_accelerate(kind: Kind, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, save_fsdp_model, save_fsdp_optimizer

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2 if kind.wrapper == "fsdp2" else 1, state_dict_type=f"{kind.state.upper()}_STATE_DICT"
    )
    accelerator = Accelerator(cpu=True)
    save_fsdp_model(plugin, accelerator, model, str(folder), use_dcp=False)
    if kind.optimizer != "none":
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder), use_dcp=False)


def named(kind: Kind, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if kind.wrapper == "fsdp1":
        return Fsdp.optim_state_dict(model, optimizer)
    return get_optimizer_state_dict(model, optimizer)


def gathered(kind: Kind, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the live state is when it is put together without any file."""
    with Fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT) if kind.wrapper == "fsdp1" else nullcontext():
        weights = {plain(name): full(value) for name, value in model.state_dict().items()}
        states = named(kind, model, optimizer)
    optim = {plain(n): {k: full(v) for k, v in state.items()} for n, state in states["state"].items()}
    if kind.wrapper == "fsdp1" and kind.orig:
        optim = joined(kind, model, optimizer, weights)
    return {
        "model": weights,
        "buffers": ["seen", "scale"],
        "optim": optim,
        "groups": [[plain(name) for name in group["params"]] for group in states["param_groups"]],
        "order": [plain(name) for name, parameter in model.named_parameters() if parameter.requires_grad],
    }


def joined(
    kind: Kind, model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """The states of FSDP1's parameters, of the slices that the ranks' optimizers have.

    By hand: on the CPU, torch gathers a parameter's states into one buffer, and `exp_avg` comes out as `exp_avg_sq`.
    """
    own = {plain(name): optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    every: list[Any] = [None] * kind.world
    distributed.all_gather_object(every, own)
    by_name: dict[str, dict[str, Tensor]] = {}
    for name in own:
        held = [states[name] for states in every[: kind.shards] if states[name]]
        for state in held[0] if held else ():
            parts = [one[state] for one in held]
            whole = parts[0] if parts[0].dim() == 0 else torch.cat(parts).reshape(weights[name].shape)
            by_name.setdefault(name, {})[state] = whole.clone()
    return by_name


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def plain(name: str) -> str:
    """The name without those of wrappers."""
    return _WRAPPERS.sub("", name).lstrip(".")


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out, failed = Path(sys.argv[1]).resolve(), []
    for name in sys.argv[2:]:
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
        try:
            ranks.run(
                KINDS[name].world, lambda n=name: run(KINDS[n], out / n), out / name / "log", join=ranks.join_torch
            )
        except Exception as error:
            failed.append(name)
            print(f"{name} FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
