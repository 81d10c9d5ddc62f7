"""Compare the logits of llama.cpp and of transformers for all models of `gguf_models`, and note the files.

    pip install xllamacpp cffi llama-cpp-py-sync
    python tests/golden_gguf/make.py [NAME ...]

llama.cpp computes with a float32 cache and without flash attention. `logits.json` has the configuration of each model;
afterwards it also has the digest of the file that ckpt writes, the largest difference of logits and the largest logit.
llama.cpp computes GELU by a table in float16: so does transformers here.
The tests compare the digests, so they need neither library.

The library of xllamacpp has llama.cpp's C interface; llama-cpp-py-sync declares it.
"""

import json
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / one) for one in ("formats", "codecs", "tests", "tests/support", "tests/jobs")]
TOKENS = [0, 7, 14, 21, 28, 35, 42, 49, 56, 63, 6, 13]
SECONDS = 60
"""Limit of llama.cpp for one model."""


def digest(path: Path) -> str:
    """The XXH3-128 of a file."""
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(path.read_bytes()))


def library() -> tuple[Any, Any]:
    """cffi's interface, and llama.cpp."""
    from cffi import FFI

    ffi = FFI()
    declarations = Path(str(find_spec("llama_cpp_py_sync").origin)).with_name("_cffi_bindings.py")  # type: ignore
    ffi.cdef(re.search(r'_LLAMA_H_CDEF = """(.*?)"""', declarations.read_text(), re.DOTALL)[1])  # type: ignore
    spec = find_spec("xllamacpp.xllamacpp")
    assert spec is not None
    return ffi, ffi.dlopen(spec.origin)


def of_llama_cpp(path: str) -> np.ndarray:
    """The logits of a `.gguf` file: (tokens, vocabulary) float32."""
    ffi, llama = library()
    lines: list[str] = []
    quiet = ffi.callback(
        "void(enum ggml_log_level, const char*, void*)", lambda level, text, data: lines.append(ffi.string(text))
    )
    llama.llama_log_set(quiet, ffi.NULL)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    assert model, f"llama.cpp does not load {path}: {b''.join(lines[-4:]).decode()}"
    options = llama.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 64
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = options.flash_attn_type = 0
    context = llama.llama_init_from_model(model, options)
    batch = llama.llama_batch_init(len(TOKENS), 0, 1)
    batch.n_tokens = len(TOKENS)
    for i, token in enumerate(TOKENS):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert llama.llama_decode(context, batch) == 0
    count = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    rows = [ffi.buffer(llama.llama_get_logits_ith(context, i), 4 * count) for i in range(len(TOKENS))]
    return np.stack([np.frombuffer(row, np.float32).copy() for row in rows])


def of_transformers(folder: Path, table: bool) -> np.ndarray:
    """The logits of a model of transformers, in float32: (tokens, vocabulary). `table`: with llama.cpp's GELU."""
    import torch
    import transformers

    if table:
        for name in ("gelu_new", "gelu_pytorch_tanh"):
            transformers.activations.ACT2FN[name] = GeluOfLlamaCpp
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model.set_experts_implementation("eager")  # others need aligned sizes
    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor(TOKENS)[None]).logits[0])


def has_table(config: Any) -> bool:
    """Whether llama.cpp computes the model's activation by a table in float16."""
    from ckpt_formats.names.config import configured_model

    configured = configured_model(config)
    return configured is not None and configured.model.values["activation"] == "gelu_new"


class GeluOfLlamaCpp:
    """GELU by the hyperbolic tangent as llama.cpp's table has it: of a float16, rounded to float16."""

    def __call__(self, x: Any) -> Any:
        import torch

        near = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, near))


def main(names: list[str]) -> None:
    import ckpt
    from gguf_models import GOLDEN, write_model

    notes = dict(GOLDEN)
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or GOLDEN:
            folder = write_model(Path(scratch) / name, name)
            file = Path(scratch) / f"{name}.gguf"
            ckpt.save(ckpt.open(folder), file)
            own = Path(scratch) / "logits.npy"
            subprocess.run([sys.executable, __file__, "--logits", str(file), str(own)], check=True, timeout=SECONDS)
            expected = of_transformers(folder, has_table(GOLDEN[name]["config"]))
            difference = float(np.abs(np.load(own) - expected).max())
            notes[name] = {
                "digest": digest(file),
                "difference": float(f"{difference:.2g}"),
                "largest": float(f"{np.abs(expected).max():.2g}"),
                "config": GOLDEN[name]["config"],
            }
            print(name, notes[name], flush=True)
    Path(__file__).with_name("logits.json").write_text(json.dumps(notes, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--logits"]:
        np.save(sys.argv[3], of_llama_cpp(sys.argv[2]))
    else:
        main(sys.argv[1:])
