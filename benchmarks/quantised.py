"""How fast quantised weights become bfloat16: `python benchmarks/quantised.py [--rounds 15]`, beside torch on the CPU.

Codes and scales are random, of a matrix of 1024 x 4096. Speeds are GB of bfloat16 per second of CPU time of one thread,
the best of all rounds, Python counted, in blocks as `convert` reads them. Where torch is installed, the last column is
what its operations take that the libraries of these schemes use without a GPU. The environment variable CKPT_CPU_LEVEL
selects the kernels: 2 is plain C on x86-64. The last rows quantise: GB of bfloat16 that are read.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ckpt_codecs.lossless.rounded import Rounded
from ckpt_codecs.native import library
from ckpt_codecs.quantised import fp4, gguf_blocks, integers, scaled
from ckpt_codecs.quantised.base import Block, Quantisation, block_shape, slices, whole_block

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)
N, M = 1024, 4096
VALUES = 1 << 18
"""Values that are decoded at once, as `convert` does."""
random = np.random.default_rng(0)


def codes(*shape: int) -> Array:
    return random.integers(0, 126, shape, np.uint8)


def scales(*shape: int, dtype: Any = np.float32) -> Array:
    return (random.random(shape, np.float32) * np.float32(0.01)).astype(dtype)


def words(*shape: int) -> Array:
    return random.integers(0, 1 << 31, shape).astype(np.int32)


def schemes() -> dict[str, tuple[Quantisation, tuple[Array, ...]]]:
    fp8 = codes(N, M).view(ml_dtypes.float8_e4m3fn)
    half_scales = scales(M // 128, N, dtype=np.float16)
    return {
        "FP8 blocks": (
            scaled.ScaledCodes((N, M), fp8.dtype.name, "float32", (128, 128)),
            (fp8, scales(N // 128, M // 128)),
        ),
        "FP8 rows": (scaled.ScaledCodes((N, M), fp8.dtype.name, "float32", (1, M)), (fp8, scales(N, 1))),
        "MXFP4 (GPT-OSS)": (fp4.Mxfp4((1, M, N)), (codes(1, N, M // 32, 16), 100 + codes(1, N, M // 32) // 8)),
        "NVFP4": (
            fp4.Nvfp4((N, M)),
            (codes(N, M // 2), codes(N, M // 16).view(ml_dtypes.float8_e4m3fn), np.ones(1, np.float32)),
        ),
        "NF4": (fp4.LookupTable((N, M), 64, False), (codes(N * M // 2, 1), scales(N * M // 64), scales(16))),
        "INT4 groups": (
            integers.PackedIntegers((N, M), 4, M // 128, "bfloat16"),
            (words(N, M // 8), scales(N, M // 128, dtype=BF16)),
        ),
        "GPTQ 4 bits": (
            integers.Gptq((N, M), 4, M // 128, "float16", stored_less_one=False),
            (words(M // 8, N), words(M // 128, N // 8), half_scales, (np.arange(M) // 128).astype(np.int32)),
        ),
        "AWQ": (integers.Awq((N, M), M // 128, "float16"), (words(M, N // 8), words(M // 128, N // 8), half_scales)),
        "Q8_0": (gguf_blocks.GgufBlocks((N, M), "Q8_0"), (codes(N, M // 32 * 34),)),
        "Q4_K": (gguf_blocks.GgufBlocks((N, M), "Q4_K"), (codes(N, M // 256 * 144),)),
        "Q6_K": (gguf_blocks.GgufBlocks((N, M), "Q6_K"), (codes(N, M // 256 * 210),)),
    }


def blocks_of(quantisation: Quantisation) -> list[Block]:
    """The weight in blocks of `VALUES`, as `convert` reads it."""
    whole, axis = whole_block(quantisation.shape), len(quantisation.shape) - 2
    rows = VALUES // quantisation.shape[-1]
    count = quantisation.shape[axis]
    return [(*whole[:axis], (low, low + rows), *whole[axis + 1 :]) for low in range(0, count, rows)]


def taken(quantisation: Quantisation, parts: tuple[Array, ...], block: Block) -> list[Array]:
    """The parts of a block."""
    blocks = zip(parts, quantisation.part_blocks(block), strict=True)
    return [np.ascontiguousarray(part[slices(own)]) for part, own in blocks]


def with_torch() -> dict[str, Callable[[], object]]:
    """The same by torch's operations, on one thread."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(1)
    fp8, packed = torch.from_numpy(codes(N, M)).view(torch.float8_e4m3fn), torch.from_numpy(codes(N, M // 2))
    grid, rows = torch.from_numpy(scales(N // 128, M // 128)), torch.from_numpy(scales(N, 1))
    table, blocks, own = torch.rand(16), torch.rand(N * M // 64, 1), torch.rand(N, M // 128, 1).bfloat16()

    def fp8_blocks() -> object:
        tiles = fp8.float().reshape(N // 128, 128, M // 128, 128)
        return (tiles * grid[:, None, :, None]).bfloat16().reshape(N, M)

    def nf4() -> object:
        numbers = table[torch.stack([packed >> 4, packed & 15], -1).long()]
        return (numbers.reshape(-1, 64) * blocks).bfloat16()

    def int4() -> object:
        numbers = torch.stack([packed & 15, packed >> 4], -1).view(torch.int8) - 8
        return numbers.reshape(N, M // 128, 128).bfloat16() * own

    def mxfp4() -> object:
        numbers = table.bfloat16()[torch.stack([packed & 15, packed >> 4], -1).long()].reshape(N, M // 32, 32)
        powers = torch.zeros(N, M // 32, 1, dtype=torch.int32)
        return torch.ldexp(numbers, powers).reshape(N, M).T.contiguous()

    return {
        "FP8 blocks": fp8_blocks,
        "FP8 rows": lambda: (fp8.float() * rows).bfloat16(),
        "NF4": nf4,
        "INT4 groups": int4,
        "MXFP4 (GPT-OSS)": mxfp4,
    }


def speed(call: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return 2 * N * M / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(f"{platform.processor() or platform.machine()}, kernels of level {library.level()}; GB/s of bfloat16 a core")
    others = with_torch()
    print(f"{'':<18}{'ckpt':>8}{'torch':>8}")
    for name, (quantisation, parts) in schemes().items():
        pieces = [(block, taken(quantisation, parts, block)) for block in blocks_of(quantisation)]
        shape = block_shape(pieces[0][0])
        out, rounded = np.empty(shape, quantisation.dtype), np.empty(shape, BF16)

        def decode(
            scheme: Quantisation = quantisation, pieces: Any = pieces, out: Array = out, to: Array = rounded
        ) -> None:
            for block, stored in pieces:
                scheme.decode(block, stored, out)
                if out.dtype != BF16:
                    Rounded().decode_into(b"", to, out)

        other = f"{speed(others[name], rounds):8.2f}" if name in others else ""
        print(f"{name:<18}{speed(decode, rounds):8.2f}{other}")
    values, block = random.normal(0, 0.02, (N, M)).astype(np.float32), (128, 128)
    target = np.empty((N, M), ml_dtypes.float8_e4m3fn)
    quantise = speed(lambda: scaled.codes_of(values, scaled.scales_of(values, block), block, target), rounds)
    print(f"{'to FP8 blocks':<18}{quantise:8.2f}")
    blocks, powers = np.empty((N, M // 32, 16), np.uint8), np.empty((N, M // 32), np.uint8)
    print(f"{'to MXFP4':<18}{speed(lambda: fp4.mxfp4_of(values, blocks, powers), rounds):8.2f}")


if __name__ == "__main__":
    main()
