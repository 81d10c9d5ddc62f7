"""A family of models: fine-tunes of one base in one chain, beside encodings after ZipLLM's BitX and Xet's.

    python benchmarks/model_family.py [--layers 4] [--width 256] [--steps 300] [--rate 2e-5] [--models DIR]
        [--speed 256] [--json FILE]

A small language model of bytes is trained on the docs of this project and saved in bfloat16. Its fine-tunes:

- `full`: all weights, with AdamW, on Python;
- `again`: `full`, fine-tuned again with half the rate on tests, as by a later stage of training;
- `continued`: all weights, with ten times the rate and twice the steps, on C: continued pretraining;
- `lora`: an adapter of rank 8 on queries and values, with fifty times the rate, merged;
- `head`: the last layer and the head alone.

`ckpt append` finds the parent of each. It is stored, too,

- as BitX does (ZipLLM, arXiv 2505.06252): the bits of each tensor XOR those of the base, then zstd (level 3); for
  `again`, also against `full`, whichever is smaller;
- as Xet does: files cut where a rolling hash says, chunks of 64 KiB on average, each stored once, with the bytes of
  words grouped and zstd (level 3) for its LZ4, which is smaller. All earlier models are known.

Sizes are of one fine-tune without the others, in percent of its bytes. `--speed MB` repeats the tensors of the base,
`full` and `again` until a model has so many bytes, and restores them with one worker. Nothing is asserted but that all
bits return: see benchmarks/results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors import safe_open

ROOT = Path(__file__).parents[1]
CKPT = [sys.executable, "-m", "ckpt_cli"]
TEXTS = {"docs": "docs/*.md", "python": "formats/**/*.py", "c": "codecs/kernels/*.[ch]", "tests": "tests/**/*.py"}
_WINDOW, _AVERAGE = 64, 1 << 16
_RANK = 8


@dataclass(frozen=True)
class Tuning:
    """How a model of the family is trained."""

    parent: str | None
    text: str
    rate: float = 1.0
    """Times the rate of the fine-tunes."""
    steps: float = 1.0
    """Times the steps."""
    only: str = ""
    """Only parameters whose names contain this; `lora`: an adapter."""


TUNINGS = {
    "base": Tuning(None, "docs"),
    "full": Tuning("base", "python"),
    "again": Tuning("full", "tests", rate=0.5),
    "continued": Tuning("base", "c", rate=10, steps=2),
    "lora": Tuning("base", "python", rate=50, only="lora"),
    "head": Tuning("base", "tests", rate=10, only="head"),
}


def train(folder: Path, layers: int, width: int, steps: int, rate: float) -> None:
    """Write the base and its fine-tunes as safetensors in bfloat16, but for those that are there."""
    import torch
    from safetensors.torch import load_file, save_file
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
    folder.mkdir(exist_ok=True)
    for name, tuning in TUNINGS.items():
        if (folder / f"{name}.safetensors").exists():
            continue
        model = LlamaForCausalLM(config)
        if tuning.parent is not None:  # fine-tunes begin with the published weights, in bfloat16
            state = load_file(folder / f"{tuning.parent}.safetensors")
            model.load_state_dict({key: value.float() for key, value in state.items()})
        text = b"".join(path.read_bytes() for path in sorted(ROOT.glob(TEXTS[tuning.text])))[: 1 << 22]
        data = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
        merge = _adapted(model) if tuning.only == "lora" else lambda: None
        if tuning.only == "head":
            for key, parameter in model.named_parameters():
                parameter.requires_grad_(f"layers.{layers - 1}." in key or "lm_head" in key)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-3 if tuning.parent is None else tuning.rate * rate)
        loss = torch.zeros(())
        for _ in range(round(tuning.steps * steps)):
            starts = torch.randint(0, len(data) - 65, (8,))
            batch = torch.stack([data[start : start + 65] for start in starts.tolist()])
            loss = model(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        merge()
        state = {key: value.detach().to(torch.bfloat16).clone() for key, value in model.state_dict().items()}
        save_file(state, folder / f"{name}.safetensors", {"format": "pt"})
        print(f"trained {name}: loss {float(loss.detach()):.2f}", file=sys.stderr)


def _adapted(model: Any) -> Callable[[], None]:
    """Train adapters of queries and values alone. Returns what merges them into the weights."""
    import torch
    from torch.nn.utils import parametrize

    class Adapter(torch.nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.randn(_RANK, weight.shape[1]) / weight.shape[1] ** 0.5)
            self.b = torch.nn.Parameter(torch.zeros(weight.shape[0], _RANK))

        def forward(self, weight: Any) -> Any:
            return weight + 2.0 * self.b @ self.a

    model.requires_grad_(False)
    layers = [getattr(one.self_attn, name) for one in model.model.layers for name in ("q_proj", "v_proj")]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", Adapter(layer.weight))

    def merge() -> None:
        for layer in layers:
            parametrize.remove_parametrizations(layer, "weight")

    return merge


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


def xet(earlier: Sequence[Path], model: Path) -> int:
    """The bytes of the model's chunks that no earlier model has, their words' bytes grouped, and zstd."""
    known, compressor, stored = set[int](), zstandard.ZstdCompressor(3), 0
    for path in earlier:
        known.update(map(hash, chunks(path.read_bytes())))
    for chunk in chunks(model.read_bytes()):
        if hash(chunk) not in known:
            known.add(hash(chunk))
            stored += len(compressor.compress(chunk[0::2] + chunk[1::2]))
    return stored


def run(*command: object) -> float:
    """Run a command of ckpt; its CPU seconds."""
    before = os.times()
    subprocess.run([*CKPT, *map(str, command)], check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def repeated(path: Path, target: Path, nbytes: int) -> None:
    """Write a model whose tensors are those of another, repeated along the first axis up to so many bytes."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    times = -(-nbytes // sum(one.nbytes for one in tensors.values()))
    save_file({name: np.concatenate([one] * times) for name, one in tensors.items()}, target)


def restore_speed(models: Path, folder: Path, nbytes: int) -> list[dict[str, Any]]:
    """Restore repeated models with one worker: values in GB for each second of a processor, and of a clock."""
    import ckpt

    family, resources, rows = ckpt.Chain(folder / "large.family"), ckpt.Resources(workers=1), list[dict[str, Any]]()
    for name in ("base", "full", "again"):
        model = folder / f"large-{name}.safetensors"
        repeated(models / f"{name}.safetensors", model, nbytes)
        family.append(ckpt.open(model), name=name, resources=resources)
        for format, target in (("universal", folder / "restored"), ("safetensors", folder / "restored.safetensors")):
            times = []
            for _ in range(3):
                cpu, wall = time.process_time(), time.monotonic()
                family.restore(name, target, format, resources=resources)
                times.append((time.process_time() - cpu, time.monotonic() - wall))
                if target.is_dir():
                    shutil.rmtree(target)
                else:
                    assert target.read_bytes() == model.read_bytes()
                    target.unlink()
            cpu, wall = map(min, zip(*times, strict=True))
            size = model.stat().st_size
            member = family.index.member_named(name)
            assert member is not None
            row = {"model": name, "format": format, "bytes": size, "stored": member.stored_nbytes}
            rows.append({**row, "cpu": cpu, "wall": wall})
            print(
                f"restore {name} as {format}: {size / 1e6:.0f} MB from {member.stored_nbytes / 1e6:.0f} MB: "
                f"{size / cpu / 1e9:.2f} GB for each CPU second, {size / wall / 1e9:.2f} GB/s"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--models", type=Path, help="the folder of the trained models; those that are there stay")
    parser.add_argument("--speed", type=int, metavar="MB", help="restore models of so many megabytes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="family-") as temporary:
        folder = Path(temporary)
        models = arguments.models or folder
        train(models, arguments.layers, arguments.width, arguments.steps, arguments.rate)
        family, earlier = folder / "models.family", list[Path]()
        for name, tuning in TUNINGS.items():
            model, again = models / f"{name}.safetensors", folder / "restored.safetensors"
            encode = run("append", family, model, "--family")
            decode = run("restore", f"{family}@{name}", again)
            assert again.read_bytes() == model.read_bytes()
            again.unlink()
            earlier.append(model)
            if tuning.parent is None:
                continue
            parents = {"base", tuning.parent}
            listed = json.loads(
                subprocess.run([*CKPT, "log", family, "--json"], check=True, capture_output=True).stdout
            )
            member = next(one for one in listed["steps"] if one["name"] == name)
            run("convert", model, folder / f"{name}-plain")
            alone = folder / f"{name}-alone"
            run("compress", folder / f"{name}-plain", alone)
            size, base = model.stat().st_size, models / "base.safetensors"
            sizes = {
                "family": member["stored_nbytes"],
                "BitX-like": min(bitx(models / f"{parent}.safetensors", model) for parent in parents),
                "Xet-like": xet(earlier[:-1], model),
                "ckpt alone": sum(file.stat().st_size for file in alone.rglob("*") if file.is_file()),
            }
            equal = np.mean(np.concatenate([x == words(base)[key] for key, x in words(model).items()]))
            row = {"model": name, "parent": member["parent"], "bytes": size, "unchanged": float(equal), **sizes}
            rows.append({**row, "encode_cpu": encode, "decode_cpu": decode})
            shown = ", ".join(f"{key} {100 * value / size:.1f} %" for key, value in sizes.items())
            print(
                f"{name}: {size / 1e6:.1f} MB, delta of {member['parent']}, {100 * equal:.0f} % as in the base; "
                f"{shown}; CPU {encode:.1f}, {decode:.1f} s"
            )
        totals = {key: sum(row[key] for row in rows) for key in ("bytes", "family", "BitX-like", "Xet-like")}
        print(
            "all: "
            + ", ".join(f"{key} {100 * totals[key] / totals['bytes']:.1f} %" for key in totals if key != "bytes")
            + "; times smaller than "
            + ", ".join(f"{key} {totals[key] / totals['family']:.2f}" for key in ("BitX-like", "Xet-like"))
        )
        speed = restore_speed(models, folder, arguments.speed * 1_000_000) if arguments.speed else []
    if arguments.json:
        arguments.json.write_text(json.dumps({"models": rows, "totals": totals, "speed": speed}, indent=1))


if __name__ == "__main__":
    main()
