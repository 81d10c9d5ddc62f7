"""The kernels against those of an older version, chunk by chunk in one process: `kernels.py [STATE] --against FOLDER`.

FOLDER holds the older package: `git worktree add /tmp/older COMMIT` and `--against /tmp/older/codecs`. Versions before
the kernels in C need Numba, and compile for a minute before the first chunk. STATE is a checkpoint, by default one of
`trajectory.py`; `--made-up` takes the state of an imitated Adam in its place.

Each round codes every chunk of a state with one version, then with the other, the one first that was second in the
round before. A ratio is the median of the rounds' ratios: above 1 the kernels of this version are faster. Before that,
both versions must write the same bytes.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
PACKAGE = "ckpt_codecs"
ROWS, COLUMNS = 1024, 2048


def import_apart(folder: Path) -> ModuleType:
    """The package `ckpt_codecs` of another folder. Ours is back when that one has imported all it needs."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == PACKAGE}
    sys.path.insert(0, str(folder))
    try:
        package = importlib.import_module(PACKAGE)
        values = np.linspace(0, 1, 1 << 14, dtype=np.float32).reshape(128, 128)
        for codec in (package.Planes(), package.FirstMoment(), package.SecondMoment(), package.Integers()):
            codec.decode(codec.encode(values, values), values.shape, values.dtype, values)
        return package
    finally:
        sys.path.remove(str(folder))
        theirs = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == PACKAGE}
        sys.modules.update(ours)
        _keep(theirs)


def _keep(modules: dict[str, ModuleType]) -> None:
    """Older versions ask for their engine by name in each call; they shall go on finding their own."""
    engine = modules.get(f"{PACKAGE}.engine")
    if engine is not None:
        vars(engine)["_load"] = lambda name: modules[f"{PACKAGE}.{name}"]


@dataclass
class Chunk:
    """A chunk, what it was coded to, and memory for both ways."""

    values: Array
    base: Array | None
    data: bytes
    room: Array
    again: Array


Coder = Callable[[Chunk], object]


def coders(package: ModuleType, state: str, level: str, chunks: list[Chunk]) -> tuple[Coder, Coder]:
    """What encodes a chunk of a state, and what decodes it."""
    codec = package.candidate_codecs("parameter", state, chunks[0].values.dtype, level)[0]
    return (
        lambda chunk: codec.encode_into(chunk.values, chunk.base, chunk.room),
        lambda chunk: codec.decode_into(chunk.data, chunk.again, chunk.base),
    )


def chunks_of(pieces: list[tuple[Array, Array | None]]) -> list[Chunk]:
    return [
        Chunk(values, base, b"", np.empty(values.nbytes + values.nbytes // 64 + 128, np.uint8), np.empty_like(values))
        for values, base in pieces
    ]


def seconds(coder: Coder, chunks: list[Chunk]) -> float:
    began = time.perf_counter()
    for chunk in chunks:
        coder(chunk)
    return time.perf_counter() - began


def compared(both: list[Coder], chunks: list[Chunk], rounds: int) -> list[tuple[float, float]]:
    """Seconds of ours and of theirs, round by round."""
    ratios = []
    for i in range(rounds):
        order = (0, 1) if i % 2 else (1, 0)
        spent = {which: seconds(both[which], chunks) for which in order}
        ratios.append((spent[0], spent[1]))
    return ratios


def threaded(coder: Coder, chunks: list[Chunk], threads: int) -> float:
    """Seconds that so many threads take for all chunks together."""
    shares = [chunks[i::threads] for i in range(threads)]
    workers = [threading.Thread(target=seconds, args=(coder, share)) for share in shares]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


def copy(chunk: Chunk) -> None:
    np.copyto(chunk.again, chunk.values)


def made_up() -> dict[str, list[tuple[Array, Array | None]]]:
    """Chunks of 2^18 values of an Adam whose gradients differ by row and by column."""
    random = np.random.default_rng(0)
    scale = 1e-4 * np.exp(random.normal(0, 0.5, (ROWS, 1))) * np.exp(random.normal(0, 0.5, (1, COLUMNS)))
    first, second = np.zeros((ROWS, COLUMNS), np.float32), np.zeros((ROWS, COLUMNS), np.float32)
    for _ in range(30):
        gradient = (random.standard_normal((ROWS, COLUMNS)) * scale).astype(np.float32)
        first = np.float32(0.9) * first + np.float32(0.1) * gradient
        second = np.float32(0.98) * second + np.float32(0.02) * gradient * gradient
    weights = (random.standard_normal((ROWS, COLUMNS)) * 0.02).astype(np.float32)
    parts = [slice(i, i + (1 << 18) // COLUMNS) for i in range(0, ROWS, (1 << 18) // COLUMNS)]
    return {
        "fp32": [(weights[part], None) for part in parts],
        "param": [(weights[part].astype(ml_dtypes.bfloat16), None) for part in parts],
        "exp_avg": [(first[part], second[part]) for part in parts],
        "exp_avg_sq": [(second[part], None) for part in parts],
    }


def trained(path: Path) -> dict[str, list[tuple[Array, Array | None]]]:
    """Every tensor of a checkpoint, cut into chunks as the universal format cuts it."""
    from methods import chunks, states_of

    held = states_of(path)
    return {state: [(piece.values, piece.base) for piece in chunks(state, held)] for state in held}


def check(ours: tuple[Coder, Coder], theirs: tuple[Coder, Coder], chunks: list[Chunk]) -> None:
    """Both versions write the same bytes, and read them."""
    for chunk in chunks:
        chunk.data = bytes(ours[0](chunk))  # type: ignore[call-overload]
        assert bytes(theirs[0](chunk)) == chunk.data, "the versions write other bytes"  # type: ignore[call-overload]
        for _, decode in (ours, theirs):
            chunk.again.view(np.uint8)[:] = 0xA5
            decode(chunk)
            assert chunk.again.tobytes() == chunk.values.tobytes(), "other values came back"


def lines(given: argparse.Namespace, old: ModuleType, new: ModuleType) -> Iterator[str]:
    pieces = made_up() if given.made_up else trained(given.state)
    sums = np.zeros((2, given.rounds, 2))
    every: list[tuple[tuple[Coder, Coder], list[Chunk]]] = []
    for state, parts in pieces.items():
        chunks = chunks_of(parts)
        ours, theirs = (coders(package, state, given.level, chunks) for package in (new, old))
        check(ours, theirs, chunks)
        every.append((ours, chunks))
        cells = [f"{state:12}"]
        for way, name in enumerate(("encode", "decode")):
            seconds_of = np.array(compared([ours[way], theirs[way]], chunks, given.rounds))
            sums[way] += seconds_of
            ratio, speed = np.median(seconds_of[:, 1] / seconds_of[:, 0]), sum(c.values.nbytes for c in chunks) / 1e6
            cells.append(f"{name} x{ratio:.2f} ({speed / np.median(seconds_of[:, 0]):.0f} MB/s)")
        yield "  ".join(cells)
    totals = np.median(sums[:, :, 1] / sums[:, :, 0], axis=1)
    yield f"{'all':12}  encode x{totals[0]:.2f}  decode x{totals[1]:.2f}"
    for way, name in enumerate(("encode", "decode")):
        scaling = []
        for _ in range(given.rounds):
            spent = [sum(threaded(ours[way], chunks, n) for ours, chunks in every) for n in (1, given.threads)]
            scaling.append(spent[0] / spent[1])
        yield f"{given.threads} threads: {name} x{median(scaling):.2f} of one"
    whole = [chunk for _, chunks in every for chunk in chunks]
    copies = [threaded(copy, whole, 1) / threaded(copy, whole, given.threads) for _ in range(given.rounds)]
    yield f"{given.threads} threads: copying the values x{median(copies):.2f} of one"


def main() -> None:
    from states import default_folder, state_path

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path, nargs="?", default=state_path(default_folder()))
    parser.add_argument("--against", type=Path, required=True, help="the folder with the older package")
    parser.add_argument("--made-up", action="store_true", help="take the state of an imitated Adam")
    parser.add_argument("--level", default="default", help="fast, default or max")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    old, new = import_apart(given.against), importlib.import_module(PACKAGE)
    print(f"{platform.platform()}, {platform.processor() or platform.machine()}, Python {sys.version.split()[0]}")
    for line in lines(given, old, new):
        print(line, flush=True)


if __name__ == "__main__":
    main()
