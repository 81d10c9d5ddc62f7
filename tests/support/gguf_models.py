"""Small models of the families that llama.cpp computes, as folders of transformers with random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from ckpt_formats.names.config import configured_model
from ckpt_formats.names.packings import stored_shape

GOLDEN = json.loads((Path(__file__).parents[1] / "golden_gguf" / "logits.json").read_text())
"""By the name of a model: its configuration, and what `golden_gguf/make.py` noted of its file and its logits."""


def weights_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights, float32, by their names in files. Norms that add one to their weights have values of bfloat16."""
    configured = configured_model(config)
    assert configured is not None
    model, rng = configured.model, np.random.default_rng([*json.dumps(config, sort_keys=True).encode()])
    tie, tensors = model.tie("hf"), {}
    for one in model.stored("hf"):
        if tie is None or one.names[0] != tie.alias:
            name = one.names[0]
            is_norm, adds_one = "norm" in name and name.endswith("weight"), model.values["norms_add_one"]
            values = rng.normal(is_norm and not adds_one, 0.1, stored_shape(one.packing, one.scope, model.shape))
            tensors[name] = values.astype(bfloat16 if is_norm and adds_one else np.float32).astype(np.float32)
    return tensors


def write_model(folder: Path, name: str, config: dict[str, Any] | None = None) -> Path:
    """The folder of a model as transformers loads it. `config`: another one than the model's."""
    folder.mkdir(parents=True)
    config = GOLDEN[name]["config"] if config is None else config
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights_of(config), folder / "model.safetensors", {"format": "pt"})
    return folder
