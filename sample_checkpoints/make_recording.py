"""Write the golden log of gradients: `python sample_checkpoints/make_recording.py`. The recorder is not needed.

`recorded-1/run.chain` is a run of real torch as two ranks would record it, written with the functions of the format:
a segment that stores its first state, a base at its end, and a segment that begins at that base. It has two
optimizers, whose calls are the two parts of each step; a step that was left out; one in which a tensor had no gradient;
fingerprints, notes, buffers, a frozen tensor and states of random number generators. `recorded-1/expected.json` has
the expected values of each step: the XXH3-128 of every state, computed from the tensors of torch. A golden file of a
released version is never written again.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "formats"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "codecs"))

from ckpt_cli.main import run as command
from ckpt_codecs.gradients import gradient_codec
from ckpt_codecs.optimizers import whole_vectors
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.layout import (
    LoggedOptimizer,
    LoggedTensor,
    OptimizerVector,
    RankLayout,
    SegmentLayout,
    VectorPart,
)
from ckpt_formats.universal.gradients.record import FileHead, Kind, hash_values, record_parts
from ckpt_formats.universal.gradients.segment import rank_file

TARGET = Path(__file__).resolve().parent / "recorded-1"
BASE, LAST = 3, 6
"""Where the second segment begins, and where it ends."""
SKIPPED, WITHOUT_HEAD = 2, 5
"""A step before which one was left out; one in which the head has no gradient."""
TIME = "2026-01-01T00:00:00Z"
OPTIONS = {
    0: ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    1: ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
}


class Net(nn.Module):
    """With one tensor of more elements than a chunk has, most of them zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(613, 450)
        self.norm = nn.BatchNorm1d(450)
        self.head = nn.Linear(450, 7)
        self.scale = nn.Parameter(torch.tensor([2.0, 0.5]), requires_grad=False)
        nn.init.zeros_(self.table.weight)
        nn.init.normal_(self.table.weight[:3])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.table(rows))) * self.scale[0]
        return logits


class Run:
    """The run, and what of it is where."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.net = Net()
        groups = [
            {"params": [self.net.table.weight, self.net.head.weight]},
            {"params": [self.net.head.bias], "weight_decay": 0.0},
        ]
        adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        sgd = torch.optim.SGD(self.net.norm.parameters(), lr=0.1, momentum=0.9)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (adam, sgd)
        self.named = {name: tensor for name, tensor in self.net.named_parameters() if tensor.requires_grad}
        self.names = {id(tensor): name for name, tensor in self.named.items()}
        self.vectors = [
            (number, at, tensor)
            for number, optimizer in enumerate(self.optimizers)
            for at, group in enumerate(optimizer.param_groups)
            for tensor in group["params"]
        ]

    def options(self, number: int) -> Any:
        groups = self.optimizers[number].param_groups
        return encode([{key: group[key] for key in OPTIONS[number] if key in group} for group in groups])

    def state(self, name: str, state: str) -> Array:
        tensor = self.named[name]
        states = next(one.state[tensor] for one in self.optimizers if tensor in one.state or one is self.optimizers[-1])
        values = tensor if state == "param" else states.get(state)
        return np.zeros(tensor.shape, np.float32) if values is None else values.detach().numpy().copy()

    def count(self, name: str) -> int:
        states = next((one.state[self.named[name]] for one in self.optimizers if self.named[name] in one.state), {})
        return int(states.get("step", 1)) if states else 0

    def layout(self, first: int, parent: str | None) -> SegmentLayout:
        tensors = tuple(LoggedTensor(name, "float32", tuple(one.shape)) for name, one in self.named.items())
        numbers = {one.name: i for i, one in enumerate(tensors)}
        vectors = tuple(
            OptimizerVector(number, group, self.count(self.names[id(one)])) for number, group, one in self.vectors
        )
        pieces: list[list[VectorPart]] = [[], []]
        for number, (of, _, tensor) in enumerate(self.vectors):
            name, size, shape = self.names[id(tensor)], tensor.numel(), tuple(tensor.shape)
            if name == "head.weight":  # each rank has rows of it: a block
                cuts = [(Box((0, 0), (4, 450)), 0, 1800, 0), (Box((4, 0), (7, 450)), 0, 1350, 1800)]
            else:
                middle = size // 3
                cuts = [(Box.whole(shape), 0, middle, 0), (Box.whole(shape), middle, size, middle)]
            for of_rank, (box, start, stop, offset) in zip(pieces, cuts, strict=True):
                whole = whole_vectors(size, offset, offset + stop - start, is_fused=not of)
                of_rank.append(VectorPart(numbers[name], number, start, stop, whole, box))
        adam = tuple(tuple(self.names[id(p)] for p in group["params"]) for group in self.optimizers[0].param_groups)
        sgd = tuple(tuple(self.names[id(p)] for p in group["params"]) for group in self.optimizers[1].param_groups)
        optimizers = (
            LoggedOptimizer("torch.optim.adamw.AdamW", "adam-fused", "exact", {"values": 5}, adam),
            LoggedOptimizer("torch.optim.sgd.SGD", "sgd", "exact", {}, sgd),
        )
        ranks = tuple(RankLayout(vectors, tuple(sorted(one, key=lambda p: p.size < 1 << 16))) for one in pieces)
        name = f"golden-{first}"
        return SegmentLayout(
            name, first, "exact", tensors, optimizers, ranks, {"tied": "head.bias"}, {"torch": "2"}, parent
        )


class RankFile:
    """The file of a rank, as its writer would leave it."""

    def __init__(self, folder: Path, layout: SegmentLayout, rank: int) -> None:
        content = (folder / layouts.NAME).read_bytes()
        head = FileHead(rank, len(layout.ranks), layout.first, layouts.identity(content)).dump()
        self._layout, self._rank, self._path = layout, layout.ranks[rank], folder / rank_file(rank)
        self._path.write_bytes(head)
        self._previous = int.from_bytes(head[56:], "little")

    def vector(self, tensors: Mapping[str, Array]) -> Array:
        """What the rank has of whole tensors; zeros of those that are not given."""
        parts = []
        for piece in self._rank.parts:
            tensor = self._layout.tensors[piece.tensor]
            values = tensors.get(tensor.name, np.zeros(tensor.shape, np.float32))
            parts.append(values[piece.box.index].reshape(-1)[piece.start : piece.stop])
        return np.concatenate(parts)

    def hashes(self, values: Array) -> list[int]:
        bounds = map(self._rank.chunk_bounds, range(self._rank.chunk_count))
        return [hash_values(values[start:stop]) for start, stop in bounds]

    def append(self, kind: Kind, step: int, meta: dict[str, Any], values: Array | None = None, more: Any = ()) -> None:
        """A record of a vector, and of chunks of bytes behind it."""
        chunks, hashes = list[bytes](), list[int]()
        if values is not None:
            for index_ in range(self._rank.chunk_count):
                start, stop = self._rank.chunk_bounds(index_)
                chunks.append(bytes(gradient_codec("exact").encode(values[start:stop], None)))
            hashes += self.hashes(values)
        for data in more:
            chunks.append(data)
            hashes.append(hash_values(np.frombuffer(data, np.uint8)))
        parts, self._previous = record_parts(kind, step, meta, chunks, hashes, self._previous)
        with self._path.open("ab") as file:
            file.writelines(parts)


class Recording:
    """A segment that both ranks write."""

    def __init__(self, chain: Path, run: Run, first: int, parent: str | None) -> None:
        self.layout = run.layout(first, parent)
        self.folder, self._run = chain / f"gradients-{first:010d}", run
        self.folder.mkdir(parents=True)
        (self.folder / layouts.NAME).write_bytes(layouts.dump(self.layout))
        self._files = [RankFile(self.folder, self.layout, rank) for rank in range(2)]
        options = [run.options(number) for number in range(2)]
        for rank, file in enumerate(self._files):
            file.append(Kind.NOTES, first, {"notes": {}, "groups": options})
            if rank == 0:
                self._buffers(first, ("scale",) if parent is None else ())
            for state in STATES if parent is None else ():
                file.append(Kind.STATE, first, {"state": state}, file.vector(self._states(state)))
        self.fingerprint(first)

    def _states(self, state: str) -> dict[str, Array]:
        return {name: self._run.state(name, state) for name in self._run.named}

    def fingerprint(self, step: int) -> None:
        for file in self._files:
            digests = {state: file.hashes(file.vector(self._states(state))) for state in STATES}
            file.append(Kind.FINGERPRINT, step, {"digests": digests})

    def _buffers(self, step: int, frozen: tuple[str, ...] = ()) -> None:
        rows = [(name, "buffer", tensor) for name, tensor in self._run.net.named_buffers()]
        rows += [(name, "frozen", self._run.net.get_parameter(name)) for name in frozen]
        listed = [[name, role, str(tensor.dtype)[6:], list(tensor.shape)] for name, role, tensor in rows]
        content = [tensor.detach().numpy().tobytes() for _, _, tensor in rows]
        self._files[0].append(Kind.BUFFERS, step, {"tensors": listed}, more=content)

    def skipped(self, step: int) -> None:
        for file in self._files:
            file.append(Kind.SKIPPED, step, {"optimizer": 0})

    def gradients(self, step: int) -> None:
        """What the optimizers are about to step with."""
        self._buffers(step)
        run = self._run
        for rank, file in enumerate(self._files):
            for number in range(2):
                present = [i for i, (of, _, one) in enumerate(run.vectors) if of == number and one.grad is not None]
                grads = {run.names[id(run.vectors[i][2])]: run.vectors[i][2].grad for i in present}
                values = file.vector({name: grad.numpy() for name, grad in grads.items() if grad is not None})
                meta = {"groups": run.options(number), "optimizer": number, "vectors": present, "part": [number, 2]}
                random = {"torch": np.arange(step, step + 16, dtype=np.uint8) + rank, "seed": step}
                text = json.dumps(encode(random)).encode()
                file.append(Kind.GRADIENTS, step, meta, values, [text] if number else [])

    def noted(self, step: int) -> None:
        notes = {"schedule": {"last": step, "warm": (1, 2)}, "seen": np.int64(step * 6)}
        self._files[0].append(Kind.NOTES, step, {"notes": encode(notes)})

    def end(self, step: int) -> None:
        for file in self._files:
            file.append(Kind.END, step, {})


STATES = ("param", "exp_avg", "exp_avg_sq", "momentum_buffer")


def expected(run: Run, step: int) -> dict[str, Any]:
    """What must be restored: by tensor the hash of each state that its optimizer keeps; rates; counts."""
    tensors: dict[str, dict[str, str]] = {}
    for number, _, tensor in run.vectors:
        name = run.names[id(tensor)]
        states = ("param", "momentum_buffer") if number else ("param", "exp_avg", "exp_avg_sq")
        tensors[name] = {state: xxhash.xxh3_128_hexdigest(run.state(name, state).tobytes()) for state in states}
    for name, tensor in [*run.net.named_buffers(), ("scale", run.net.scale)]:
        tensors[name] = {"param": xxhash.xxh3_128_hexdigest(tensor.detach().numpy().tobytes())}
    counts = {name: run.count(name) for name in run.named if not name.startswith("norm")}
    rates = [group["lr"] for one in run.optimizers for group in one.param_groups]
    return {"step": step, "tensors": tensors, "counts": counts, "rates": rates, "seen": step * 6}


def train(run: Run, recording: Recording, step: int) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    random = torch.Generator().manual_seed(step)
    rows, wanted = torch.randint(5, (6,), generator=random), torch.randint(7, (6,), generator=random)
    nn.functional.cross_entropy(run.net(rows), wanted).backward()
    if step == WITHOUT_HEAD:
        run.net.head.weight.grad = None
    if step == SKIPPED:
        recording.skipped(step - 1)
    recording.gradients(step)
    for optimizer in run.optimizers:
        optimizer.step()
    recording.noted(step)


def base_of(run: Run, step: int, scratch: Path) -> Path:
    """A chain of the state alone, made by `ckpt append`."""
    number = {id(tensor): i for i, tensor in enumerate(run.net.parameters())}
    state = {number[id(one)]: run.optimizers[of].state[one] for of, _, one in run.vectors}
    groups = [
        {**group, "params": [number[id(one)] for one in group["params"]]}
        for optimizer in run.optimizers
        for group in optimizer.param_groups
    ]
    content = {"model": run.net.state_dict(), "optimizer": {"state": state, "param_groups": groups}, "step": step}
    torch.save(content, scratch / "base.pt")
    sys.argv = ["ckpt", "append", str(scratch / "base.chain"), str(scratch / "base.pt")]
    try:
        command()
    except SystemExit as end:
        if end.code:
            raise
    return scratch / "base.chain"


def main() -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    chain, run = TARGET / "run.chain", Run()
    first = Recording(chain, run, 0, None)
    wanted = [expected(run, 0)]
    for step in range(1, BASE + 1):
        train(run, first, step)
        wanted.append(expected(run, step))
        if step == BASE - 1:
            first.fingerprint(step)
    first.end(BASE)
    with tempfile.TemporaryDirectory() as scratch:
        base = base_of(run, BASE, Path(scratch))
        member = replace(chain_file.load(base / chain_file.NAME).members[0], time=TIME)
        shutil.copytree(base / member.folder, chain / member.folder)
    second = Recording(chain, run, BASE, member.content)
    for step in range(BASE + 1, LAST + 1):
        train(run, second, step)
        wanted.append(expected(run, step))
    second.fingerprint(LAST)
    segments = (
        LoggedSteps(first.folder.name, first.layout.run, 0, BASE, None, TIME),
        LoggedSteps(second.folder.name, second.layout.run, BASE, None, member.content, TIME),
    )
    (chain / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex((member,), segments)))
    (TARGET / "expected.json").write_text(json.dumps(wanted, indent=1) + "\n")
    nbytes = sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file())
    print(f"{TARGET.name}: {len(wanted)} steps, {nbytes:,} bytes")


if __name__ == "__main__":
    main()
