"""A family of models: fine-tunes of one base, stored as deltas, beside encodings after ZipLLM's BitX and Xet's.

    python benchmarks/model_family.py [--layers 4] [--width 256] [--steps 300] [--rate 2e-5] [--json FILE]

A small language model of bytes is trained on the docs of this project, then fine-tuned in full with AdamW, once on its
Python, once on its C, once on its tests, and saved in bfloat16. Each fine-tune is stored

- by `ckpt diff BASE MODEL -o DELTA`, and restored by `ckpt convert DELTA`;
- as BitX does (ZipLLM, arXiv 2505.06252): the bits of each tensor XOR those of the base, then zstd (level 3);
- as Xet does: files cut where a rolling hash says, chunks of 64 KiB on average, each stored once, with the bytes of
  words grouped and zstd (level 3) for its LZ4, which is smaller.

Sizes are of one fine-tune without the base, in percent of its bytes. Nothing is asserted: see benchmarks/results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors import safe_open

ROOT = Path(__file__).parents[1]
CKPT = [sys.executable, "-m", "ckpt_cli"]
TEXTS = {"base": "docs/*.md", "python": "formats/**/*.py", "c": "codecs/kernels/*.[ch]", "tests": "tests/**/*.py"}
_WINDOW, _AVERAGE = 64, 1 << 16


def train(folder: Path, layers: int, width: int, steps: int, rate: float) -> None:
    """Write the base and its fine-tunes as safetensors in bfloat16."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    trained: dict[str, Any] = {}
    for name, pattern in TEXTS.items():
        text = b"".join(path.read_bytes() for path in sorted(ROOT.glob(pattern)))[: 1 << 22]
        data = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
        if name != "base":
            model.load_state_dict(trained)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3 if name == "base" else rate)
        loss = torch.zeros(())
        for _ in range(steps):
            starts = torch.randint(0, len(data) - 65, (8,))
            batch = torch.stack([data[start : start + 65] for start in starts.tolist()])
            loss = model(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        # Published models are in bfloat16, and fine-tunes begin with such a base.
        state = {key: value.detach().to(torch.bfloat16).clone() for key, value in model.state_dict().items()}
        if name == "base":
            trained = {key: value.float() for key, value in state.items()}
        save_file(state, folder / f"{name}.safetensors", {"format": "pt"})
        print(f"trained {name}: loss {float(loss.detach()):.2f}", file=sys.stderr)


def words(path: Path) -> dict[str, Any]:
    """The bits of each tensor: (n,) uint16."""
    with safe_open(path, "np") as file:
        return {name: np.ravel(file.get_tensor(name)).view(np.uint16) for name in file.keys()}  # noqa: SIM118


def bitx(base: Path, model: Path) -> int:
    """The bytes of XOR with the base and zstd, tensor by tensor."""
    before, compressor = words(base), zstandard.ZstdCompressor(3)
    return sum(len(compressor.compress((x ^ before[name]).tobytes())) for name, x in words(model).items())


def chunks(data: bytes) -> Iterator[bytes]:
    """Content-defined chunks: they end where the gear hash of the last 64 bytes has 16 zero bits at its top."""
    gear = np.frombuffer(hashlib.shake_128(b"gear").digest(8 * 256), np.uint64)
    hashes = gear[np.frombuffer(data, np.uint8)].copy()
    width = 1
    while width < _WINDOW:
        hashes[width:] += hashes[:-width].copy() << np.uint64(width)
        width *= 2
    ends = np.flatnonzero(hashes >> np.uint64(48) == 0) + 1
    start = 0
    for end in (*ends.tolist(), len(data)):
        while end - start > 2 * _AVERAGE:  # Xet's largest chunk
            yield data[start : start + 2 * _AVERAGE]
            start += 2 * _AVERAGE
        if end - start >= _AVERAGE // 8 or end == len(data):
            yield data[start:end]
            start = end


def xet(base: Path, model: Path) -> int:
    """The bytes of the model's chunks that the base does not have, their words' bytes grouped, and zstd."""
    known, compressor, stored = {hash(chunk) for chunk in chunks(base.read_bytes())}, zstandard.ZstdCompressor(3), 0
    for chunk in chunks(model.read_bytes()):
        if hash(chunk) not in known:
            known.add(hash(chunk))
            stored += len(compressor.compress(chunk[0::2] + chunk[1::2]))
    return stored


def nbytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def run(*command: object) -> float:
    """Run a command of ckpt; its CPU seconds."""
    before = os.times()
    subprocess.run([*CKPT, *map(str, command)], check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="family-") as temporary:
        folder = Path(temporary)
        train(folder, arguments.layers, arguments.width, arguments.steps, arguments.rate)
        base = folder / "base.safetensors"
        run("convert", base, folder / "base")
        for name in list(TEXTS)[1:]:
            model, delta, alone = folder / f"{name}.safetensors", folder / f"{name}-delta", folder / f"{name}-alone"
            encode = run("diff", folder / "base", model, "-o", delta, "--step", 1)
            run("convert", model, folder / f"{name}-plain")
            run("compress", folder / f"{name}-plain", alone)
            began = time.monotonic()
            decode = run("convert", delta, folder / "again.safetensors")
            wall = time.monotonic() - began
            assert words(model).keys() == words(folder / "again.safetensors").keys()
            assert all((x == words(folder / "again.safetensors")[key]).all() for key, x in words(model).items())
            (folder / "again.safetensors").unlink()
            size = model.stat().st_size
            sizes = {
                "ckpt delta": nbytes_of(delta),
                "BitX-like": bitx(base, model),
                "Xet-like": xet(base, model),
                "ckpt alone": nbytes_of(alone),
            }
            equal = np.mean(np.concatenate([x == words(base)[key] for key, x in words(model).items()]))
            row = {"model": name, "bytes": size, "unchanged": float(equal), **sizes}
            rows.append({**row, "encode_cpu": encode, "decode_cpu": decode, "decode_wall": wall})
            shown = ", ".join(f"{key} {100 * value / size:.1f} %" for key, value in sizes.items())
            print(
                f"{name}: {size / 1e6:.1f} MB, {100 * equal:.0f} % unchanged; {shown}; CPU {encode:.1f}, {decode:.1f} s"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
