"""The golden logs: every step of them is restored as real torch had it, by each version of this program."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ckpt.job import Job
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file, states
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients import recorded_values
from ckpt_formats.universal.gradients.record import Kind
from ckpt_formats.universal.gradients.segment import Segment
from ckpt_formats.universal.gradients.state import checkpoint_at
from damage import SAMPLES, ckpt

GOLDEN = SAMPLES / "recorded-1"
RUN = GOLDEN / "run.chain"
EXPECTED: list[dict[str, Any]] = json.loads((GOLDEN / "expected.json").read_text())
UPDATED = SAMPLES / "recorded-2"
"""Of layout version 2, with updates, sets and random states."""
CLASSED = SAMPLES / "recorded-3"
"""Of layout version 3, with gradients that are rounded, and split into classes."""


@pytest.mark.parametrize("step", range(len(EXPECTED)))
def test_every_step_of_the_golden_log_is_that_of_the_run(step: int) -> None:
    wanted = EXPECTED[step]
    checkpoint = states.open_state(RUN, chain_file.load(RUN / chain_file.NAME), step)
    hashes = {
        name: {
            to_stored(state): xxhash.xxh3_128_hexdigest(read(tensor).tobytes())
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


def test_a_log_may_grow_while_it_is_read_but_not_become_that_of_another_run(tmp_path: Path) -> None:
    run = tmp_path / "run.chain"
    shutil.copytree(RUN, run)
    source = open_checkpoint(Path(f"{run}@5"))
    for log in (run / "gradients-0000000003").glob("*.ckg"):
        with log.open("ab") as file:
            file.write(bytes(64))
    Job(source, tmp_path / "grown").run()
    layout = run / "gradients-0000000003" / layouts.NAME
    layout.write_bytes(layout.read_bytes())  # as a copy of another run does, whose logs are larger, too
    with pytest.raises(CorruptError, match="was changed or replaced"):
        Job(source, tmp_path / "exchanged").run()


def _count(parameter: Parameter) -> float:
    """As a value, or as torch's own checkpoints have it: a tensor."""
    return float(read(parameter.states["step"])) if "step" in parameter.states else parameter.values.get("step", 0)


def test_the_golden_log_has_one_of_each_kind_of_record() -> None:
    kinds = set[Kind]()
    for segment in _segments(RUN):
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


def test_every_step_of_the_golden_log_of_version_2_is_that_of_the_run() -> None:
    first, second = _segments(UPDATED / "run.chain")
    for wanted in json.loads((UPDATED / "expected.json").read_text()):
        step = wanted["step"]
        checkpoint = checkpoint_at(first if step < second.first else second, step, None)
        tensors = {name: one for name, one in checkpoint.parameters.items() if one.role != "extra"}
        assert {name: _digest(one) for name, one in tensors.items()} == wanted["tensors"], step
        assert {name: _calls(one) for name, one in tensors.items()} == wanted["counts"], step
        assert [group.options["lr"] for group in checkpoint.groups] == wanted["rates"], step
        assert checkpoint.extras["seen._extra_state"] == {"batches": wanted["batches"]}
        random: Any = checkpoint.extras["random_states"]
        drawn = [[random[f"rank-{rank:05d}"][name] for name in ("torch", "python")] for rank in range(2)]
        hashes = [[_hash(torch), _hash(np.asarray(python["words"], np.uint32))] for torch, python in drawn]
        assert hashes == wanted["random"], step
        if step:
            assert checkpoint.extras["schedule"] == {"last": step, "warm": (1, 2)}
            assert checkpoint.extras["seen"] == step * 6


def _segments(run: Path) -> list[Segment]:
    return [states.open_steps(run, one, check_from=0) for one in chain_file.load(run / chain_file.NAME).segments]


def _digest(parameter: Parameter) -> str:
    """As `make_recording_2.digest` computes it."""
    content = {to_stored(name): read(one) for name, one in parameter.states.items() if name != "step"}
    return _hash(*(values for name, values in sorted(content.items()) if name == "param" or values.any()))


def _hash(*arrays: Any) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(np.ascontiguousarray(one).tobytes() for one in arrays))


def _calls(parameter: Parameter) -> float:
    return float(parameter.values["calls"]) if "calls" in parameter.values else _count(parameter)


def test_the_golden_log_of_version_2_has_one_of_each_kind_of_record() -> None:
    segments = _segments(UPDATED / "run.chain")
    records = [record for segment in segments for log in segment.logs for record in log.records]
    assert {record.kind for record in records} == set(Kind) - {Kind.BUFFERS}  # those of version 1
    assert {method.method for segment in segments for method in segment.layout.optimizers} == {"adam-fused", "update"}
    assert {record.meta.get("set") for record in records} == {None, "before", "after"}
    codings = {coding for record in records for _, coding in record.meta.get("changes", ())}
    assert codings == {recorded_values.WHOLE, recorded_values.DELTA, recorded_values.GONE}
    assert {record.meta.get("part", [0, 1])[1] for record in records} == {1, 2}


def test_every_step_of_the_golden_log_of_version_3_is_that_of_rounded_gradients() -> None:
    (segment,) = _segments(CLASSED / "run.chain")
    for wanted in json.loads((CLASSED / "expected.json").read_text()):
        checkpoint = checkpoint_at(segment, wanted["step"], None)
        parameters = {name: one for name, one in checkpoint.parameters.items() if one.role != "extra"}
        assert {name: _digest(one) for name, one in parameters.items()} == wanted["tensors"], wanted["step"]
    with Reader() as reader:
        chunks = [one.read_chunk(segment.path(0), 0, 1 << 16, reader)[0] for one in segment.records(0, Kind.GRADIENTS)]
    assert (segment.layout.version, segment.last) == (3, 6)
    assert {int(chunk[0]) for chunk in chunks} == {10, 12}, "chunks with and without classes"


@pytest.mark.parametrize("golden", [GOLDEN, UPDATED])
def test_commands_take_the_golden_log(golden: Path, tmp_path: Path) -> None:
    run = golden / "run.chain"
    done = ckpt("verify", run, "--replay")
    assert done.code == 0, done
    for command in (["log", run], ["inspect", f"{run}@5"], ["restore", run, tmp_path / "out", "--step", "5"]):
        done = ckpt(*command)
        assert done.code == 0, done
    assert ckpt("verify", tmp_path / "out").code == 0
