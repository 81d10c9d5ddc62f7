"""The tensors of random models of transformers, in memory and in files, and their configurations, as JSON.

`registered.py OUT NAME...`: OUT/NAME.json is `{"config", "memory", "files"}`. Tensors are pairs of a name and a shape,
in memory in the order in which the model registers them: parameters first, then buffers that files have.
OUT/defaults.json has the configuration of each type of models that states nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_jobs.random_models import RANDOM, model


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    defaults = {model_type: AutoConfig.for_model(model_type).to_dict() for model_type in RANDOM}
    (out / "defaults.json").write_text(json.dumps(defaults, default=str))
    for name in sys.argv[2:]:
        options = dict(model(name))
        options.pop("seed", None)
        kind = AutoModelForImageTextToText if "vision_config" in options else AutoModelForCausalLM
        built = kind.from_config(AutoConfig.for_model(options.pop("model_type"), **options))
        stored = built.state_dict()
        buffers = [(key, tensor) for key, tensor in built.named_buffers() if key in stored]
        memory = [(key, list(tensor.shape)) for key, tensor in [*built.named_parameters(), *buffers]]
        with tempfile.TemporaryDirectory() as folder:
            built.save_pretrained(folder)
            config = json.loads((Path(folder) / "config.json").read_text())
            with safe_open(Path(folder) / "model.safetensors", "pt") as file:
                files = [(key, file.get_slice(key).get_shape()) for key in sorted(file.keys())]
        (out / f"{name}.json").write_text(json.dumps({"config": config, "memory": memory, "files": files}))


if __name__ == "__main__":
    main()
