"""The `repr` of each public object is a line, also of a checkpoint with 10,000 parameters."""

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.combine.average import Average
from ckpt.compare.result import TensorDiff
from ckpt.partial.changes import BlockChange
from ckpt_formats.core.checkpoint import Group, Parameter
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.layout import Layout
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.value_changes import ChangedTensor
from ckpt_formats.universal.chain.chain_file import Member
from held import checkpoint
from public_names import PUBLIC

COUNT = 10_000
NAMES = tuple(f"model.layers.{i}.mlp.experts.down_proj.weight" for i in range(COUNT))
FOLDER = Path("/scratch/" + "a-long-name/" * 30)
RULES = tuple(ckpt.Rule(name) for name in NAMES[:100])
HISTOGRAM = ckpt.types.Histogram(-44, (COUNT,) * 90)
NOTICE = ckpt.types.Notice("a sentence " * 30, NAMES)


@pytest.fixture(scope="module")
def run() -> ckpt.Checkpoint:
    tensor = Tensor.of(ArrayBlob(np.zeros((2, 2), np.float32)))
    return checkpoint(Parameter(name, "parameter", {"model": tensor, "master": tensor}) for name in NAMES)


def result() -> ckpt.types.Result:
    changed = tuple(ChangedTensor(name, "float16", 1, 1, 1) for name in NAMES)
    return ckpt.types.Result(FOLDER, COUNT, 1 << 40, 0, 0, 1.5, "pending", {1: NAMES}, "", changed, (NOTICE,) * COUNT)


OBJECTS: dict[str, Callable[[ckpt.Checkpoint], Any]] = {
    "checkpoint": lambda run: run,
    "parameter": lambda run: run[NAMES[0]],
    "tensor": lambda run: run[NAMES[0]].weight,
    "group": lambda run: Group({"lr": 1e-3, "betas": (0.9, 0.999)}, NAMES),
    "job": lambda run: ckpt.Job(run, FOLDER, ckpt.DeepSpeed(rules=RULES)),
    "plan": lambda run: ckpt.Job(run, "no-such-target", "safetensors").plan(),
    "file plan": lambda run: ckpt.types.FilePlan(NAMES[0] * 9, tuple(run.values())),
    "diff": lambda run: ckpt.types.Diff(tuple(TensorDiff(name, "model", "equal") for name in NAMES)),
    "sums of a difference": lambda run: ckpt.types.DiffSums(*[COUNT**5 + 1 / 3] * 8, HISTOGRAM),
    "figures": lambda run: ckpt.types.Figures(*[COUNT**5 + 1 / 3] * 8, HISTOGRAM),
    "histogram": lambda run: HISTOGRAM,
    "finding": lambda run: ckpt.types.Finding("coverage", "what " * 100, str(FOLDER), NAMES),
    "report": lambda run: ckpt.types.Report((ckpt.types.Finding("copy", "what", "where"),) * COUNT),
    "edit": lambda run: run.rename(dict.fromkeys(NAMES[:1], "w")).history[-1],
    "average": lambda run: Average(((FOLDER, ()),) * COUNT, (1.0,) * COUNT),
    "notice": lambda run: NOTICE,
    "result": lambda run: result(),
    "append result": lambda run: ckpt.types.AppendResult(Member("a", "base", 1, "i", None, (), 1, 1, "now"), result()),
    "block change": lambda run: BlockChange(NAMES[0] * 9, (Box((0,), (1,)),) * COUNT, 0.5, 4),
    "layout": lambda run: Layout(RULES),
    "copy": lambda run: ckpt.Copy(FOLDER, FOLDER),
    "chain": lambda run: ckpt.Chain(FOLDER),
    "failure plan": lambda run: ckpt.planning.plan_schedule(ckpt.planning.RunCosts(1, 3600, 1)),
    "evaluation": lambda run: ckpt.Evaluation(NAMES, 0.1),
    "policy": lambda run: ckpt.DeltaPolicy(exact=NAMES[:100]),
    "ranks": lambda run: ckpt.partial.RankSet(tuple(range(COUNT))),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_repr_is_a_line_of_at_most_200_characters(name: str, run: ckpt.Checkpoint) -> None:
    text = repr(OBJECTS[name](run))
    assert len(text) <= 200
    assert "\n" not in text
    assert " object at 0x" not in text


def test_repr_of_a_dataclass_has_what_is_not_a_default() -> None:
    assert repr(ckpt.DeepSpeed(dp=8, zero=3)) == "DeepSpeed(dp=8, zero=3)"
    assert repr(ckpt.types.Plan((ckpt.types.FilePlan("a"),))) == "Plan(files=<1 item>)"
    assert repr(ckpt.types.FilePlan("a" * 99)) == f"FilePlan(file='{'a' * 46}…)"
    assert repr(ckpt.types.Notice("text", ("a", "b"))) == "Notice(text='text', names=('a', 'b'))"


def test_every_public_dataclass_has_a_short_repr() -> None:
    """Else only plain fields, of which there are few."""
    for kind in PUBLIC.values():
        if isinstance(kind, type) and is_dataclass(kind) and "_recursive_repr" in kind.__repr__.__qualname__:
            many = [one.name for one in fields(kind) if re.search("tuple|Mapping|Sequence|dict", str(one.type))]
            assert not many, kind.__name__
