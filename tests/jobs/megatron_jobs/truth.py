"""What Megatron itself read of a run, under the names of its parameters: the first axes of its keys taken apart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

STATES = {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def read_truth(file: Path) -> dict[tuple[str, str], Any]:
    """{(name, state): whole tensor}; the state `model` is the model's own."""
    import torch

    truth = {}
    for key, tensor in torch.load(file, weights_only=False).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        match = re.fullmatch(r"optimizer\.state\.([a-z0-9_]+)\.(.*)", key)
        state, name = (STATES[match[1]], match[2]) if match else ("model", key)
        name = name.removeprefix("module.")
        for fused, norm in NORMS.items():
            name = name.replace(fused, norm)
        truth |= {(whole, state): one for whole, one in _apart(name, tensor)}
    return truth


def _apart(name: str, tensor: Any) -> list[tuple[str, Any]]:
    stack = "decoder.layers."
    stacked = name.startswith(stack) and not name.removeprefix(stack)[0].isdigit()  # layers of several kinds are not
    layers = [(f"{stack}{i}.{name.removeprefix(stack)}", one) for i, one in enumerate(tensor)] if stacked else []
    pairs = layers or [(name, tensor)]
    if ".experts.experts." not in name:
        return pairs
    return [
        (whole.replace(".experts.experts.", f".experts.local_experts.{i}."), expert)
        for whole, one in pairs
        for i, expert in enumerate(one)
    ]
