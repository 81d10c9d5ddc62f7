"""Quantised checkpoints and files of llama.cpp of any bytes end in values or in a `CkptError`, within bounded memory.

A round of `models` takes a tiny model of one scheme; changes its parts, their names, shapes and types, its JSON, or what
the configuration states, or truncates it; opens it, dequantises it and reads a block of each weight. A round of `files`
changes counts, lengths, types, offsets and any bytes of a `.gguf` file, or truncates it; reads all of its values, and
converts it to the names of transformers and back into a file.

The seed of a round is in the message of its failure.
"""
# ruff: noqa: E501 -- tables are read along their lines

from __future__ import annotations

import json
import resource
import shutil
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from run import Round

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "never_silent"), str(ROOT / "tests" / "support")]

from test_quantised import BF16, CASES, E4M3, E5M2, F16, F32, I8, I32, I64, U8, random_array, write_safetensors  # noqa: E402

import ckpt  # noqa: E402
from ckpt_formats.containers.gguf import BLOCK_TYPES, header_bytes, placed, read_header  # noqa: E402
from ckpt_formats.core.errors import CkptError  # noqa: E402
from ckpt_formats.registry.opening import open_checkpoint  # noqa: E402
from gguf_models import write_model  # noqa: E402

MAX_ELEMENTS = 1 << 20
MAX_GROWTH = 96 << 20
"""Bytes of memory that no round may add: the sources have a few kilobytes."""
TYPES = (BF16, F16, F32, U8, I8, I32, I64, E4M3, E5M2)
WORDS = (
    None,
    True,
    0,
    -1,
    1,
    3,
    64,
    128,
    1 << 40,
    0.5,
    1e308,
    "",
    "gptq",
    "gptq_v2",
    "gemv",
    [128, 128],
    [1, 32],
    [0, 0],
    {},
)
KEYS = (
    *("weight_block_size", "bits", "checkpoint_format", "version", "quant_method", "group_size"),
    *("quantization_config", "format", "config_groups"),
)
TEXTS = (
    "[" * 2000,
    "{" * 5,
    '{"a":' * 900 + "1" + "}" * 900,
    "1e999",
    "-1",
    "null",
    '"' + "x" * 70_000 + '"',
    "\\ud800",
)
EXTREMES = (0, 1, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
ARRAYS = ("g_idx", "weight_g_idx", "shape", "weight_shape", "group_size", "nbits", "axis")
"""Parts whose numbers decide where others are read."""


def models(folder: Path, seed: int) -> Iterator[Round]:
    """Yield rounds of hostile quantised models."""
    warnings.simplefilter("ignore")
    folder.mkdir(exist_ok=True)
    for number in count(seed * 1_000_000):
        name = list(CASES)[number % len(CASES)]
        yield Round(name, partial(within_memory, partial(read_model, folder, name, number), number))


def files(folder: Path, seed: int) -> Iterator[Round]:
    """Yield rounds of hostile files of llama.cpp."""
    warnings.simplefilter("ignore")
    folder.mkdir(exist_ok=True)
    sources = list(sources_of(folder))
    for number in count(seed * 1_000_000):
        name, content, header = sources[number % len(sources)]
        yield Round(name, partial(within_memory, partial(read_file, folder, content, header, number), number))


def within_memory(read: Any, seed: int) -> dict[str, int]:
    """What a read ends in. Raises `AssertionError` for another error than ckpt's, and for memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        end = read()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}") from error
    growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert growth <= MAX_GROWTH, f"seed {seed}: {growth:,} bytes"
    return {end: 1}


def changed(random: np.random.Generator, values: Any) -> Any:
    """A part with other bytes, or of another type or shape."""
    kind, raw = random.integers(0, 5), np.ascontiguousarray(values)
    if kind < 2 and raw.size:
        data = raw.reshape(-1).view(U8).copy()
        data[random.integers(0, data.size, random.integers(1, 5))] ^= random.integers(1, 256, 1).astype(U8)
        return data.view(raw.dtype).reshape(raw.shape)
    shape = list(raw.shape)
    if kind == 2 and shape:
        shape[random.integers(0, len(shape))] = int(random.choice([0, 1, 2, 3, 31, 33, 65]))
    elif kind == 3:
        shape = [int(n) for n in random.choice([1, 2, 8, 32, 64], random.integers(0, 4))]
    dtype = raw.dtype if kind < 4 else TYPES[random.integers(0, len(TYPES))]
    return random_array(tuple(shape), dtype, int(random.integers(0, 1 << 30)))


def read_model(folder: Path, name: str, seed: int) -> str:
    """Read a model of a scheme with changes. Return `values`, or the name of the error."""
    random, case = np.random.default_rng(seed), CASES[name]
    tensors = {
        f"{case.module}.{own}": case.values.get(own, random_array(*form, 0)) for own, form in case.layout.items()
    }
    for _ in range(random.integers(1, 4)):
        change(random, case.module, tensors)
    config = dict(case.config or {})
    if random.random() < 0.3:
        config[KEYS[random.integers(0, len(KEYS))]] = WORDS[random.integers(0, len(WORDS))]
    write_safetensors(folder / "model.safetensors", tensors)
    text = json.dumps({"model_type": "own", "quantization_config": config})
    if random.random() < 0.1:
        at = int(random.integers(0, len(text)))
        text = text[:at] + TEXTS[random.integers(0, len(TEXTS))] + text[at + int(random.integers(0, 9)) :]
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    if random.random() < 0.1:
        raw = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(raw[: int(random.integers(0, len(raw)))])
    try:
        read_values(open_checkpoint(folder).cast(("fp32", "bf16", "fp16")[seed % 3]), random)
    except CkptError as error:
        return type(error).__name__
    return "values"


def change(random: np.random.Generator, module: str, tensors: dict[str, Any]) -> None:
    """Change one tensor of a model."""
    key = list(tensors)[random.integers(0, len(tensors))]
    action, own = random.integers(0, 10), key.removeprefix(f"{module}.")
    if action == 0 and len(tensors) > 1:
        del tensors[key]
    elif action == 1:
        other = list(CASES.values())[random.integers(0, len(CASES))]
        tensors[f"{module}.{list(other.layout)[random.integers(0, len(other.layout))]}"] = tensors[key]
    elif action < 5 and (own in ARRAYS or ".quant_state." in own):
        numbers = np.array(EXTREMES, np.uint64)[random.integers(0, len(EXTREMES), max(tensors[key].size, 1))]
        if ".quant_state." in own:
            text = tensors[key].tobytes().decode("utf-8", "replace")
            at = int(random.integers(0, len(text) + 1))
            text = text[:at] + TEXTS[random.integers(0, len(TEXTS))] + text[at + int(random.integers(0, 9)) :]
            tensors[key] = np.frombuffer(text.encode("utf-8", "surrogatepass"), U8)
        else:
            tensors[key] = numbers[: tensors[key].size].astype(tensors[key].dtype).reshape(tensors[key].shape)
    else:
        tensors[key] = changed(random, tensors[key])


def read_values(source: Any, random: np.random.Generator) -> None:
    """Read a block of each weight."""
    for parameter in source.values():
        weight = parameter.weight
        assert weight.size <= MAX_ELEMENTS, f"{weight.size} elements"
        ends = [sorted(random.integers(0, n + 1, 2).tolist()) for n in weight.shape]
        np.asarray(weight[tuple(slice(low, high) for low, high in ends)])


def sources_of(folder: Path) -> Iterator[tuple[str, bytes, int]]:
    """Whole files, with the bytes of their headers: models, and one with all types of blocks and values."""
    for name in ("llama", "gemma3", "deepseek_v3", "llama3"):
        ckpt.save(ckpt.open(write_model(folder / name, name)), folder / f"{name}.gguf")
        yield name, (folder / f"{name}.gguf").read_bytes(), read_header(folder / f"{name}.gguf").data
        shutil.rmtree(folder / name)
    values: dict[str, Any] = {"general.architecture": "own", "general.alignment": np.uint32(32), "flag": True}
    values |= {f"a.{kind}": np.arange(9, dtype=kind) for kind in ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "u8", "f8")}
    values |= {
        "texts": ["a", "bc", ""],
        "nested": [[np.arange(3, dtype="i4")], ["x"]],
        "flags": np.array([True, False]),
    }
    tensors = placed([(kind.name, kind, (2, 256)) for kind in BLOCK_TYPES.values()], 32)
    head = header_bytes(values, tensors)
    data = np.random.default_rng(0).integers(0, 256, tensors[-1].offset + tensors[-1].nbytes, np.uint8).tobytes()
    yield "all types", head + data + bytes(-len(data) % 32), len(head)


def read_file(folder: Path, content: bytes, header: int, seed: int) -> str:
    """Read a file with changes. Return `values`, or the name of the error."""
    random, raw = np.random.default_rng(seed), bytearray(content)
    for _ in range(random.integers(1, 4)):
        action, at = random.integers(0, 6), int(random.integers(0, header))
        extreme = EXTREMES[random.integers(0, len(EXTREMES))]
        if action == 0:
            raw[at % len(raw)] ^= int(random.integers(1, 256))
        elif action == 1:
            raw[at : at + 8] = extreme.to_bytes(8, "little")
        elif action == 2:
            raw[at : at + 4] = int(random.integers(0, 45)).to_bytes(4, "little")
        elif action == 3:
            raw[8 + 8 * (at % 2) :][:8] = extreme.to_bytes(8, "little")
        elif action == 4:
            low = int(random.integers(0, header))
            raw[at:at] = raw[low : low + int(random.integers(1, 64))]
        else:
            del raw[int(random.integers(0, len(raw))) :]
            raw += bytes(max(0, 24 - len(raw)))
    path = folder / "m.gguf"
    path.write_bytes(raw)
    try:
        source = ckpt.open(path)
        read_values(source, random)
        ckpt.save(source, folder / "again.gguf")
        renamed = ckpt.use_names(source, "hf")
        read_values(renamed, random)
    except CkptError as error:
        return type(error).__name__
    finally:
        (folder / "again.gguf").unlink(missing_ok=True)
    return "values"
