"""The memory in which a quantised model is converted: `python benchmarks/quantised_memory.py [--megabytes 700]`.

A model of Llama in FP8 blocks, with random codes, becomes bfloat16 for transformers and files of llama.cpp, each in a
process of its own. Memory is the peak of this process above that of an interpreter that imports nothing.
Another process writes the model: a child's peak is at least that of its parent.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measure import measure

HIDDEN, FFN, VOCABULARY, HEADS = 2048, 5632, 32_000, 16
SIZES = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN)}
SIZES_OF_MLP = {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
CASES = {
    "bfloat16, transformers": ("hf", ["--to", "hf", "--dtype", "bf16"]),
    "BF16, llama.cpp": ("bf16.gguf", ["--dtype", "bf16"]),
    "Q8_0, llama.cpp": ("q8_0.gguf", ["--dtype", "fp32", "--outtype", "q8_0"]),
}


def tensors(layers: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The names, types and shapes of a model."""
    yield "model.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        named = [(f"self_attn.{one}_proj", shape) for one, shape in SIZES.items()]
        named += [(f"mlp.{one}_proj", shape) for one, shape in SIZES_OF_MLP.items()]
        for name, (rows, columns) in named:
            yield f"model.layers.{layer}.{name}.weight", "F8_E4M3", (rows, columns)
            yield f"model.layers.{layer}.{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", "BF16", (HIDDEN,)
    yield "model.norm.weight", "BF16", (HIDDEN,)


def write_model(folder: Path, megabytes: int) -> int:
    """Write a model of about so many megabytes, tensor by tensor. Return its bytes."""
    import numpy as np

    per_layer = sum(rows * columns for rows, columns in (*SIZES.values(), *SIZES_OF_MLP.values()))
    layers = max(1, round((megabytes * 1e6 - 2 * VOCABULARY * HIDDEN) / per_layer))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    random, header, at = np.random.default_rng(0), {}, 0
    sizes = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
    for name, dtype, shape in tensors(layers):
        nbytes = int(np.prod(shape)) * sizes[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, dtype, shape in tensors(layers):
            if dtype == "F32":
                file.write((random.random(shape, np.float32) * np.float32(0.01)).tobytes())
            else:
                file.write(random.integers(0, 60, int(np.prod(shape)) * sizes[dtype], np.uint8).tobytes())
    return at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=700)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        print(write_model(given.write, given.megabytes))
        return
    command = str(Path(sys.executable).with_name("ckpt"))
    bare = measure([sys.executable, "-c", "pass"]).process
    with tempfile.TemporaryDirectory() as root:
        source = Path(root) / "model"
        source.mkdir()
        own = [sys.executable, __file__, "--write", str(source), "--megabytes", str(given.megabytes)]
        nbytes = int(subprocess.run(own, check=True, capture_output=True).stdout)
        print(f"{nbytes / 1e6:.0f} MB of FP8; an interpreter takes {bare / 1e6:.1f} MB")
        for what, (name, options) in CASES.items():
            run = measure([command, "convert", str(source), str(Path(root) / name), *options])
            above = (run.process - bare) / 1e6
            print(
                f"{what:24} {above:6.1f} MB above, {run.cpu:6.1f} CPU s, {run.written / 1e6:,.0f} MB written",
                flush=True,
            )


if __name__ == "__main__":
    main()
