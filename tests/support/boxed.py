"""A small run of three ranks that saves its boxes into a chain: shards, flat ranges, and ranges of shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ckpt.chains.write import member_of
from ckpt_codecs.delta import StepInfo
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, ArrayBlob, Tensor
from ckpt_formats.core.values import TensorName
from ckpt_formats.universal.boxes import CheckpointNotes, PackReceipt, RankBox, RankPack, RankValues, assemble
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member
from ckpt_formats.universal.manifest import Manifest, Parent

ADAM = {"master": "float32", "model": "bfloat16", "exp_avg": "float32", "exp_avg_sq": "float32"}
OPTIMIZER = {state: dtype for state, dtype in ADAM.items() if state != "model"}
MODEL = {"model": "bfloat16"}
SHAPES: dict[str, Shape] = {
    "rows": (40, 12), "flat": (7, 11), "tp": (8, 6), "zero": (30,), "bias": (5,), "frozen": (3,), "empty": (0, 3)
}  # fmt: skip
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def box(name: str, states: Mapping[str, str], low: Shape, high: Shape, *elements: int) -> RankBox:
    return RankBox(name, "parameter", SHAPES[name], Box(low, high), states, *elements)


RANKS: list[list[RankBox]] = [
    [
        box("rows", ADAM, (0, 0), (14, 12)),
        box("flat", ADAM, (0, 0), (7, 11), 0, 30),
        box("tp", ADAM, (0, 0), (8, 3), 0, 10),
        box("zero", OPTIMIZER, (0,), (30,), 0, 17),
        RankBox("frozen", "buffer", (3,), Box((0,), (3,)), {"model": "int64"}),
        RankBox("rng", "extra", (16,), Box((0,), (16,)), {"model": "uint8"}),
    ],
    [
        box("flat", ADAM, (0, 0), (7, 11), 30, 31),
        box("rows", ADAM, (14, 0), (28, 12)),
        box("tp", ADAM, (0, 0), (8, 3), 10, 24),
        box("zero", OPTIMIZER, (0,), (30,), 17, 30),
        box("bias", ADAM, (0,), (5,)),
        RankBox("bias", "parameter", (), Box((), ()), {"step": "float32"}),
    ],
    [
        box("rows", ADAM, (28, 0), (40, 12)),
        box("flat", ADAM, (0, 0), (7, 11), 31, 77),
        box("tp", ADAM, (0, 3), (8, 6)),
        box("zero", MODEL, (0,), (30,)),
        RankBox("empty", "buffer", (0, 3), Box((0, 0), (0, 3)), {"model": "float32"}),
    ],
]
"""The boxes of each rank."""
States = dict[str, dict[str, Array]]


def states_at(step: int) -> States:
    """All whole states after a step: those of Adam, and others."""
    result: States = {}
    for name in ("rows", "flat", "tp", "zero", "bias"):
        random, shape = np.random.default_rng([7, len(name)]), SHAPES[name]
        master = random.standard_normal(shape).astype(np.float32)
        mean, square = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for at in range(1, step + 1):
            grad = np.random.default_rng([at, *name.encode()]).standard_normal(shape).astype(np.float32)
            mean = mean + (grad - mean) * np.float32(0.1)
            square = square * np.float32(0.999) + grad * grad * np.float32(0.001)
            root = np.sqrt(square) / np.float32(np.sqrt(1 - 0.999**at)) + np.float32(1e-8)
            master = master - np.float32(1e-3 / (1 - 0.9**at)) * mean / root
        model = master.astype(DTYPES["bfloat16"])
        result[name] = {"master": master, "model": model, "exp_avg": mean, "exp_avg_sq": square}
    result["zero"]["model"] = result["zero"].pop("model")  # the last state that ranks list
    result["bias"]["step"] = np.array(step, np.float32)
    result["frozen"] = {"model": np.array([1, -2, 1 << 60], np.int64)}
    result["rng"] = {"model": np.arange(16, dtype=np.uint8) * step}
    result["empty"] = {"model": np.zeros((0, 3), np.float32)}
    return result


def notes_at(step: int) -> CheckpointNotes:
    groups = (Group(OPTIONS, ("zero", "rows", "flat", "tp")), Group({**OPTIONS, "lr": 0.5}, ("bias",)))
    values = {name: {"step": step} for name in ("rows", "flat", "tp", "zero")}
    extras = {"seed": 7, "rng": TensorName("rng")}
    order = ("rows", "flat", "tp", "zero", "bias", "frozen", "empty", "rng")
    return CheckpointNotes(Origin("torch", "2.13", step), groups, {"tied": "rows"}, extras, values, order)


def checkpoint_at(step: int) -> Checkpoint:
    """The same checkpoint with whole tensors, in memory."""
    notes, states = notes_at(step), states_at(step)
    roles = {box.parameter: box.role for boxes in RANKS for box in boxes}
    parameters = {
        name: Parameter(
            name,
            roles[name],
            {state: Tensor.of(ArrayBlob(values)) for state, values in states[name].items()},
            notes.values.get(name, {}),
        )
        for name in notes.order
    }
    return Checkpoint(
        path=Path("whole"),
        origin=notes.origin,
        parameters=parameters,
        groups=notes.groups,
        extras=notes.extras,
        aliases=notes.aliases,
    )


@dataclass
class BoxedRun:
    """A run that appends its boxes to a chain."""

    run: Path
    scratch: Path
    """A folder for the values of ranks."""
    ranks: Sequence[Sequence[RankBox]] = field(default_factory=lambda: RANKS)
    members: list[Member] = field(default_factory=list)
    values: list[RankValues] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def save(self, step: int, *, codec: str | None = None, delta: bool = False, plain: bool = False) -> Manifest:
        """Append a member: plain packs without local values, or coded ones; with `delta` against the last save."""
        folder = self.run / f"step-{step:010d}"
        receipts, values = [], []
        for rank, boxes in enumerate(self.ranks):
            local = None if plain else self.scratch / f"values-{rank}-{step % 2}"
            earlier = self.values[rank] if delta else None
            steps = {name: StepInfo(step - 1, step, OPTIONS) for name in SHAPES}
            pack = RankPack(
                folder, rank, boxes, save=f"run:{step}", codec=codec, values=local, earlier=earlier, steps=steps
            )
            with pack:
                add_all(pack, boxes, states_at(step))
                receipts.append(PackReceipt.from_bytes(pack.finish().to_bytes(), folder))
            self.notes += pack.notes
            values.append(pack.rank_values)
        last = self.members[-1] if delta else None
        parent = None if last is None else Parent(last.content, f"../{last.folder}")
        stated = assemble(folder, receipts, notes_at(step), parent)
        self.members.append(member_of(folder, stated, step))
        (self.run / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex(tuple(self.members))))
        self.values = values
        return stated


def add_all(pack: RankPack, boxes: Sequence[RankBox], states: States) -> None:
    """Add the values of all boxes of a rank, in small runs, one state after another."""
    for number, one in enumerate(boxes):
        for state in one.states:
            data = elements(one, states[one.parameter][state])
            for at in range(0, len(data), 1000):
                pack.add(number, state, at, data[at : at + 1000])


def elements(one: RankBox, whole: Array) -> bytes:
    """The bytes that a rank has of a whole state."""
    vector = whole[one.block.index].reshape(-1)
    return vector[one.start : one.stop].tobytes()
