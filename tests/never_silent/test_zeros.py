"""Zeros that a crash, a download or a broken run left are noted once; those of biases, padding and step 0 are not."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt.pipeline.receipts import from_lines, to_line
from ckpt.pipeline.shard import Shard
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.zero_runs import LONG, ZeroRun, ZeroRuns
from ckpt_formats.engines.safetensors import Safetensors
from ckpt_formats.registry.opening import open_checkpoint
from damage import ckpt

Arrays = Mapping[str, Any]
SHAPE = (512, 640)
"""1.25 MiB of float32; a row does not end at a page."""


def weights(names: str = "abcd") -> dict[str, Any]:
    values = np.random.default_rng(0).standard_normal((len(names), *SHAPE), np.float32)
    return {f"{name}.weight": one for name, one in zip(names, values, strict=True)}


def notes_of_zeros(ran: Any) -> list[str]:
    assert ran.code == 0, ran.err
    return [line for line in ran.err.splitlines() if " zero" in line]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose second half was never written."""
    path = tmp_path_factory.mktemp("half") / "model.safetensors"
    save_file({**weights(), "a.bias": np.zeros(640, np.float32)}, path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2 // 4096 * 4096 - 512)
        file.truncate(size)
    return path


@pytest.mark.parametrize("command", ["verify", "verify --values", "convert", "copy", "compress"])
def test_every_command_notes_the_half_of_a_file_that_is_zero(half: Path, tmp_path: Path, command: str) -> None:
    name, *options = command.split()
    targets = [] if name == "verify" else [tmp_path / ("t.ucp" if name == "compress" else "t.safetensors")]
    [note] = notes_of_zeros(ckpt(name, half, *targets, *options))
    assert note.startswith("note: 2.5 MiB of model.safetensors are zero from inside a tensor on")
    assert note.endswith("3 tensors: b.weight, c.weight, d.weight")


def test_verify_notes_a_dense_half_when_it_reads_values(half: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(half.read_bytes())  # no hole: the zeros are written
    assert notes_of_zeros(ckpt("verify", path)) in ([], notes_of_zeros(ckpt("verify", path, "--values")))
    assert len(notes_of_zeros(ckpt("verify", path, "--values"))) == 1


@pytest.mark.parametrize(
    ("zeros", "names"),
    [
        ({"b.weight": SHAPE}, ["b.weight"]),
        ({"c.lora_B.weight": SHAPE, "x.bias": (4096, 80), "ids": (1 << 18,)}, []),
        ({"norm.weight": (640,)}, []),
    ],
)
def test_notes_name_large_weights_of_zeros_only(tmp_path: Path, zeros: Mapping[str, Any], names: list[str]) -> None:
    path = tmp_path / "m.safetensors"
    kind = {"ids": np.int64}
    save_file(weights("a") | {name: np.zeros(shape, kind.get(name, np.float32)) for name, shape in zeros.items()}, path)
    expected = [f"note: 1 tensor of 1 MiB or more is zero in every element: {name}" for name in names]
    assert notes_of_zeros(ckpt("verify", path, "--values")) == expected
    notes = json.loads(ckpt("convert", path, tmp_path / "o.pt", "--json").out)["notes"]
    assert [one["names"] for one in notes if " zero" in one["text"]] == [[name] for name in names]


def test_notes_take_rows_of_padding_for_no_hole(tmp_path: Path) -> None:
    embedding = np.random.default_rng(1).standard_normal((1500, 640), np.float32)
    embedding[-600:] = 0  # 1.5 MiB at the end of the file
    embedding[:5] = 0
    path = tmp_path / "m.safetensors"
    save_file({"emb": embedding}, path)
    assert notes_of_zeros(ckpt("verify", path, "--values")) == []
    embedding[700:] = 0  # more than half of it
    save_file({"emb": embedding}, path)
    assert len(notes_of_zeros(ckpt("verify", path, "--values"))) == 1


@pytest.mark.parametrize(
    ("step", "first", "is_noted"), [(1000, 0.0, True), (0, 0.0, False), (20, 0.0, False), (1000, 1e-9, False)]
)
def test_an_optimizer_of_zeros_is_noted_after_many_steps(
    tmp_path: Path, step: int, first: float, is_noted: bool
) -> None:
    model = {"weight": torch.rand(3, 5), "bias": torch.rand(3)}
    states = {
        number: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.zeros_like(one),
            "exp_avg_sq": torch.full_like(one, first),
        }
        for number, one in enumerate(model.values())
    }
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "c.pt")
    for command in (("verify", tmp_path / "c.pt"), ("convert", tmp_path / "c.pt", tmp_path / "out")):
        notes = notes_of_zeros(ckpt(*command))
        text = "note: all states of the optimizer are zero, after 1,000 steps; 2 tensors: weight, bias"
        assert notes == ([text] if is_noted else [])


def test_the_last_shard_notes_zeros_that_others_have_read(half: Path, tmp_path: Path) -> None:
    source, format = open_checkpoint(half), Safetensors(shard_nbytes=1 << 20)
    results = [
        save(source, tmp_path / "out", format, resources=Execution(shard=Shard(number, 2))) for number in range(2)
    ]
    assert results[0].status == "pending"
    assert not results[0].zeros
    [notice] = results[1].zeros
    assert {"c.weight", "d.weight"} <= set(notice.names)


def test_journal_has_the_zeros() -> None:
    receipt = Receipt("a", 1, (), {}, zeros=(ZeroRun("/x/é", 0, 1 << 40), ZeroRun("/y", 3, 9)))
    assert list(from_lines([to_line(receipt)])) == [receipt]
    assert list(from_lines([to_line(replace(receipt, zeros=((1, 2, 3),)))])) == []  # type: ignore[arg-type]


def test_runs_are_those_that_a_look_at_every_byte_finds() -> None:
    random = np.random.default_rng(2)
    data = random.integers(1, 256, 6 * LONG, np.uint8)
    runs = [(0, 70), (100, 5000), (LONG - 700, 2 * LONG + 900), (3 * LONG, 3 * LONG + 900), (4 * LONG + 3, 6 * LONG)]
    for start, stop in runs:
        data[start:stop] = 0
    for block in (LONG, 4 * LONG, 6 * LONG):
        found = ZeroRuns()
        for at in reversed(range(0, data.size, block)):
            found.note(Path("f"), at, data[at : at + block].data)
        long = [(run.start, run.stop) for run in found.runs() if run.stop - run.start >= LONG]
        assert long == [run for run in runs if run[1] - run[0] >= LONG]
        assert all(not data[run.start : run.stop].any() for run in found.runs())
        assert ("f", 0, 70) in found.runs()
