"""What `verify` finds is all that is wrong, with the tensors that it touches."""

from pathlib import Path

import numpy as np

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import MODEL, Parameter
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import ArrayBlob, Fragment, Tensor
from ckpt_formats.universal import Universal
from held import checkpoint, everything, flip, parameter

EFFORT = Execution(1, 1 << 20)


def test_verify_finds_every_flaw_with_its_tensor() -> None:
    values = np.zeros(4, np.float32)
    middle = Tensor((4,), values.dtype, (Fragment(Box((1,), (2,)), ArrayBlob(values[1:2])),))
    source = checkpoint([parameter("whole", {MODEL: values}), Parameter("holed", "parameter", {MODEL: middle}, {})])
    problems = find_problems(source, EFFORT)
    assert [(finding.kind, finding.tensors) for finding in problems] == [("coverage", ("holed",))] * 2
    assert [finding.what for finding in problems] == [
        f"{MODEL}: no file holds block {gap} of shape [4]" for gap in ("[0:1]", "[2:4]")
    ]


def test_verify_names_the_tensor_that_damage_touches(tmp_path: Path) -> None:
    save(everything(), tmp_path / "u", Universal(), resources=EFFORT)
    source = Universal().read(tmp_path / "u", ReadOptions())
    raws = [(p.name, raw) for p, _, tensor in source.tensors() for raw in tensor.sources() if raw.span]
    assert len(raws) > 5
    for name, raw in raws:
        flip(raw.path, raw.offset)
        problems = find_problems(source, EFFORT)
        assert [finding.tensors for finding in problems if finding.kind == "checksum"] == [(name,)]
        assert not any(finding.tensors == (name,) for finding in problems if finding.kind != "checksum")
        flip(raw.path, raw.offset)
    # This one's copy is not its master, rounded.
    assert [(finding.kind, finding.tensors) for finding in find_problems(source, EFFORT)] == [("copy", ("layers.1.w",))]
