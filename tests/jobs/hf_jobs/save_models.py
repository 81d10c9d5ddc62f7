"""Small models as transformers saves them, norms and biases no constants, and what they compute.

`save_models.py OUT [NAME ...]` makes of names that `random_models.model` knows, by default of all `MODELS`: the folder
OUT/NAME, and OUT/NAME.pt, the logits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_jobs.models import MODELS
from hf_jobs.random_models import model as entries_of
from megatron_jobs.families import INPUT


def save(name: str, out: Path) -> None:
    options = dict(entries_of(name))
    torch.manual_seed(options.pop("seed", len(name)))
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    buffers = [buffer for key, buffer in model.named_buffers() if key.endswith("correction_bias")]
    with torch.no_grad():
        for tensor in (*model.parameters(), *buffers):
            tensor.add_(torch.randn_like(tensor) * 0.05)
        logits = model(torch.tensor(INPUT)).logits
    model.save_pretrained(out / name)
    if count := options.get("num_nextn_predict_layers"):
        logits = torch.cat([*save_predictions(model, count, out / name), logits], 1)
    torch.save(logits, out / f"{name}.pt")


def save_predictions(model: Any, count: int, folder: Path) -> Iterator[torch.Tensor]:
    """Add random layers for multi-token prediction to a file, as DeepSeek publishes them, and yield their logits.

    transformers computes with such layers, but does not save them. The last tokens of a batch have no next one.
    """
    layers = MtpModel(model, count).eval()
    tokens = torch.tensor(INPUT)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    with torch.no_grad():
        for one in layers.layers:
            for key, tensor in one.state_dict().items():
                tensor.copy_(torch.randn_like(tensor) * 0.1 + ("norm" in key))
        hidden = model.model(tokens).last_hidden_state
        positions = torch.arange(tokens.shape[1])[None].expand(tokens.shape)
        for i, one in enumerate(layers.layers):
            tokens = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
            hidden = layers.forward_layer(i, hidden, positions, None, input_ids=tokens)
            yield layers.shared_head(hidden)[:, : -i - 1]
            prefix = f"model.layers.{model.config.num_hidden_layers + i}."
            for key, tensor in one.state_dict().items():
                tensors |= {prefix + name: part.contiguous() for name, part in as_published(key, tensor)}
            tensors |= {
                f"{prefix}embed_tokens.weight": model.model.embed_tokens.weight.clone(),
                f"{prefix}shared_head.head.weight": model.lm_head.weight.clone(),
            }
    save_file(tensors, file, metadata={"format": "pt"})


def as_published(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of such a layer under the names of DeepSeek's files, which have experts one by one."""
    key = key.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    for stack, parts in {"mlp.experts.gate_up_proj": ("gate", "up"), "mlp.experts.down_proj": ("down",)}.items():
        if key == stack:
            for expert, matrix in enumerate(tensor):
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    yield f"mlp.experts.{expert}.{part}_proj.weight", rows
            return
    yield key, tensor


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or MODELS:
        save(name, out)


if __name__ == "__main__":
    main()
