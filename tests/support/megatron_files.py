"""Legacy checkpoints of Megatron's without Megatron: whole tensors, cut by rule, in the files that it would write.

For what no engine makes here: other names, other groups of experts, damage. The
cut is the rules' own, so that reading back says that reading undoes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

Arrays = Mapping[str, np.ndarray[Any, Any]]

LLAMA = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 2,
    "swiglu": True,
    "padded_vocab_size": 16,
    "untie_embeddings_and_output_weights": True,
    "transformer_impl": "local",
}


def whole(**changes: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a small Llama, each value another."""
    shapes = {"embedding.word_embeddings.weight": (16, 8)}
    for layer in range(2):
        prefix = f"decoder.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (8,),
            f"{prefix}.self_attention.linear_proj.weight": (8, 8),
            f"{prefix}.self_attention.linear_qkv.weight": (16, 8),
            f"{prefix}.pre_mlp_layernorm.weight": (8,),
            f"{prefix}.mlp.linear_fc1.weight": (24, 8),
            f"{prefix}.mlp.linear_fc2.weight": (8, 12),
        }
    shapes |= {"decoder.final_layernorm.weight": (8,), "output_layer.weight": (16, 8)}
    tensors, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(at, at + size, dtype=np.float32).reshape(shape)
        at += size
    return tensors


def cut(name: str, values: np.ndarray[Any, Any], tp: int, rank: int) -> np.ndarray[Any, Any]:
    """A rank's part of a tensor of `whole`, by Megatron's own arithmetic: written out, not taken from the rules."""
    if name.endswith("linear_fc1.weight"):
        return np.concatenate([np.split(half, tp)[rank] for half in np.split(values, 2)])
    if name.endswith(("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight")):
        return np.split(values, tp)[rank]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return np.split(values, tp, 1)[rank]
    return values


def write(
    run: Path,
    tensors: Arrays,
    tp: int = 1,
    args: Mapping[str, Any] | None = None,
    cutting: Callable[[str, np.ndarray[Any, Any], int, int], np.ndarray[Any, Any]] = cut,
    **more: Any,
) -> Path:
    """A legacy checkpoint of one stage: the weights, without optimizer."""
    arguments = {
        **LLAMA,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": 1,
        "world_size": tp,
        **(args or {}),
    }
    for rank in range(tp):
        folder = run / "iter_0000005" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        model = {
            name: torch.from_numpy(np.ascontiguousarray(cutting(name, values, tp, rank)))
            for name, values in tensors.items()
        }
        root = {
            "args": argparse.Namespace(**arguments, rank=rank),
            "checkpoint_version": 3.0,
            "iteration": 5,
            "model": model,
        }
        torch.save({**root, **more}, folder / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    return run


def loaded(run: Path) -> dict[str, dict[str, Any]]:
    """What PyTorch loads of every file: a value for each place in it. The order of a file's own items is left out."""
    files = {}
    for path in sorted(run.rglob("*.pt")):
        values = torch.load(path, weights_only=False)
        files[str(path.relative_to(run))] = {**dict(places(values)), "/": sorted(map(str, values))}
    return files


def places(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield at, (str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, argparse.Namespace):
        yield from places(vars(value), at)
    elif isinstance(value, dict):
        yield f"{at}/", tuple(map(str, value))
        for key, item in value.items():
            yield from places(item, f"{at}/{key}")
    elif isinstance(value, (list, tuple)):
        yield f"{at}/", len(value)
        for i, item in enumerate(value):
            yield from places(item, f"{at}/{i}")
    else:
        yield at, repr(value)
