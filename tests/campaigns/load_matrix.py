"""Load every source into every engine at every degree, and compare all values bit for bit.

    python tests/campaigns/load_matrix.py FOLDER [--only TEXT ...] [--json FILE]

Real engines write the sources into FOLDER, once. When a source is saved, its engine gathers all values; after a load,
the target's engine does. So what compares shares no code with `ckpt_training.load`. Then each target trains three more
steps. Its losses must be those of a run that never stopped, of the same engine and degree; at another degree, those
after torch's own load. `--only` takes the pairs whose name, `SOURCE > TARGET`, contains a text. The exit code is 1 if
a value or a loss differs, or a load failed. The check runs a sample.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in ("jobs", "support"))

import deepspeed  # noqa: F401 -- before ranks are forked
import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckpt
from ckpt_recorder import Recorder
from ckpt_training import Saver, load
from engines import ranks
from loading_jobs.runs import MOMENTS, TARGETS, Run, Target

BEFORE, AFTER = 3, range(3, 6)
SECONDS = 300.0
"""The limit of what the ranks of one target do."""


@dataclass(frozen=True)
class Source:
    """A checkpoint after three steps: its address below the folder, and the run that it is of."""

    name: str
    address: str
    run: str
    is_weights: bool = False


SOURCES = (
    Source("ZeRO 3", "zero3", "zero3"),
    Source("ZeRO 1", "zero1", "zero1"),
    Source("DCP", "fsdp2/dcp-3", "fsdp2"),
    Source("DCP of FSDP1", "fsdp1/dcp-3", "fsdp1"),
    Source("universal, plain", "universal", "fsdp2"),
    Source("universal, coded", "coded", "fsdp2"),
    Source("boxes", "fsdp2/saves/step-00000003", "fsdp2"),
    Source("chain of saves", "zero3/saves.chain@3", "zero3"),
    Source("deltas", "deltas.chain@3", "fsdp2"),
    Source("recorded", "recorded/run.chain@3", "recorded"),
    Source("torch file", "plain/step3.pt", "plain"),
    Source("safetensors", "weights", "zero3", is_weights=True),
)
WRITERS = {"zero3": 2, "zero1": 2, "fsdp1": 2, "fsdp2": 2, "recorded": 2, "plain": 1}
"""The ranks of each run that writes a source."""

Truth = dict[str, torch.Tensor]
"""Full values by name/state."""


def target_of(run: str) -> Target:
    return Target("fsdp2" if run == "recorded" else run, WRITERS[run])


def join(target: Target) -> Callable[[int, int, str], None]:
    return ranks.join_deepspeed if target.is_zero else ranks.join_torch


def write_sources(folder: Path) -> None:
    """Let engines write what is not there yet."""
    for run, world in WRITERS.items():
        if not (folder / run / "losses.json").exists():
            (folder / run).mkdir(parents=True, exist_ok=True)
            ranks.run(world, partial(write, run, folder / run), folder / "logs" / run, SECONDS, join(target_of(run)))
    if not (folder / "deltas.chain" / "done").exists():
        ranks.run(1, partial(convert, folder), folder / "logs" / "convert", SECONDS, ranks.join_torch)


def write(name: str, out: Path) -> None:
    """Train, save, gather the values, and train on; called in every rank."""
    run = Run(target_of(name), seed=0)
    if name == "recorded":
        with Recorder(run.model, run.optimizer, out / "run.chain"):
            run.train(range(BEFORE))
    elif name == "zero3":
        with Saver(run.model, run.optimizer, out / "saves.chain") as saver:
            for step in range(BEFORE):
                run.train(range(step, step + 1))
                saver.save(step + 1).wait()
    else:
        for step in range(BEFORE):
            run.train(range(step, step + 1))
            if name in ("fsdp1", "fsdp2"):
                save_dcp(run, out / f"dcp-{step + 1}")
    if run.target.is_zero:
        run.model.save_checkpoint(str(out))
    elif name == "plain":
        torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, out / "step3.pt")
    elif name == "fsdp2":
        with Saver(run.model, run.optimizer, out / "saves") as saver:
            saver.save(BEFORE).wait()
    truth = {f"{tensor}/{state}": value.clone() for tensor, state, value in run.values(with_moments=True)}
    losses = run.train(AFTER)
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, losses)
    if distributed.get_rank() == 0:
        torch.save(truth, out / "truth")
        (out / "losses.json").write_text(json.dumps(every))


def save_dcp(run: Run, folder: Path) -> None:
    weights, states = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)


def load_dcp(run: Run, folder: Path) -> None:
    """Load by torch alone."""
    weights, states = get_state_dict(run.model, run.optimizer)
    tree: dict[str, Any] = {"model": weights, "optim": states}
    dcp.load(tree, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])


def convert(folder: Path) -> None:
    """Write the sources that ckpt makes of those of engines."""
    saved = ckpt.open(folder / "fsdp2/dcp-3")
    ckpt.save(saved, folder / "universal", ckpt.Universal())
    ckpt.save(saved, folder / "coded", ckpt.Universal(codec="auto"))
    ckpt.save(ckpt.open(folder / "zero3").weights_only(), folder / "weights", ckpt.Safetensors())
    chain = ckpt.Chain(folder / "deltas.chain")
    for step in range(1, BEFORE + 1):
        chain.append(ckpt.open(folder / f"fsdp2/dcp-{step}"), step=step)
    (folder / "deltas.chain" / "done").touch()


@dataclass(frozen=True)
class Pair:
    """What a load of a source into a target gave: how many values are equal, which differ, and the losses."""

    source: str
    target: str
    equal: int = 0
    differing: tuple[str, ...] = ()
    losses: str = ""
    """`equal`, `differ`, or nothing if there is none to compare with."""
    verified: int = 0
    nbytes: int = 0
    """What all ranks have read."""
    error: str = ""

    @property
    def is_right(self) -> bool:
        return not (self.differing or self.error) and self.losses != "differ" and self.equal > 0


def load_all(target: Target, sources: Sequence[Source], folder: Path, out: Path) -> None:
    """Load each source into a fresh run; called in every rank."""
    expected: dict[str, list[float]] = {}
    with out.open("a") if distributed.get_rank() == 0 else open(os.devnull, "w") as file:
        for source in sources:
            try:
                pair = load_one(target, source, folder, expected)
            except Exception as error:
                traceback.print_exc()
                pair = Pair(source.name, str(target), error=f"{type(error).__name__}: {error}")
            every: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(every, pair)
            wrong = [one for one in every if not one.is_right]
            nbytes = sum(one.nbytes for one in every)
            file.write(json.dumps(vars(replace((wrong or every)[0], nbytes=nbytes))) + "\n")
            file.flush()


def load_one(target: Target, source: Source, folder: Path, expected: dict[str, list[float]]) -> Pair:
    truth: Truth = torch.load(folder / source.run / "truth")
    if source.run not in expected and not source.is_weights:
        expected[source.run] = expected_losses(target, source.run, folder)
    run, address = Run(target, seed=1), str(folder / source.address)
    cooperate: Any = "on" if target.form == "shared" else "off"
    if source.is_weights:
        loaded = load(ckpt.open(address).weights_only(), run.model, cooperate=cooperate)
    else:
        loaded = load(address, run.model, run.optimizer, cooperate=cooperate)
    equal, differing = 0, []
    states = [] if target.engine == "stages" else ["weight", *([] if source.is_weights else [*MOMENTS, "step"])]
    lacking = {key for key in truth if state_of(key) in states}
    for name, state, value in run.values(with_moments=not source.is_weights):
        lacking.discard(f"{name}/{state}")
        if is_equal(value, right_value(truth, name, state, value.dtype, source.is_weights)):
            equal += 1
        else:
            differing.append(f"{name}/{state}")
    losses = run.train(AFTER)
    wanted = [] if source.is_weights else expected[source.run]
    return Pair(
        source.name,
        str(target),
        equal,
        tuple(differing + sorted(lacking)),
        "" if not wanted else "equal" if losses == wanted else "differ",
        loaded.verified,
        loaded.nbytes,
    )


def expected_losses(target: Target, name: str, folder: Path) -> list[float]:
    """Those of the run that never stopped, or after torch's own load of it; nothing if torch cannot load it."""
    if target == target_of(name):
        losses: list[list[float]] = json.loads((folder / name / "losses.json").read_text())
        return losses[distributed.get_rank()]
    if name not in ("fsdp2", "recorded") or target.is_zero or target.form == "meta" or target.engine == "stages":
        return []
    run = Run(target, seed=1)
    load_dcp(run, folder / "fsdp2/dcp-3")  # the recorded run is equal to it
    return run.train(AFTER)


def state_of(key: str) -> str:
    return key.rpartition("/")[2]


def right_value(truth: Truth, name: str, state: str, dtype: torch.dtype, is_weights: bool) -> torch.Tensor:
    """The value that memory of this dtype must have: the one of its own dtype; else the master, rounded to it."""
    if state not in ("weight", "master"):
        return truth[f"{name}/{state}"]
    weight, master = truth[f"{name}/weight"], truth.get(f"{name}/master")
    is_own = is_weights or master is None or (state == "weight" and weight.dtype == dtype)
    return (weight if is_own or master is None else master).to(dtype)


def is_equal(value: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether all bits are equal."""
    if value.dtype != right.dtype or value.shape != right.shape:
        return False
    bits = (one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (value, right))
    return torch.equal(*bits)


def matrix(folder: Path, only: Sequence[str]) -> Iterator[Pair]:
    """Load what `only` takes of all pairs. Yields one target's pairs after another's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_sources(folder)
    for target in TARGETS:
        sources = [one for one in SOURCES if not only or any(text in f"{one.name} > {target}" for text in only)]
        if not sources:
            continue
        out = folder / f"{target}.jsonl"
        out.unlink(missing_ok=True)
        failure = "no result"
        try:
            work = partial(load_all, target, sources, folder, out)
            ranks.run(target.world, work, folder / "logs" / str(target), SECONDS, join(target))
        except ranks.RunFailed as error:
            failure = str(error)
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        pairs: Mapping[str, Pair] = {row["source"]: Pair(**row) for row in rows}
        for source in sources:
            yield pairs.get(source.name, Pair(source.name, str(target), error=failure))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began, pairs = time.monotonic(), []
    for pair in matrix(options.folder.resolve(), options.only):
        pairs.append(pair)
        result = pair.error.splitlines()[0] if pair.error else f"{len(pair.differing)} of {pair.equal} differ"
        print(f"{pair.source:18} {pair.target:12} {result:16} {pair.losses and f'losses {pair.losses}'}", flush=True)
    wrong = [pair for pair in pairs if not pair.is_right]
    values, differ = sum(pair.equal for pair in pairs), sum(len(pair.differing) for pair in pairs)
    compared = [pair.losses for pair in pairs if pair.losses]
    for pair in wrong:
        print(f"{pair.source} > {pair.target}: {pair.error} {', '.join(pair.differing[:4])} {pair.losses}")
    print(
        f"{len(pairs)} pairs, {values + differ} values: {differ} differ; "
        f"losses of {len(compared)} compared: {compared.count('differ')} differ; {len(wrong)} pairs wrong; "
        f"{time.monotonic() - began:.0f} s"
    )
    if options.json:
        options.json.write_text(json.dumps([vars(pair) for pair in pairs], indent=1) + "\n")
    return 1 if wrong or not pairs else 0


if __name__ == "__main__":
    sys.exit(main())
