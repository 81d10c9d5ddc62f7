"""`ckpt merge` beside mergekit: the same values within rounding, and the cost of both.

    python benchmarks/merging.py --mergekit /path/to/a/python/that/has/mergekit [--parameters 100e6] [--rounds 1]
                                [--dtype float64]

Both merge random models of Llama's shape in float32; with `--dtype float64`, mergekit computes in float64. mergekit
draws the elements of DARE from torch's generator, so for these methods its own formula is called on ckpt's mask, and
the runs are only measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from measure import Failed, Run, measure, medians
from safetensors import safe_open
from safetensors.numpy import save_file

METHODS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "linear": (["--weights", "1,3"], {"weight": [1, 3]}),
    "slerp": (["--t", "0.3"], {"t": 0.3}),
    "task-arithmetic": (["--weights", "0.6,0.4", "--scale", "0.9"], {"weight": [0.6, 0.4], "lambda": 0.9}),
    "ties": (["--weights", "0.6,0.4", "--density", "0.2,0.5"], {"weight": [0.6, 0.4], "density": [0.2, 0.5]}),
    "dare-linear": (["--density", "0.3", "--rescale", "l1"], {"weight": [1, 1], "density": [0.3, 0.3]}),
    "dare-ties": (["--density", "0.3", "--rescale", "l1"], {"weight": [1, 1], "density": [0.3, 0.3]}),
}
"""The options of `ckpt merge` and the parameters of mergekit, by method."""

_MERGEKIT = "mergekit.scripts.run_yaml"

DRAWN = """
import sys, torch
from safetensors.torch import load_file
from mergekit import sparsify
from mergekit.merge_methods.generalized_task_arithmetic import get_mask
tensors = {name: load_file(file) for name, file in zip(("base", "a", "b", "masks", "ckpt"), sys.argv[2:])}
worst = 0.0
for name, base in tensors["base"].items():
    deltas = []
    for model in "ab":
        torch.bernoulli = lambda like: tensors["masks"][f"{model}.{name}"].to(like.dtype)
        delta = tensors[model][name] - base
        deltas.append(sparsify.bernoulli(delta, 0.3, sparsify.RescaleNorm.l1))
    deltas = torch.stack(deltas)
    if sys.argv[1] == "dare-ties":
        deltas = deltas * get_mask(deltas, method="sum", mask_dtype=base.dtype)
    result = base + deltas.sum(dim=0)
    worst = max(worst, float(((result - tensors["ckpt"][name]).abs() / base.abs().max()).max()))
print(worst)
"""


def write_models(folder: Path, parameters: float) -> None:
    """A base and two models tuned from it, of Llama's names, as folders of Hugging Face's."""
    width, rng = 1024, np.random.default_rng(0)
    layers = max(1, round((parameters - 2 * 4096 * width) / (4 * width * width + 3 * width * 2816)))
    shapes = {
        "model.embed_tokens.weight": (4096, width),
        "lm_head.weight": (4096, width),
        "model.norm.weight": (width,),
    }
    for i in range(layers):
        prefix = f"model.layers.{i}"
        shapes |= {f"{prefix}.self_attn.{x}_proj.weight": (width, width) for x in "qkvo"}
        shapes |= {f"{prefix}.mlp.{x}_proj.weight": (2816, width) for x in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (width, 2816)}
        shapes |= {f"{prefix}.{x}_layernorm.weight": (width,) for x in ("input", "post_attention")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2816,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    base = {name: (0.02 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    for model in ("base", "a", "b"):
        (folder / model).mkdir()
        noise = 0.0 if model == "base" else 0.001
        tuned = {name: x + np.float32(noise) * rng.standard_normal(x.shape, np.float32) for name, x in base.items()}
        save_file(tuned, folder / model / "model.safetensors", {"format": "pt"})
        (folder / model / "config.json").write_text(json.dumps(config))


def recipe(folder: Path, method: str, dtype: str) -> Path:
    """The configuration of mergekit for a method."""
    parameters = dict(METHODS[method][1])
    lists = {name: value for name, value in parameters.items() if isinstance(value, list)}
    models = [
        {"model": str(folder / model), "parameters": {name: value[i] for name, value in lists.items()}}
        for i, model in enumerate("ab")
    ]
    document = {
        "merge_method": method.replace("-", "_"),
        "dtype": dtype,
        "out_dtype": "float32",
        "models": models,
        "parameters": {name: value for name, value in parameters.items() if name not in lists},
    }
    if method == "slerp":
        document["base_model"] = str(folder / "a")
    elif method != "linear":
        document["base_model"] = str(folder / "base")
    path = folder / f"{method}.yml"
    path.write_text(json.dumps(document))  # YAML reads JSON
    return path


def difference(one: Path, other: Path) -> tuple[float, int, int]:
    """The largest difference by the largest value of its tensor, how many elements differ by more than a few roundings,
    and how many there are."""
    worst, far, count = 0.0, 0, 0
    with safe_open(one, "np") as a, safe_open(other, "np") as b:
        for name in a.keys():  # noqa: SIM118  # it is no dict
            x, y = a.get_tensor(name).astype(np.float64), b.get_tensor(name).astype(np.float64)
            gap = np.abs(x - y) / np.abs(x).max()
            worst, far, count = max(worst, float(gap.max())), far + int((gap > 1e-6).sum()), count + x.size
    return worst, far, count


def write_masks(folder: Path) -> None:
    """ckpt's drawn elements of all tensors of both models."""
    from ckpt.combine.task_blob import drawing_key, drawn

    masks = {}
    with safe_open(folder / "base" / "model.safetensors", "np") as base:
        for name in base.keys():  # noqa: SIM118
            shape = tuple(base.get_slice(name).get_shape())
            indices = np.arange(np.prod(shape), dtype=np.uint64)
            for i, model in enumerate("ab"):
                masks[f"{model}.{name}"] = drawn(drawing_key(0, name, i), 0.3, indices).reshape(shape)
    save_file(masks, folder / "masks.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mergekit", required=True, help="a Python that has mergekit")
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="float32", help="in which mergekit computes")
    arguments = parser.parse_args()
    print(f"{'method':16}{'':10}{'wall s':>8}{'CPU s':>8}{'MiB':>8}   difference from mergekit")
    with tempfile.TemporaryDirectory(prefix="merging-") as temporary:
        folder = Path(temporary)
        with ProcessPoolExecutor(1, get_context("spawn")) as other:  # this process stays small: see `measure`
            other.submit(write_models, folder, arguments.parameters).result()
            other.submit(write_masks, folder).result()
        for method, (options, _) in METHODS.items():
            ours, theirs = folder / "ours.safetensors", folder / "theirs"
            base = [] if method in ("linear", "slerp") else ["--base", str(folder / "base")]
            models = [str(folder / "a"), str(folder / "b")]
            text = str(recipe(folder, method, arguments.dtype))
            commands = {
                "ckpt": [
                    sys.executable,
                    "-m",
                    "ckpt_cli",
                    "merge",
                    *models,
                    str(ours),
                    "--method",
                    method,
                    *base,
                    *options,
                ],
                "mergekit": [arguments.mergekit, "-m", _MERGEKIT, text, str(theirs), "--no-copy-tokenizer"],
            }
            for program, command in commands.items():
                runs: list[Run] = []
                for _ in range(arguments.rounds):
                    ours.unlink(missing_ok=True) if program == "ckpt" else shutil.rmtree(theirs, ignore_errors=True)
                    runs.append(measure(command))
                run = medians(runs)
                shown = f"{method:16}{program:10}{run.wall:8.1f}{run.cpu:8.1f}{run.process / 2**20:8.0f}"
                print(shown if program == "ckpt" else f"{shown}   {compared(arguments.mergekit, folder, method)}")


def compared(mergekit: str, folder: Path, method: str) -> str:
    """How far the results are from each other, in words."""
    ours = folder / "ours.safetensors"
    if method.startswith("dare"):
        sources = [str(folder / model / "model.safetensors") for model in ("base", "a", "b")]
        command = [mergekit, "-c", DRAWN, method, *sources, str(folder / "masks.safetensors"), str(ours)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(done.stderr[-2000:])
        return f"at most {float(done.stdout):.1e}, by its formula on ckpt's mask"
    (theirs,) = (folder / "theirs").glob("*.safetensors")
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        worst, far, count = other.submit(difference, ours, theirs).result()
    return f"at most {worst:.1e}; {far} of {count:,} elements above 1e-6"


if __name__ == "__main__":
    main()
