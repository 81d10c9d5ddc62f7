"""Load all weights of a model into CPU memory, as for inference: the part `inference` of `jobs.py`.

A Llama in bf16, random values, from the page cache. Each way runs in a fork of its own, on one thread. Other readers
run if they are installed: fastsafetensors, runai-model-streamer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from forked import Meter, on_ranks

BASE = "safetensors, copied"
Rows = dict[str, list[dict[str, float]]]


def _mapped(folder: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(folder / "hf" / "model.safetensors")


def _copied(folder: Path) -> Any:
    return {name: tensor.clone() for name, tensor in _mapped(folder).items()}


def _torch(folder: Path) -> Any:
    import torch

    return torch.load(folder / "weights.pt", weights_only=True)


def _transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "hf", dtype="auto").state_dict()


def _fastsafetensors(folder: Path) -> Any:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: [str(folder / "hf" / "model.safetensors")]})
    buffers = loader.copy_files_to_device()
    return {name: buffers.get_tensor(name) for name in loader.get_keys()}


def _runai(folder: Path) -> Any:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(folder / "hf" / "model.safetensors"))
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def _own(source: str, **options: Any) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from ckpt_training import load_file

        return load_file(folder / source, **options)

    return read


WAYS: dict[str, Callable[[Path], Any]] = {
    "safetensors, mapped": _mapped,
    BASE: _copied,
    "torch.load": _torch,
    "from_pretrained": _transformers,
    **({"fastsafetensors": _fastsafetensors} if find_spec("fastsafetensors") else {}),
    **({"runai-model-streamer": _runai} if find_spec("runai_model_streamer") else {}),
    "load_file, mapped": _own("hf", mmap=True),
    "load_file, safetensors": _own("hf"),
    "load_file, universal": _own("universal"),
    "load_file, coded": _own("coded"),
}


def run(folder: Path, rounds: int, layers: int, width: int, only: list[str]) -> Rows:
    """All ways in turn: what each load costs its process, and the bytes of the weights."""
    import transformers

    import ckpt
    import ckpt_training.inference  # noqa: F401

    if not (folder / "coded").exists():
        on_ranks(1, _make, folder, layers, width)
        source = ckpt.open(folder / "hf")
        ckpt.save(source, folder / "universal", ckpt.Universal())
        ckpt.save(source, folder / "coded", ckpt.Universal(codec="auto"))
    for name in ("hf", "universal", "coded"):
        ckpt.open(folder / name)
    assert transformers.AutoModelForCausalLM  # imported before ranks are forked
    ways = [name for name in WAYS if not only or any(text in name for text in only)]
    rows: Rows = {name: [] for name in ways}
    for _ in range(rounds):
        for name in random.sample(ways, len(ways)):
            rows[name] += on_ranks(1, _load, name, folder)
    return rows


def _make(folder: Path, layers: int, width: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, vocab_size=8000, num_attention_heads=8, num_key_value_heads=8)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "hf", max_shard_size="100GB")
    torch.save(model.state_dict(), folder / "weights.pt")


def _load(name: str, folder: Path) -> dict[str, float]:
    meter = Meter()
    weights = WAYS[name](folder)
    cost = meter.row()
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    assert nbytes >= (folder / "hf" / "model.safetensors").stat().st_size * 0.99, name
    return {**cost, "weights": nbytes}


def table(rows: Rows) -> str:
    """Medians, and the ratio of CPU seconds to safetensors with a copy."""
    base = median(one["cpu"] for one in rows[BASE]) if rows.get(BASE) else None
    lines = [f"{'':26}{'CPU s':>8}{'x copied':>10}{'wall s':>8}{'s a GB':>8}{'MB added':>10}{'weights':>9}"]
    for name, some in rows.items():
        middle = {key: median(one[key] for one in some) for key in some[0]}
        ratio = f"{middle['cpu'] / base:.2f}" if base else "-"
        each = middle["cpu"] / middle["weights"] * 1e9
        lines.append(
            f"{name:26}{middle['cpu']:8.2f}{ratio:>10}{middle['wall']:8.2f}{each:8.2f}{middle['added'] / 1e6:10.0f}"
            f"{middle['weights'] / 1e6:9.0f}"
        )
    return "\n".join(lines)
