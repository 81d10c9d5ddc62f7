"""Convert a model with many experts between transformers and Megatron core, beside `cp` of the same bytes.

    python benchmarks/families.py [--layers 48] [--experts 128] [--hidden 256] [--rounds 3] [--json FILE]

A Qwen 3 with experts that has as many tensors as one of 30B (18,867), and fewer columns. Programs run in turn, through
a warm page cache; figures are medians, memory is the peak of resident memory. Nothing is asserted: see
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import in_turn, medians, warm

CKPT = [sys.executable, "-m", "ckpt_cli"]


def config_of(layers: int, experts: int, hidden: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": hidden // 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": hidden // 16,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "torch_dtype": "bfloat16",
    }


def make(folder: Path, config: dict[str, Any]) -> None:
    """The files of a model, with random weights, a file for each layer."""
    import torch  # the process that measures imports little
    from safetensors.torch import save_file

    from ckpt_formats.names.config import configured_model
    from ckpt_formats.names.packings import stored_shape

    folder.mkdir()
    configured = configured_model(config)
    assert configured is not None
    files: dict[str, dict[str, torch.Tensor]] = {}
    for one in configured.model.stored("hf"):
        layer = one.scope.get("layer")
        file = "model-ends.safetensors" if layer is None else f"model-{layer:05}.safetensors"
        shape = stored_shape(one.packing, one.scope, configured.model.shape)
        files.setdefault(file, {})[one.names[0]] = torch.randn(shape).to(torch.bfloat16)
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 48), ("experts", 128), ("hidden", 256), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--make", type=Path, help="only make the model, in this folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.make:
        make(options.make, config_of(options.layers, options.experts, options.hidden))
        return
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        source, scratch = Path(folder) / "hf", Path(folder) / "scratch"
        out = str(scratch / "out")
        scratch.mkdir()
        sizes = [f"--{name}={getattr(options, name)}" for name in ("layers", "experts", "hidden")]
        subprocess.run([sys.executable, __file__, *sizes, "--make", str(source)], check=True)
        megatron = Path(folder) / "megatron"
        to_megatron = ["--to", "megatron", "--tp", "2", "--ep", "4"]
        subprocess.run([*CKPT, "convert", str(source), str(megatron), *to_megatron], check=True, capture_output=True)
        programs = {
            "cp -r": ["cp", "-r", str(source), out],
            "to universal": [*CKPT, "convert", str(source), out],
            "to Megatron, tp 2 and ep 4": [*CKPT, "convert", str(source), out, *to_megatron],
            "back to transformers": [*CKPT, "convert", str(megatron), out, "--to", "hf"],
        }
        warm(source)
        warm(megatron)
        runs, written = in_turn(programs, options.rounds, scratch, {})
    report = {name: {**asdict(medians(one)), "size": written[name]} for name, one in runs.items()}
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
