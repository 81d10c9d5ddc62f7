"""Small models of the families that llama.cpp computes, as folders of transformers with random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ckpt_formats.names.config import configured_model
from ckpt_formats.names.packings import stored_shape

GOLDEN = json.loads((Path(__file__).parents[1] / "golden_gguf" / "logits.json").read_text())
"""By the name of a model: its configuration, and what `golden_gguf/make.py` noted of its file and its logits."""


def weights_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights, float32, by their names in files."""
    configured = configured_model(config)
    assert configured is not None
    model, rng = configured.model, np.random.default_rng([*json.dumps(config, sort_keys=True).encode()])
    tie, tensors = model.tie("hf"), {}
    for one in model.stored("hf"):
        if tie is None or one.names[0] != tie.alias:
            name = one.names[0]
            centre = 1 if "norm" in name and name.endswith("weight") else 0
            values = rng.normal(centre, 0.1, stored_shape(one.packing, one.scope, model.shape))
            tensors[name] = values.astype(np.float32)
    return tensors


def write_model(folder: Path, name: str) -> Path:
    """The folder of a model as transformers loads it."""
    folder.mkdir(parents=True)
    config = GOLDEN[name]["config"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights_of(config), folder / "model.safetensors", {"format": "pt"})
    return folder
