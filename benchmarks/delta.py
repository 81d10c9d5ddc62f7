"""Lossless deltas side by side on real training states: `python benchmarks/delta.py [FOLDER] --rounds 3`.

FOLDER is what `trajectory.py` made. For each pair of its states: the bytes of the later one, told against the earlier
one, by ckpt and by what others do, in turn in one process; that every bit comes back is checked once, before the
clock runs. Speeds are of the later state's bytes, on one thread, by CPU time, medians. `fit` is what it takes
beforehand to find the rule of every parameter, as a share of the time to encode once.

The states are the masters and Adam's moments; the model's copy is told from its master by ckpt, and coded by the
others. A pair with `param` in its name is of the model's copies alone, as where only weights are sent.

Needs zipnn and zstandard; xdelta3 is measured if it is on the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zipnn
import zstandard
from states import START, default_folder, state_path

from ckpt_codecs import DeltaCodec, Rounded, StatePair, StepInfo, delta_from_config
from ckpt_codecs.delta import States
from ckpt_codecs.deltas.chunk_parts import split_parts
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.encode_state import ROW_NBYTES

Array = np.ndarray[Any, np.dtype[Any]]
STATES = ("fp32", "param", "exp_avg", "exp_avg_sq")
ALONE = ("param",)


@dataclass(frozen=True)
class Pair:
    """Two states of one run."""

    name: str
    branch: str
    since: int
    states: tuple[str, ...] = STATES


PAIRS = (
    Pair("1 step", "pretrain", 1),
    Pair("1 step, bf16 gradients", "bf16-gradients", 1),
    Pair("1 step, rate 2e-5", "finetune", 1),
    Pair("1 step, rate 3e-6", "reinforce", 1),
    Pair("10 steps", "pretrain", 10),
    Pair("10 steps, rate 2e-5", "finetune", 10),
    Pair("10 steps, rate 3e-6", "reinforce", 10),
    Pair("100 steps", "pretrain", 100),
    Pair("param, 1 step", "pretrain", 1, ALONE),
    Pair("param, 1 step, rate 2e-5", "finetune", 1, ALONE),
    Pair("param, 1 step, rate 3e-6", "reinforce", 1, ALONE),
    Pair("param, 10 steps, rate 3e-6", "reinforce", 10, ALONE),
)


@dataclass(frozen=True)
class Work:
    """One parameter of a pair."""

    change: StatePair
    step: StepInfo


@dataclass(frozen=True)
class Row:
    pair: str
    method: str
    raw: int
    stored: dict[str, int]
    encode: float
    decode: float
    """Seconds."""
    fit: float = 0.0

    def cells(self, elements: int) -> list[str]:
        stored = sum(self.stored.values())
        bits = " + ".join(f"{name} {8 * nbytes / elements:.2f}" for name, nbytes in self.stored.items())
        speeds = [f"{self.raw / seconds / 1e6:,.0f}" for seconds in (self.encode, self.decode)]
        fit = f"{self.fit / self.encode:.0%}" if self.fit else ""
        return [self.pair, self.method, f"{self.raw / stored:.3f}", *speeds, fit, bits]


def chunks(work: Work) -> Iterator[StatePair]:
    """As the universal format cuts a parameter."""
    shape = next(iter(work.change.after.values())).shape
    chunking = Chunking.default(shape)
    each, size = chunking.chunk_size, chunking.size
    for at in range(0, size, each):
        form = chunking.chunk_shape(min(each, size - at))

        def some(states: States, at: int = at, form: tuple[int, ...] = form) -> dict[str, Array]:
            return {name: values.reshape(-1)[at : at + prod(form)].reshape(form) for name, values in states.items()}

        yield StatePair(some(work.change.before), some(work.change.after))


def ours(pair: Pair, works: list[Work], name: str, rounds: int) -> Row:
    """A delta codec of ckpt, and the model's copy as the masters rounded."""
    codec = delta_from_config({"name": name})
    derived = "fp32" in pair.states

    def without_copy(change: StatePair) -> StatePair:
        if not derived:
            return change
        return StatePair(*({n: v for n, v in s.items() if n != "param"} for s in (change.before, change.after)))

    began = time.process_time()
    ready: list[tuple[DeltaCodec, StatePair, StatePair]] = []
    for work in works:
        fitted = codec.fit(lambda work=work: map(without_copy, chunks(work)), work.step)  # type: ignore[misc]
        ready += [(fitted, without_copy(change), change) for change in chunks(work)]
    fit = time.process_time() - began

    def encode() -> list[bytes]:
        blobs = []
        for fitted, change, full in ready:
            if derived:
                assert Rounded().encode(full.after["param"], full.after["fp32"]) == b""
            blobs.append(fitted.encode(change))
        return blobs

    def decode(blobs: list[bytes]) -> Iterator[dict[str, Array]]:
        for (fitted, change, full), data in zip(ready, blobs, strict=True):
            form = {n: v.dtype for n, v in change.after.items()}
            back = fitted.decode(data, change.before, next(iter(change.after.values())).shape, form)
            if derived:
                copy = full.after["param"]
                back["param"] = Rounded().decode(b"", copy.shape, copy.dtype, back["fp32"])
            yield back

    encoded = encode()
    stored = dict.fromkeys(pair.states, 0)
    for (_, change, full), data, back in zip(ready, encoded, decode(encoded), strict=True):
        for state, values in full.after.items():
            assert same(values, back[state]), (name, state)
        parts = split_parts(data, {n: v.dtype for n, v in change.after.items()})
        for state, part in parts.items():
            stored[state] += len(part)
        stored[next(iter(parts))] += len(data) - sum(map(len, parts.values())) + ROW_NBYTES
    times = timed(encode, lambda blobs: [None for _ in decode(blobs)], rounds)
    return Row(pair.name, f"ckpt {name}", raw_size(works), stored, *times, fit)


Coder = Callable[[Array, Array], bytes]
Decoder = Callable[[bytes, Array], bytes | Array]


def others(pair: Pair, works: list[Work], name: str, each: bool, encode: Coder, decode: Decoder, rounds: int) -> Row:
    """What knows bytes alone: given the later and the earlier values of each tensor, or of a whole state at once."""
    work: list[tuple[str, Array, Array]] = []
    for state in pair.states:
        tensors = [(w.change.after[state].reshape(-1), w.change.before[state].reshape(-1)) for w in works]
        if not each:
            tensors = [(np.concatenate([a for a, _ in tensors]), np.concatenate([b for _, b in tensors]))]
        work += [(state, after, before) for after, before in tensors]
    encoded = [encode(after, before) for _, after, before in work]
    stored = dict.fromkeys(pair.states, 0)
    for (state, after, before), data in zip(work, encoded, strict=True):
        assert same(after, np.frombuffer(decode(data, before), np.uint8)), (name, state)
        stored[state] += len(data)

    def all_encoded() -> list[bytes]:
        return [encode(after, before) for _, after, before in work]

    def all_decoded(blobs: list[bytes]) -> None:
        for (_, _, before), data in zip(work, blobs, strict=True):
            decode(data, before)

    return Row(pair.name, name, raw_size(works), stored, *timed(all_encoded, all_decoded, rounds))


def patch_from(level: int) -> tuple[Coder, Decoder]:
    """As `zstd --patch-from` does: the earlier bytes as a dictionary, and a window that holds both."""

    def dictionary(before: Array) -> zstandard.ZstdCompressionDict:
        return zstandard.ZstdCompressionDict(raw(before).tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)

    def encode(after: Array, before: Array) -> bytes:
        log = min(max((after.nbytes + before.nbytes).bit_length(), 10), 31)
        options = zstandard.ZstdCompressionParameters.from_level(level, window_log=log, enable_ldm=True)
        return zstandard.ZstdCompressor(dict_data=dictionary(before), compression_params=options).compress(raw(after))

    def decode(data: bytes, before: Array) -> bytes:
        return zstandard.ZstdDecompressor(dict_data=dictionary(before), max_window_size=1 << 31).decompress(data)

    return encode, decode


def xdelta() -> tuple[Coder, Decoder]:
    def run(way: str, data: bytes, before: Array) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            source, given, output = (Path(folder) / name for name in ("source", "given", "made"))
            source.write_bytes(raw(before))
            given.write_bytes(data)
            subprocess.run(["xdelta3", way, "-1", "-f", "-B", str(1 << 30), "-s", source, given, output], check=True)
            return output.read_bytes()

    return lambda after, before: run("-e", bytes(raw(after)), before), lambda data, before: run("-d", data, before)


def zip_nn() -> tuple[Coder, Decoder]:
    def make(values: Array) -> Any:
        kind = {2: "bfloat16", 4: "float32"}[values.dtype.itemsize]
        return zipnn.ZipNN(input_format="byte", bytearray_dtype=kind, threads=1, delta_compressed_type="byte")

    def encode(after: Array, before: Array) -> bytes:
        return bytes(make(after).compress(bytearray(raw(after)), delta_second_data=bytearray(raw(before))))

    def decode(data: bytes, before: Array) -> bytes:
        return bytes(make(before).decompress(data, delta_second_data=bytearray(raw(before))))

    return encode, decode


def xor_planes(level: int) -> tuple[Coder, Decoder]:
    """The two states' exclusive or, each byte of it in a plane, and zstd."""

    def encode(after: Array, before: Array) -> bytes:
        both = np.bitwise_xor(raw(after), raw(before))
        planes = np.ascontiguousarray(both.reshape(-1, after.dtype.itemsize).T)
        return zstandard.ZstdCompressor(level=level).compress(planes.data)

    def decode(data: bytes, before: Array) -> Array:
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
        return np.bitwise_xor(planes.reshape(before.dtype.itemsize, -1).T.reshape(-1), raw(before))

    return encode, decode


def timed(encode: Callable[[], Any], decode: Callable[[Any], Any], rounds: int) -> tuple[float, float]:
    """Medians of CPU seconds, of this process and of those it started."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        began = cpu()
        encoded = encode()
        middle = cpu()
        decode(encoded)
        times[0].append(middle - began)
        times[1].append(cpu() - middle)
    return median(times[0]), median(times[1])


def cpu() -> float:
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + started.ru_utime + started.ru_stime


def raw(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def same(a: Array, b: Array) -> bool:
    return bool(np.array_equal(raw(a), raw(b)))


def raw_size(works: list[Work]) -> int:
    return sum(values.nbytes for work in works for values in work.change.after.values())


def works_of(folder: Path, pair: Pair, start: int) -> list[Work]:
    """Every parameter that both have with all states."""
    paths = state_path(folder, step=start), state_path(folder, pair.branch, start + pair.since)
    before, after = map(open_checkpoint, paths)
    options = {name: dict(group.options) for group in after.groups for name in group.names}
    works = []
    for name, parameter in after.parameters.items():
        if set(map(from_stored, pair.states)) <= parameter.states.keys():
            change = StatePair(*(values_of(source, name, pair.states) for source in (before, after)))
            works.append(Work(change, StepInfo(start, start + pair.since, options.get(name, {}))))
    return works


def values_of(source: Checkpoint, name: str, states: tuple[str, ...]) -> dict[str, Array]:
    return {state: read(source.parameters[name].states[from_stored(state)]) for state in states}


def measure(pair: Pair, works: list[Work], rounds: int) -> list[Row]:
    rows = [ours(pair, works, name, rounds) for name in ("replay", "difference")]
    rows.append(others(pair, works, "zstd -3 --patch-from", False, *patch_from(3), rounds))
    if shutil.which("xdelta3"):
        rows.append(others(pair, works, "xdelta3 -1", False, *xdelta(), rounds))
    rows.append(others(pair, works, "ZipNN delta", True, *zip_nn(), rounds))
    rows.append(others(pair, works, "XOR planes, zstd -1", True, *xor_planes(1), rounds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=default_folder())
    parser.add_argument("--start", type=int, default=START, help="the step t from which the branches part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="pairs whose names begin so")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(f"{platform.platform()}, {platform.processor() or platform.machine()}, Python {sys.version.split()[0]}")
    print(
        "xdelta3 is "
        + ("measured" if shutil.which("xdelta3") else "not on this machine")
        + f"; {given.rounds} rounds\n"
    )
    head = ["pair", "method", "ratio", "enc MB/s", "dec MB/s", "fit", "bits a parameter"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    rows = []
    for pair in PAIRS:
        if given.only and not any(pair.name.startswith(name) for name in given.only):
            continue
        works = works_of(given.folder, pair, given.start)
        elements = sum(next(iter(work.change.after.values())).size for work in works)
        for row in measure(pair, works, given.rounds):
            rows.append(row)
            print("| " + " | ".join(row.cells(elements)) + " |", flush=True)
    if given.json:
        given.json.write_text(json.dumps([vars(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
