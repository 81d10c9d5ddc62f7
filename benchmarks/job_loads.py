"""Load 40 M parameters with Adam into live runs: by the engine's own function, and by `ckpt_training.load`."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from forked import Meter, on_ranks

Rows = dict[str, list[dict[str, float]]]


@dataclass(frozen=True)
class Way:
    """One way to load."""

    engine: str
    """`plain`, `fsdp2` or `zero3`."""
    source: str
    """The folder or file of the checkpoint."""
    by: str = "ckpt"
    """`ckpt`, or the engine itself."""


WAYS = {
    "plain: torch.load": Way("plain", "plain.pt", "engine"),
    "plain: load": Way("plain", "plain.pt"),
    "FSDP2: dcp.load": Way("fsdp2", "dcp", "engine"),
    "FSDP2: load, DCP": Way("fsdp2", "dcp"),
    "FSDP2: load, universal": Way("fsdp2", "universal"),
    "FSDP2: load, coded": Way("fsdp2", "coded"),
    "FSDP2: load, boxes": Way("fsdp2", "saves"),
    "FSDP2: load, ZeRO": Way("fsdp2", "zero3"),
    "ZeRO 3: DeepSpeed": Way("zero3", "zero3", "engine"),
    "ZeRO 3: load, ZeRO": Way("zero3", "zero3"),
    "ZeRO 3: load, DCP": Way("zero3", "dcp"),
}
_WORLDS = {"plain": 1, "fsdp2": 2, "zero3": 2}


def run(folder: Path, rounds: int, layers: int, width: int, only: list[str]) -> Rows:
    """All ways in turn; of each round, what the rank with the most CPU seconds spent.

    Ranks are forked when torch's, DeepSpeed's and ckpt's modules are imported. ckpt's cost 0.2 s of a CPU, once.
    """
    import deepspeed  # noqa: F401
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    import ckpt
    import ckpt_training.loading  # noqa: F401

    shape = (layers, width)
    if not (folder / "coded").exists():
        for engine, world in _WORLDS.items():
            on_ranks(world, make, engine, folder, shape)
        source = ckpt.open(folder / "dcp")
        ckpt.save(source, folder / "universal", ckpt.Universal())
        ckpt.save(source, folder / "coded", ckpt.Universal(codec="auto"))
    for source in {way.source for way in WAYS.values()} - {"saves"}:
        ckpt.open(folder / source)
    ways = {name: way for name, way in WAYS.items() if not only or any(text in name for text in only)}
    rows: Rows = {name: [] for name in ways}
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            spent = on_ranks(_WORLDS[ways[name].engine], load_once, ways[name], folder, shape)
            rows[name].append(max(spent, key=lambda one: one["cpu"]))
    return rows


def table(rows: Rows) -> str:
    """Medians, and the ratio of CPU seconds to the engine's own way."""
    own = {
        WAYS[name].engine: median(one["cpu"] for one in some)
        for name, some in rows.items()
        if WAYS[name].by == "engine"
    }
    heads = f"{'CPU s':>8}{'x own':>7}{'best':>8}{'wall s':>8}{'MB added':>10}{'MB read':>9}{'needed':>8}{'ratio':>7}"
    lines = [f"{'':26}{heads}"]
    for name, some in rows.items():
        middle = {key: median(one[key] for one in some) for key in some[0]}
        base = own.get(WAYS[name].engine)
        ratio = f"{middle['cpu'] / base:.2f}" if base else "-"
        lines.append(
            f"{name:26}{middle['cpu']:8.2f}{ratio:>7}{min(one['cpu'] for one in some):8.2f}{middle['wall']:8.2f}"
            f"{middle['added'] / 1e6:10.0f}{middle['read'] / 1e6:9.0f}{middle['needed'] / 1e6:8.0f}"
            f"{middle['read'] / middle['needed']:7.2f}"
        )
    return "\n".join(lines)


def build(engine: str, shape: tuple[int, int]) -> tuple[Any, Any]:
    """A model of pairs of linear layers, `2 * width ** 2` numbers each, and its optimizer; DeepSpeed has its own."""
    import torch
    from torch import nn

    layers, width = shape
    blocks = (nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width)) for _ in range(layers))
    with torch.no_grad():
        model: Any = nn.Sequential(*blocks)
    if engine == "zero3":
        import deepspeed
        import deepspeed.ops

        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.ops.__compatible_ops__ = {}  # its optional collectives take minutes to compile
        engine_of_run, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "steps_per_print": 10**9,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
                "zero_optimization": {"stage": 3},
            },
        )
        return engine_of_run, None
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def give_moments(engine: str, model: Any, optimizer: Any) -> None:
    """Random states, as after a step: no step is computed."""
    import torch

    inner = model.optimizer.optimizer if engine == "zero3" else optimizer
    vectors = model.optimizer.fp32_partitioned_groups_flat if engine == "zero3" else [*model.parameters()]
    for one in vectors:
        states = {"exp_avg": torch.randn_like(one) * 1e-3, "exp_avg_sq": torch.rand_like(one) * 1e-6}
        inner.state[one] = {"step": torch.tensor(1.0), **{key: value.detach() for key, value in states.items()}}


def make(engine: str, folder: Path, shape: tuple[int, int]) -> None:
    """Save a run by its engine; of FSDP2, also by `Saver`."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from ckpt_training import Saver

    torch.manual_seed(0)
    model, optimizer = build(engine, shape)
    give_moments(engine, model, optimizer)
    if engine == "plain":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "plain.pt")
    elif engine == "zero3":
        model.save_checkpoint(str(folder / "zero3"))
    else:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=folder / "dcp")
        with Saver(model, optimizer, folder / "saves") as saver:
            saver.save(1).wait()


def load_once(way: Way, folder: Path, shape: tuple[int, int]) -> dict[str, float]:
    """What one load costs this rank."""
    import torch
    from torch import distributed

    torch.manual_seed(1)
    model, optimizer = build(way.engine, shape)
    needed = sum(one.nbytes for one in _memory(way.engine, model)) * 3
    distributed.barrier()
    meter = Meter()
    if way.by == "ckpt":
        from ckpt_training import load

        load(str(folder / way.source), model, optimizer)
    else:
        _load_by_engine(way, folder, model, optimizer)
    return {**meter.row(), "needed": needed}


def _memory(engine: str, model: Any) -> Iterator[Any]:
    """This rank's parameters, in fp32."""
    if engine == "zero3":
        yield from model.optimizer.fp32_partitioned_groups_flat
        return
    for one in model.parameters():
        yield one.to_local() if engine == "fsdp2" else one


def _load_by_engine(way: Way, folder: Path, model: Any, optimizer: Any) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    if way.engine == "plain":
        content = torch.load(folder / way.source, weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    elif way.engine == "zero3":
        model.load_checkpoint(str(folder / way.source))
    else:
        weights, states = get_state_dict(model, optimizer)
        tree = {"model": weights, "optim": states}
        dcp.load(tree, checkpoint_id=folder / way.source)
        set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
