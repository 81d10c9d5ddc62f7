"""Make and handle a big checkpoint of real Megatron core, in the processes that the benchmark measures.

    python benchmarks/big_megatron.py make OUT --gigabytes 1 --tp 2 --pp 2     OUT/legacy and OUT/dist, after one step
    python benchmarks/big_megatron.py reshard IN OUT --gigabytes 1 --tp 4      load at other degrees and save again

A Llama in bf16 with the distributed Adam: 14 bytes per parameter reach the disk. The second is Megatron's own and only
way to other degrees with the optimizer: as many processes as ranks, of which each builds its part of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "jobs"))
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import torch
from megatron.core import dist_checkpointing

from engines import ranks
from megatron_jobs import save, without_cuda
from megatron_jobs.kinds import LLAMA, Kind
from megatron_jobs.resume_dist import keep_steps

WIDTH, INNER, HEADS, GROUPS, ROWS = 1024, 2816, 16, 8, 8192
LAYER = WIDTH * (WIDTH + 2 * WIDTH * GROUPS // HEADS) + WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH
BYTES = 14
"""Of a parameter on the disk: bf16 weight, fp32 master and moments."""
ENCODING = "fully_reshardable"
PATIENCE = 1200
"""Seconds."""


def kind_of(gigabytes: float, tp: int, pp: int) -> Kind:
    """A model whose checkpoint has about this size; its layers divide over one, two and four stages."""
    layers = max(4, round((gigabytes * 1e9 / BYTES - 2 * ROWS * WIDTH) / LAYER / 4) * 4)
    sizes = {"hidden_size": WIDTH, "ffn_hidden_size": INNER, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    return Kind({**LLAMA, **sizes, "num_layers": layers}, tp=tp, pp=pp, vocabulary=ROWS)


def make(kind: Kind, out: Path) -> None:
    """Of one rank: train one step, save in both layouts."""
    models, optimizer, config = save.trained(kind, steps=1)
    common = {"args": save.arguments(kind, config), "checkpoint_version": 3.0, "iteration": save.STEPS}
    save.save_legacy(kind, models, optimizer, common, out / "legacy")
    save.save_dist(models, optimizer, common, out / "dist", ENCODING, kind.wrapped)


def reshard(kind: Kind, source: Path, out: Path) -> None:
    """Of one rank: load what it has at its degrees, save it."""
    keep_steps()
    models, optimizer, config = save.trained(kind, steps=0)
    _begin(optimizer)
    common = {"args": save.arguments(kind, config), "checkpoint_version": 3.0, "iteration": save.STEPS}
    state = save.sharded(models, optimizer, common, ENCODING, kind.wrapped, is_loading=True)
    loaded = dist_checkpointing.load(state, str(save.iteration(source)))
    for model in models:
        model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    save.save_dist(models, optimizer, common, out, ENCODING, kind.wrapped)


def _begin(optimizer: Any) -> None:
    """Give every parameter the states that are loaded over; a step would do so, too, in more time."""
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                one.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, paths in (("make", ["out"]), ("reshard", ["source", "out"])):
        command = commands.add_parser(name)
        for path in paths:
            command.add_argument(path, type=Path)
        command.add_argument("--gigabytes", type=float, default=1)
        command.add_argument("--tp", type=int, default=1)
        command.add_argument("--pp", type=int, default=1)
    options = parser.parse_args()
    kind = kind_of(options.gigabytes, options.tp, options.pp)
    work = (
        partial(make, kind, options.out)
        if options.command == "make"
        else partial(reshard, kind, options.source, options.out)
    )
    without_cuda.pretend()
    with tempfile.TemporaryDirectory() as log:
        ranks.run(kind.world, work, Path(log), PATIENCE, ranks.join_torch)
    print(json.dumps({"layers": kind.model["num_layers"], "checkpoint": str(options.out)}))


if __name__ == "__main__":
    main()
