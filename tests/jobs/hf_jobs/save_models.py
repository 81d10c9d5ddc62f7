"""Small models as transformers saves them, norms and biases no constants: `save_models.py OUT` makes OUT/NAME."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_jobs.models import MODELS


def main() -> None:
    torch.set_num_threads(1)
    for name, kind in MODELS.items():
        torch.manual_seed(len(name))
        options = dict(kind)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(options.pop("model_type"), **options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(Path(sys.argv[1]) / name)


if __name__ == "__main__":
    main()
