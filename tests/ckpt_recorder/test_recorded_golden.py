"""The golden log of gradients: every step of it is restored as real torch had it, by each version of this program."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain import states
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.record import Kind
from damage import SAMPLES, ckpt

GOLDEN = SAMPLES / "recorded-1"
RUN = GOLDEN / "run.chain"
EXPECTED: list[dict[str, Any]] = json.loads((GOLDEN / "expected.json").read_text())


@pytest.mark.parametrize("step", range(len(EXPECTED)))
def test_every_step_of_the_golden_log_is_that_of_the_run(step: int) -> None:
    wanted = EXPECTED[step]
    checkpoint = states.open_state(RUN, index.load(RUN / index.NAME), step)
    hashes = {
        name: {
            state: xxhash.xxh3_128_hexdigest(read(tensor).tobytes())
            for state, tensor in parameter.states.items()
            if state != "step"
        }
        for name, parameter in checkpoint.parameters.items()
    }
    if step == 0:  # a state of zeros may be left out where no step was done
        hashes = {name: {**wanted["tensors"][name], **states} for name, states in hashes.items()}
    assert hashes == wanted["tensors"]
    assert {name: _count(checkpoint.parameters[name]) for name in wanted["counts"]} == wanted["counts"]
    assert [group.options["lr"] for group in checkpoint.groups] == wanted["rates"]
    assert checkpoint.parameters["scale"].role == "frozen"
    assert checkpoint.aliases == {"tied": "head.bias"} or step >= 3
    if step in (1, 2, 4, 5, 6):
        assert checkpoint.extras["seen"] == wanted["seen"]
        assert checkpoint.extras["schedule"] == {"last": step, "warm": (1, 2)}
        random = checkpoint.extras["random_states"]
        assert isinstance(random, dict)
        for rank in range(2):
            of_rank = random[f"rank-{rank:05d}"]
            assert of_rank["seed"] == step
            assert np.array_equal(of_rank["torch"], np.arange(step, step + 16, dtype=np.uint8) + rank)


def _count(parameter: Parameter) -> float:
    """As a value, or as torch's own checkpoints have it: a tensor."""
    return float(read(parameter.states["step"])) if "step" in parameter.states else parameter.values.get("step", 0)


def test_the_golden_log_has_one_of_each_kind_of_record() -> None:
    chain = index.load(RUN / index.NAME)
    kinds = set[Kind]()
    for one in chain.segments:
        segment = states.open_steps(RUN, one, check=True)
        assert not segment.torn
        kinds |= {record.kind for log in segment.logs for record in log.records}
        content = (segment.folder / layouts.NAME).read_bytes()
        again = layouts.dump(segment.layout)
        assert _without_head(again) == _without_head(content)
    assert kinds == {kind for kind in Kind if kind <= Kind.END}  # those of version 1


def _without_head(content: bytes) -> bytes:
    """Without the checksum, and the versions of the program and of the format."""
    versions = (b' "written_by"', b' "version"')
    return b"\n".join(line for line in content.splitlines()[1:] if not line.startswith(versions))


def test_commands_take_the_golden_log(tmp_path: Path) -> None:
    done = ckpt("verify", RUN, "--replay")
    assert done.code == 0, done
    for command in (["log", RUN], ["inspect", f"{RUN}@5"], ["restore", RUN, tmp_path / "out", "--step", "5"]):
        done = ckpt(*command)
        assert done.code == 0, done
    assert ckpt("verify", tmp_path / "out").code == 0
