"""What lossless codecs save of quantised weights: `python benchmarks/quantised_codecs.py CHECKPOINT [--scheme mxfp4]`.

CHECKPOINT has plain weights; `Checkpoint.quantise` makes codes and scales of them in memory. Bytes are those of all
matrices together, in percent of what is stored without a codec. Beside ckpt's codecs: zstd, and ZipNN where it is
installed; and entropies, in the same percent. No coder that looks at single codes saves more than `order 0`; `by block`
has a distribution for each matrix and row of blocks, which is free to know here.
Speeds are GB of codes for a second of CPU time of one thread, the best of all rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zstandard

import ckpt
from ckpt_codecs import candidate_codecs
from ckpt_codecs.chunk.frame import as_uints

Array = np.ndarray[Any, Any]
PARTS = {"fp8-block": ("", "_scale_inv"), "mxfp4": ("_packed", "_scale")}
PIECE = 1 << 20


def matrices(source: ckpt.Checkpoint, scheme: str) -> Iterator[tuple[Array, Array]]:
    """Codes and scales of each matrix."""
    codes, scales = PARTS[scheme]
    model = source.weights_only()
    quantised = model.cast("fp32").quantise(scheme)
    for name in model.parameters:
        if name + scales in quantised.parameters:
            yield np.asarray(quantised[name + codes]), np.asarray(quantised[name + scales])


def entropy(symbols: Array) -> float:
    """Bits of all symbols together, of one distribution."""
    counts = np.bincount(symbols.reshape(-1)).astype(float)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def by_block(codes: Array) -> float:
    return sum(entropy(codes[row : row + 128].view(np.uint8)) for row in range(0, len(codes), 128))


def with_ckpt(level: str) -> Callable[[Array], int]:
    def encoded(values: Array) -> int:
        (codec,) = candidate_codecs("parameter", "model", values.dtype, level)
        flat = values.reshape(-1)
        pieces = [flat[low : low + PIECE] for low in range(0, flat.size, PIECE)]
        return sum(min(len(codec.encode(piece, None)), piece.nbytes + 1) for piece in pieces)

    return encoded


def with_zstd(values: Array) -> int:
    return len(zstandard.ZstdCompressor(level=3).compress(as_uints(values).tobytes()))


def with_zipnn(values: Array) -> int:
    import zipnn

    coder = zipnn.ZipNN(input_format="byte", bytearray_dtype="float8_e4m3fn", threads=1)
    return len(coder.compress(bytearray(as_uints(values).tobytes())))


def methods() -> dict[str, Callable[[Array], int]]:
    known: dict[str, Callable[[Array], int]] = {
        f"ckpt {level}": with_ckpt(level) for level in ("fast", "default", "max")
    }
    known["zstd 3"] = with_zstd
    try:
        import zipnn  # noqa: F401
    except ImportError:
        return known
    return {**known, "ZipNN": with_zipnn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--scheme", choices=list(PARTS), default="fp8-block")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    pairs = list(matrices(ckpt.open(arguments.checkpoint), arguments.scheme))
    for title, arrays in (("codes", [codes for codes, _ in pairs]), ("scales", [scales for _, scales in pairs])):
        nbytes = sum(one.nbytes for one in arrays)
        print(f"{arguments.scheme}, {title}: {nbytes:,} bytes of {len(arrays)} matrices")
        for name, method in methods().items():
            best, total = float("inf"), 0
            for _ in range(arguments.rounds):
                start = time.thread_time()
                total = sum(map(method, arrays))
                best = min(best, time.thread_time() - start)
            print(f"  {name:<22}{100 * total / nbytes:7.2f} %  {nbytes / best / 1e9:6.2f} GB/s")
        raw = [as_uints(one).view(np.uint8) for one in arrays]
        print(f"  {'order 0':<22}{100 * sum(map(entropy, raw)) / 8 / nbytes:7.2f} %")
        if title == "codes":
            blocks = sum(by_block(one.reshape(len(one), -1)) for one in arrays)
            print(f"  {'by block':<22}{100 * blocks / 8 / nbytes:7.2f} %")
            if arguments.scheme == "fp8-block":
                exponents = sum(entropy(one >> 3 & 15) for one in raw)
                print(f"  {'exponents alone':<22}{100 * (exponents / 8 + nbytes / 2) / nbytes:7.2f} %")


if __name__ == "__main__":
    main()
