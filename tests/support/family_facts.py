"""What the tables of families say of a model: compared before and after a line of a table is changed."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.tensor import read
from ckpt_formats.names import llama_cpp, native, tables, translate
from ckpt_formats.names import model as models
from ckpt_formats.names.arguments import to_arguments
from ckpt_formats.names.config import CONFIG, configured_model, is_preferred
from ckpt_formats.names.expressions import evaluate, parse_expression
from ckpt_formats.names.hyperparameters import check_plain, write
from ckpt_formats.names.hyperparameters import read as read_entries
from ckpt_formats.names.llama_cpp import from_llama_cpp, to_llama_cpp
from ckpt_formats.names.native import from_native, to_native
from ckpt_formats.names.packings import stored_shape
from ckpt_formats.names.renames import apply_renames
from held import checkpoint, parameter
from hf_jobs.random_models import RANDOM, model

Facts = dict[str, Any]

FOLDER = Path(tables.__file__).parent
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.toml"))
_CACHED = (
    *(tables.blocks, tables.places_of_atoms, tables.hyperparameters, tables.dialect, tables.families),
    *(tables._family_tables, tables._family, models._axes, translate._megatron_patterns),
    *(native._names_of, llama_cpp.llama_architectures),
)
_SWAPS = {" == ": " != ", " != ": " == ", " + ": " - ", " - ": " + ", " * ": " + ", " // ": " * ", " >= ": " > "}
_SWAPS |= {" < ": " <= ", " % ": " // ", " in ": " not in ", " and ": " or ", " or ": " and ", "not ": ""}
_SWAPS |= {"True": "False", "False": "True", "true": "false", "false": "true", " = 1": " = 2", " = 0": " = 1"}


def forget_tables() -> None:
    """Let the tables be read again."""
    for function in _CACHED:
        function.cache_clear()


def facts(config: Mapping[str, Any]) -> Facts:
    """Names, shapes and order in files and in memory, hyperparameters; and what becomes of it in Megatron and back."""
    configured = configured_model(config)
    if configured is None:
        return {"family": None}
    described = configured.model
    result: Facts = {"values": dict(configured.reading.values), "tie": configured.tie}
    result["problems"] = {name: str(error) for name, error in configured.reading.problems.items()}
    for dialect in tables.DIALECTS:
        try:
            stored = described.stored(dialect)
        except CkptError as error:
            result[dialect] = str(error)
            continue
        result[dialect] = [(one.names, stored_shape(one.packing, one.scope, described.shape)) for one in stored]
    settings = configured.family.settings
    result["written"] = _written(settings, described.values)
    result["preferred"] = is_preferred(described.values, configured.family)
    result["plain"] = {name: _refuses(settings, name) for name in settings.plain}
    result["defaults"] = dict(settings.defaults)
    for naming in (*translate.NATIVE, translate.GGUF_VALUES):
        result[f"as {naming}"] = _elsewhere(config, naming)
    result["in memory"] = _in_memory(config)
    result["ignored"] = [configured.family.ignored.pattern, configured.family.others.pattern]
    try:
        result["arguments"] = to_arguments(described.values, None)
        result |= _in_megatron(config)
    except CkptError as error:
        result["refused"] = str(error)
    return result


def _written(settings: tables.Settings, values: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return write(settings, values)
    except CkptError:
        return None


def facts_of_megatron() -> Facts:
    """What is read of arguments that state little, and what is refused."""
    settings = tables.dialect("megatron").settings
    required = {"num_layers": 2, "hidden_size": 12, "ffn_hidden_size": 5, "num_attention_heads": 3, "num_experts": 4}
    required |= {"max_position_embeddings": 7, "padded_vocab_size": 9, "moe_layer_freq": [True, False]}
    kinds: list[dict[str, Any]] = [
        {},
        {"position_embedding_type": "rope", "window_size": (3, 0), "normalization": "RMSNorm", "swiglu": True},
        {"bias_gelu_fusion": False, "normalization": "LayerNorm"},
        {"position_embedding_type": "yarn", "multi_latent_attention": True, "q_lora_rank": 2, "kv_lora_rank": 3},
        {"moe_router_score_function": "sigmoid", "moe_router_num_groups": 2, "moe_router_group_topk": 1}
        | {"moe_router_topk_scaling_factor": 2.5},
        {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [1, 0],
            "linear_conv_kernel_dim": 3,
        }
        | {"layernorm_zero_centered_gamma": True, "attention_output_gate": True},
        {"experimental_attention_variant": "dsa"},
    ]
    result = {str(i): dict(read_entries(settings, required | kind, "x").values) for i, kind in enumerate(kinds)}
    result["plain"] = {name: _refuses(settings, name) for name in settings.plain}
    result["defaults"] = dict(settings.defaults)
    result["kinds"] = {
        one.name: (one.default, one.optional, one.training, one.noted) for one in tables.hyperparameters()
    }
    further = tables.dialect("megatron").other
    result["evidence"], result["aliases"] = dict(further["evidence"]), dict(further["aliases"])
    result["alone"] = {
        name: evaluate(parse_expression(text), {"positions": 5}) for name, text in further["alone"].items()
    }
    return result


def _refuses(settings: tables.Settings, name: str) -> tuple[bool, object]:
    try:
        check_plain(settings, {name: "another"}, "x", "")
    except CkptError:
        return True, evaluate(settings.plain[name], {})
    return False, None


def _numbered(config: Mapping[str, Any]) -> Checkpoint:
    """A model of transformers, no two elements of which are equal."""
    configured = configured_model(config)
    assert configured is not None
    described, tie, first, parameters = configured.model, configured.tie, 0, []
    starts: dict[object, int] = {}  # copies have the values of their tensor
    for one in described.stored("hf"):
        name, shape = one.names[0], stored_shape(one.packing, one.scope, described.shape)
        if tie is None or name != tie.alias:
            size = int(np.prod(shape))
            start = starts.setdefault(one.keys, first)
            parameters.append(parameter(name, {"model": np.arange(start, start + size, dtype="f4").reshape(shape)}))
            first += size
    return checkpoint(parameters, (), {CONFIG: dict(config)}, {} if tie is None else {tie.alias: tie.name})


def _elsewhere(config: Mapping[str, Any], naming: str) -> Facts | None:
    """The model under the names of another library, and what becomes of it there and back; None if it is refused."""
    to, back = (to_llama_cpp, from_llama_cpp) if naming == translate.GGUF_VALUES else _of_native(naming)
    try:
        there = to(_numbered(config))
        extras = {key: value for key, value in there.extras.items() if key != CONFIG or naming in translate.NATIVE}
        again = back(replace(there, extras=extras))
    except CkptError:
        return None
    values = there.extras.get(translate.GGUF_VALUES)
    return {"there": _contents(there), "back": _contents(again), "values": values, "config": again.extras[CONFIG]}


def _in_memory(config: Mapping[str, Any]) -> dict[str, int] | None:
    """The tensors of transformers' model in memory; None for a model that it cannot have."""
    configured = configured_model(config)
    assert configured is not None
    try:
        source = _numbered(config)
        return _contents(
            apply_renames(source, translate.renames_between(configured.model, source.parameters, "hf", "hf_memory"))
        )
    except CkptError:
        return None


def _of_native(naming: str) -> tuple[Callable[[Checkpoint], Checkpoint], Callable[[Checkpoint], Checkpoint]]:
    return partial(to_native, name=naming), partial(from_native, name=naming)


def _contents(source: Checkpoint) -> dict[str, int]:
    return {name: zlib.crc32(read(one.weight).tobytes()) for name, one in source.parameters.items()}


def _in_megatron(config: Mapping[str, Any]) -> dict[str, Any]:
    there = translate.to_megatron(_numbered(config))
    extras = {key: value for key, value in there.extras.items() if key != CONFIG}
    back = translate.to_hf(checkpoint(list(there.parameters.values()), (), extras, there.aliases))
    return {
        "megatron": _contents(there),
        "back": _contents(back),
        "config": back.extras[CONFIG],
    }


def mutations(text: str) -> Iterator[tuple[int, str]]:
    """A table with one line left out or changed: (number of the line, the changed text)."""
    lines = [*text.splitlines(), ""]
    for i, line in enumerate(lines):
        code = line.partition("  #")[0]
        if not code.strip() or code.startswith(("#", "[")):
            continue
        for changed in dict.fromkeys(["", *_changed(code)]):
            yield i, "\n".join([*lines[:i], changed, *lines[i + 1 :]])


def _changed(line: str) -> Iterator[str]:
    for old, new in _SWAPS.items():
        if old in line:
            yield line.replace(old, new, 1)
    if match := re.search(r"\((?:[^()]*, )?([a-z0-9_.]+), ([a-z0-9_.]+)\)", line):
        first, second = match.groups()
        yield f"{line[: match.start(1)]}{second}, {first}{line[match.end(2) :]}"


def sample(rng: random.Random) -> Iterator[tuple[str, int, str]]:
    """All mutations of all tables, in random order, for ever: (file, number of the line, the changed text)."""
    everything = [(file, *one) for file in FILES for one in mutations((FOLDER / file).read_text("utf-8"))]
    while True:
        yield from rng.sample(everything, len(everything))


def configurations(seeds: int = 6) -> dict[str, list[dict[str, Any]]]:
    """Random models of each family, in full and without what has defaults."""
    result: dict[str, list[dict[str, Any]]] = {}
    for family in RANDOM:
        full = [model(f"{family}-{seed}") for seed in range(seeds)]
        own = tables.family_of(full[0])
        assert own is not None
        stated = {"rope_parameters", "initializer_range", *own.settings.defaults}
        result[own.name] = [*full, {key: value for key, value in full[0].items() if key not in stated}]
    return result


def variants() -> dict[str, list[dict[str, Any]]]:
    """Models of each family with an option turned over, or with many layers whose kinds are not stated."""
    result: dict[str, list[dict[str, Any]]] = {}
    for name, (full, *_) in configurations(1).items():
        own = tables.family_of(full)
        assert own is not None
        stated = {**own.settings.defaults, **full}
        flags = (key for key, value in stated.items() if isinstance(value, bool))
        flags = (key for key in sorted({*flags, "attention_bias", "mlp_bias", "attention_out_bias"}))
        result[name] = [{**full, key: not stated.get(key, False)} for key in flags]
        layers = full.get("num_hidden_layers")
        if layers:
            result[name].append({**_without_kinds(full, layers), "num_hidden_layers": 13})
    return result


def _without_kinds(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    lists = {key for key, value in config.items() if isinstance(value, list) and len(value) == layers}
    return {key: value for key, value in config.items() if key not in lists - {"architectures"}}


def facts_of_families() -> dict[str, Facts]:
    """The facts of each random model, by its family and its number there."""
    every = configurations(3).items()
    return {f"{family}-{i}": facts(config) for family, configs in every for i, config in enumerate(configs)}


def digests(of_families: Mapping[str, Facts]) -> dict[str, str]:
    """A digest of the facts of each random model, and of what is read of Megatron's arguments."""
    return {name: _digest(one) for name, one in {"megatron": facts_of_megatron(), **of_families}.items()}


def _digest(known: Facts) -> str:
    """Errors count, but not their texts."""
    stated = {**known, "problems": list(known.get("problems", ())), "refused": "refused" in known}
    stated |= {name: True for name in tables.DIALECTS if isinstance(stated.get(name), str)}
    return f"{zlib.crc32(json.dumps(stated, sort_keys=True, default=repr).encode()):08x}"
