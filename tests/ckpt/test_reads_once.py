"""Whatever the degrees of tensor parallelism, each byte of a matrix is read once: counted, with the checksums."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest

from ckpt import pipeline
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CorruptError, NoSpaceError
from ckpt_formats.core.format import WritableFormat
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.seals import crc32
from ckpt_formats.core.tensor import FileBlob
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from held import contents
from killing import killed, points, spread
from megatron_models import args_of, model

UNIT = 48
"""Degrees of tensor parallelism divide it; matrices have 80 to 280 KB, more than a band of `EFFORT`."""
EFFORT = Execution(2, 1 << 19)
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "max_position_embeddings": 128,
    "layernorm_epsilon": 1e-5,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "vocab_size": 7 * UNIT,
    "make_vocab_size_divisible_by": 1,
}
RULES = (Rule(r".*(linear_proj|linear_fc2)\.weight", axis=1), Rule(".*norm.*", "replicated"), Rule(".*"))
DEEPSPEED, DCP = {"dp": 2, "rules": RULES}, {"dp": 2, "rules": RULES}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A Llama with its optimizer in any format, whole."""
    folder, source = tmp_path_factory.mktemp("sources"), model("llama", args_of("llama", 1, UNIT) | LLAMA)

    def source_in(form: str) -> Path:
        if not (folder / form).exists():
            save(source, folder / form, writable(form), resources=EFFORT)
        return folder / form

    return source_in


@contextmanager
def counted(source: Checkpoint, patch: pytest.MonkeyPatch) -> Iterator[Callable[[FileBlob], Any]]:
    """How often each value of a blob was read meanwhile: an array of its shape."""
    files = {path.stat().st_ino: path for path in source.identities}
    times = {path: np.zeros(path.stat().st_size, np.uint8) for path in source.identities}
    preadv, lock = os.preadv, Lock()

    def counting(file: int, buffers: Any, offset: int) -> int:
        got = preadv(file, buffers, offset)
        if path := files.get(os.fstat(file).st_ino):
            with lock:
                times[path][offset : offset + got] += 1
        return got

    with patch.context() as patched:
        patched.setattr(os, "preadv", counting)
        yield lambda blob: np.ndarray(blob.shape, np.uint8, times[blob.path], blob.offset, blob.strides)


def matrices(source: Checkpoint) -> list[tuple[str, FileBlob]]:
    return [(p.name, blob) for p, _, one in source.tensors() if len(one.shape) > 1 for blob in one.sources()]


@pytest.mark.parametrize(
    ("form", "to", "degrees"),
    [
        ("megatron-legacy", "megatron-legacy", {"tp": 8}),
        ("megatron-legacy", "megatron", {"tp": 2}),
        ("megatron", "megatron", {"tp": 8, "pp": 1}),
        ("megatron", "deepspeed", {"tp": 4, **DEEPSPEED}),
        ("deepspeed", "deepspeed", {"tp": 2, **DEEPSPEED}),
        ("deepspeed", "dcp", {"tp": 4, **DCP}),
        ("dcp", "megatron-legacy", {"tp": 4}),
        ("hf", "megatron", {"tp": 4}),
        ("hf", "megatron-legacy", {"tp": 8}),
        ("hf", "dcp", {"tp": 2, **DCP}),
    ],
)
def test_each_byte_of_a_matrix_is_read_once(
    form: str,
    to: str,
    degrees: dict[str, Any],
    sources: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where other ranks have other columns, and where the checksum of a whole file is settled from all reads."""
    source = open_checkpoint(sources(form))
    with counted(source, monkeypatch) as times:
        save(source, tmp_path / "out", writable(to, **degrees), resources=EFFORT)
    reads = {name: set(np.unique(times(blob)).tolist()) for name, blob in matrices(source)}
    assert reads == {name: {1} for name in reads}
    assert len(reads) >= 5


@pytest.mark.parametrize("tp", [3, 6])
def test_each_byte_is_read_once_from_cut_matrices_too(
    tp: int, sources: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two ranks' files to those of three and six, over borders."""
    save(
        open_checkpoint(sources("megatron-legacy")),
        tmp_path / "two",
        writable("megatron-legacy", tp=2),
        resources=EFFORT,
    )
    source = open_checkpoint(tmp_path / "two")
    with counted(source, monkeypatch) as times:
        save(source, tmp_path / "out", writable("megatron-legacy", tp=tp), resources=EFFORT)
    assert {int(n) for _, blob in matrices(source) for n in np.unique(times(blob))} == {1}
    assert trained(open_checkpoint(tmp_path / "out")) == trained(source)


def test_hashes_of_columns_are_computed_from_the_only_read(
    sources: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XXH3 needs the bytes in order: those of columns come so, as a band goes through the rows."""
    whole = open_checkpoint(sources("universal"))
    masters = [
        replace(p, states={"model": p.states["master"]} if "master" in p.states else p.states)
        for p in whole.parameters.values()
    ]
    source = replace(whole, parameters={p.name: p for p in masters})
    with counted(source, monkeypatch) as times:
        save(source, tmp_path / "out", writable("dcp", tp=4, dp=1, rules=RULES), resources=EFFORT)
    cut = [blob for name, blob in matrices(source) if name.endswith(("linear_proj.weight", "linear_fc2.weight"))]
    assert {int(n) for blob in cut for n in np.unique(times(blob))} == {1}
    assert len(cut) == 2


# What must stay true of files that are written in step

TARGET: WritableFormat = writable("megatron-legacy", tp=4)


def test_a_flipped_bit_in_any_ranks_columns_is_found(sources: Callable[[str], Path], tmp_path: Path) -> None:
    source = open_checkpoint(sources("megatron-legacy"))
    (blob,) = source.parameters["decoder.layers.0.mlp.linear_fc2.weight"].states["exp_avg"].sources()
    for rank in range(4):
        path = tmp_path / str(rank)
        path.mkdir()
        data = bytearray(blob.path.read_bytes())
        data[blob.offset + blob.strides[0] * 100 + blob.strides[0] // 4 * rank + 1] ^= 4
        for file in sources("megatron-legacy").rglob("*"):
            if file.is_file():
                there = path / "in" / file.relative_to(sources("megatron-legacy"))
                there.parent.mkdir(parents=True, exist_ok=True)
                there.write_bytes(bytes(data) if file == blob.path else file.read_bytes())
        with pytest.raises(CorruptError, match="crc32 checksum"):
            save(open_checkpoint(path / "in"), path / "out", TARGET, resources=EFFORT)
        assert [one.name for one in path.iterdir()] == ["in"]


def test_a_group_that_was_killed_is_written_again_and_what_was_done_is_kept(
    sources: Callable[[str], Path], tmp_path: Path
) -> None:
    source = open_checkpoint(sources("megatron-legacy"))
    save(source, tmp_path / "expected", TARGET, resources=EFFORT)
    expected = content(tmp_path / "expected")
    target, resumed = tmp_path / "out" / "target", set[int]()
    target.parent.mkdir()

    def work() -> pipeline.Result:
        plan = pipeline.plan(source, target, TARGET)
        return pipeline.write(plan, source, target, TARGET, EFFORT, lambda nbytes: None)

    count = points(work, target.parent)
    assert content(target) == expected
    for point in spread(count, 12):
        remove(target.parent)
        if killed(work, target.parent, point) and not target.exists():
            resumed.add(work().resumed)
        assert content(target) == expected
    assert {0, 8} <= resumed


def test_a_full_disk_leaves_no_target_and_what_was_done_is_kept(sources: Callable[[str], Path], tmp_path: Path) -> None:
    """One file of a group fails: the others are finished, and kept."""
    source, target, calls = open_checkpoint(sources("megatron-legacy")), tmp_path / "out", itertools.count(1)

    def full(nbytes: int) -> None:
        if next(calls) == 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(NoSpaceError):
        pipeline.write(pipeline.plan(source, target, TARGET), source, target, TARGET, EFFORT, full)
    assert [one.name for one in tmp_path.iterdir()] == [".out.ckpt-partial"]
    assert save(source, target, TARGET, resources=EFFORT).resumed >= 3
    assert trained(open_checkpoint(target)) == trained(source)


def trained(source: Checkpoint) -> Any:
    """Every bit of every state, without what each rank has of its own."""
    return {key: value for key, value in contents(source).items() if source.parameters[key[0]].role == "parameter"}


def content(target: Path) -> dict[str, int]:
    files = [path for path in target.rglob("*") if path.is_file()]
    return {str(path.relative_to(target)): crc32(path.read_bytes()) for path in files}


def remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
