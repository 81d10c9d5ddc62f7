"""Small models as transformers saves them, norms and biases no constants, and what they compute.

`save_models.py OUT [NAME ...]` makes of names that `random_models.model` knows, by default of all `MODELS`: the folder
OUT/NAME, and OUT/NAME.pt, the logits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
        torch.save(model(torch.tensor(INPUT)).logits, out / f"{name}.pt")
    model.save_pretrained(out / name)


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or MODELS:
        save(name, out)


if __name__ == "__main__":
    main()
