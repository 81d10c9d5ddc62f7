"""In a conversion each byte of values is given to XXH3 once, beside the checksums of the source: counted."""

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import xxhash

from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.chunking import DEFAULT_ELEMENTS as CHUNK
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from held import checkpoint, parameter

EFFORT = Execution(2, 1 << 20)
AROUND = 60_000
"""Bytes of headers, indexes and manifests, which are hashed too."""
KINDS = ("xxh3_128", "xxh3_64")


class Counted:
    """A hash that grows; the bytes that it is given are counted."""

    def __init__(self, real: Any, count: Callable[[Any], None], data: Any = b"") -> None:
        self.real, self.count = real, count
        count(data)

    def update(self, data: Any) -> None:
        self.count(data)
        self.real.update(data)

    def copy(self) -> "Counted":
        return Counted(self.real.copy(), self.count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that each kind of XXH3 was given."""
    totals, lock = dict.fromkeys(KINDS, 0), Lock()

    def counting(kind: str) -> Callable[[Any], None]:
        def count(data: Any) -> None:
            with lock:
                totals[kind] += len(memoryview(data).cast("B")) if len(data) else 0

        return count

    def whole(real: Callable[..., Any], count: Callable[[Any], None]) -> Callable[..., Any]:
        def hashing(data: Any, *more: Any) -> Any:
            count(data)
            return real(data, *more)

        return hashing

    def growing(real: Callable[..., Any], count: Callable[[Any], None]) -> Callable[..., Any]:
        return lambda data=b"": Counted(real(data), count, data)

    for kind in KINDS:
        count = counting(kind)
        for form in ("digest", "intdigest", "hexdigest"):
            monkeypatch.setattr(xxhash, f"{kind}_{form}", whole(getattr(xxhash, f"{kind}_{form}"), count))
        monkeypatch.setattr(xxhash, kind, growing(getattr(xxhash, kind), count))
    return totals


def source() -> Checkpoint:
    """12 MB of values: of several chunks and of part of one, with copies that are stored and that are not."""
    parameters, random = [], np.random.default_rng(0)
    for name, elements in {"large": 3 * CHUNK + 5, "rounded": CHUNK // 2, "differs": 5000, "small": 300}.items():
        w, m = (random.standard_normal(elements).astype(np.float32) for _ in "wm")
        copy = w.astype(DTYPES["bfloat16"])
        if name == "differs":
            copy[7] = 99
        parameters.append(parameter(name, {"master": w, "model": copy, "exp_avg": m}))
    return checkpoint(parameters)


VALUES = sum(tensor.nbytes for _, _, tensor in source().tensors())
"""Bytes of all states. The index has the hashes of copies too that are not stored, since they are their masters."""


@pytest.mark.parametrize("target", ["out", "out.ucp"])
@pytest.mark.parametrize("form", ["torch", "universal"])
def test_each_byte_of_values_is_hashed_once(form: str, target: str, tmp_path: Path, hashed: dict[str, int]) -> None:
    """A torch file has CRC-32s; what is read of a universal source is compared with its XXH3."""
    path = tmp_path / ("source.pt" if form == "torch" else "source")
    save(source(), path, writable(form), resources=EFFORT)
    opened, before = open_checkpoint(path), dict(hashed)
    save(opened, tmp_path / target, Universal(pack_nbytes=1 << 20), resources=EFFORT)
    actual = {kind: hashed[kind] - before[kind] for kind in KINDS}
    of_source = sum(file.stat().st_size for file in path.glob("packs/*")) if form == "universal" else 0
    assert actual["xxh3_128"] / VALUES == pytest.approx(1 + of_source / VALUES, abs=AROUND / VALUES)
    assert actual["xxh3_64"] < AROUND


def test_encoded_values_are_hashed_once_and_so_are_their_encoded_bytes(tmp_path: Path, hashed: dict[str, int]) -> None:
    save(source(), tmp_path / "source.pt", writable("torch"), resources=EFFORT)
    opened, before = open_checkpoint(tmp_path / "source.pt"), dict(hashed)
    save(opened, tmp_path / "out", Universal(codec="auto", pack_nbytes=1 << 20), resources=EFFORT)
    actual = {kind: hashed[kind] - before[kind] for kind in KINDS}
    written = sum(path.stat().st_size for path in tmp_path.glob("out/packs/*"))
    assert written < 0.9 * VALUES
    assert actual["xxh3_128"] / VALUES == pytest.approx(1, abs=AROUND / VALUES)
    assert actual["xxh3_64"] / written == pytest.approx(1, abs=AROUND / written)
