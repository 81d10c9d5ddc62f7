"""Models under the names of llama.cpp, with the values that its files state; and back.

`dialects/gguf.toml` has the names and values of all architectures, and what differs in each. What llama.cpp cannot
compute is found by reading back what was written, and is refused by name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Parameter
from ckpt_formats.core.errors import IncompleteError, UnsafeError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import ArrayBlob, Tensor, read
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.names import hyperparameters
from ckpt_formats.names.config import CONFIG, LLAMA3, differing, is_preferred, model_of, read_config, to_config
from ckpt_formats.names.describe import ModelDescription, by_config_alone, check_further_tokens, weights_dtype
from ckpt_formats.names.expressions import names_of
from ckpt_formats.names.hyperparameters import Values, differences, entries_of, noted, write
from ckpt_formats.names.shifted_norms import with_shifted_norms
from ckpt_formats.names.tables import Dialect, Family, Settings, changed_dialect, dialect, families, parse_expressions
from ckpt_formats.names.translate import GGUF_VALUES, translated, without

ARCHITECTURE = "general.architecture"
_DIALECT = "gguf"
_FREQUENCIES = "rope_freqs.weight"
_VOCABULARY = "token_embd.weight"
_SOURCE = "the file"
_MAX_ARRAY = 100_000
"""Values of an array that describes a model: as lists, they take much more memory than in the file."""
_DIGITS = 6
"""Decimals that a float32 near one has."""


@dataclass(frozen=True)
class LlamaArchitecture:
    """One architecture of llama.cpp: its name in files, the families that it computes, its names and values."""

    name: str
    families: tuple[str, ...]
    dialect: Dialect

    @property
    def settings(self) -> Settings:
        """Its values as expressions of hyperparameters, and back."""
        return self.dialect.settings


@cache
def llama_architectures() -> tuple[LlamaArchitecture, ...]:
    """All architectures, in the order of the table."""
    base = dialect(_DIALECT)
    return tuple(_architecture(name, table, base) for name, table in base.other["architectures"].items())


def _architecture(name: str, table: Mapping[str, Any], base: Dialect) -> LlamaArchitecture:
    named = changed_dialect(base, _DIALECT, {"names": table.get("names", {})})
    settings = replace(
        base.settings,
        read={**base.settings.read, **parse_expressions(table.get("read", {}))},
        write={**base.settings.write, **parse_expressions(table.get("write", {}))},
    )
    return LlamaArchitecture(name, tuple(table["families"]), replace(named, settings=settings))


def to_llama_cpp(source: Checkpoint, config: Mapping[str, Any] | None = None, *, partial: bool = False) -> Checkpoint:
    """A checkpoint with transformers' names under those of llama.cpp. The values of its header are the extra `gguf`.

    `config` is the model's configuration; by default it is the checkpoint's own. `partial` allows missing tensors.

    Raises: UnsupportedError for a model that llama.cpp cannot compute, IncompleteError or CorruptError for tensors that
    are missing or contradict the configuration.
    """
    description = by_config_alone(source, config)
    values, family = description.model.values, description.family
    architecture = next((one for one in llama_architectures() if family.name in one.families), None)
    if architecture is None:
        raise UnsupportedError(f"the names of models of the family {family.name} in llama.cpp are not known")
    named = replace(description, model=_with_names(description, architecture))
    check_further_tokens(values, source, "llama.cpp")
    names = named.model.names(_DIALECT)
    header, notices = _header(values, architecture, names)
    renamed = translated(without(source, family.ignored), named, "hf", _DIALECT, partial=partial)
    parameters = dict(renamed.parameters)
    if values["rope_type"] == "llama3":
        factors = Tensor.of(ArrayBlob(frequency_factors(values)))
        parameters = {_FREQUENCIES: Parameter(_FREQUENCIES, "buffer", {MODEL: factors}), **parameters}
    stated = source.extras.get(GGUF_VALUES)
    others = {key: one for key, one in stated.items() if _is_of_tokenizer(key)} if isinstance(stated, dict) else {}
    named_model = replace(
        renamed,
        parameters=parameters,
        extras={**source.extras, GGUF_VALUES: {**header, **others}},
        notices=(*renamed.notices, *notices),
    )
    return with_shifted_norms(named_model, 1) if values["norms_add_one"] else named_model


def from_llama_cpp(source: Checkpoint, config: Mapping[str, Any] | None = None, *, partial: bool = False) -> Checkpoint:
    """A checkpoint with the names of llama.cpp under those of transformers. Its configuration is the extra `CONFIG`.

    `config` is the model's configuration; by default it is created from the values of the file. Raises as
    `to_llama_cpp`.
    """
    description = _described(source)
    if config is not None:
        by_config = by_config_alone(source, config)
        architecture = _architecture_of(source)
        if by_config.family.name not in architecture.families:
            raise UnsupportedError(f"config.json is of another family than the file, which has {architecture.name}")
        description = replace(by_config, model=_with_names(by_config, architecture))
    known = replace(source, parameters={n: p for n, p in source.parameters.items() if n != _FREQUENCIES})
    if description.model.values["norms_add_one"]:
        known = with_shifted_norms(known, -1)
    renamed = translated(known, description, _DIALECT, "hf", partial=partial)
    return replace(
        renamed,
        extras={**source.extras, CONFIG: dict(description.config)},
        notices=(*renamed.notices, *description.notices),
    )


def frequency_factors(values: Values) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """What llama.cpp divides the rotary frequencies of Llama 3 by: (n,) float32, n half of a head.

    Source: transformers, `_compute_llama3_parameters`.
    """
    size, factor, context = values["head_dim"], values["rope_factor"], LLAMA3["original_max_position_embeddings"]
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    steps = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    waves = 2 * np.pi * np.power(np.float32(values["theta"]), steps).astype(np.float64)
    smooth = np.clip((context / waves - low) / (high - low), 0, 1)
    factors = 1 / ((1 - smooth) / factor + smooth)
    return np.asarray(factors, np.float32)


def _with_names(description: ModelDescription, architecture: LlamaArchitecture) -> Any:
    own = description.model.dialects or {}
    return replace(description.model, dialects={**own, _DIALECT: architecture.dialect})


def _is_of_tokenizer(key: str) -> bool:
    return key.startswith("tokenizer.")


def _header(
    values: Values, architecture: LlamaArchitecture, names: Iterable[str]
) -> tuple[dict[str, Value], tuple[Notice, ...]]:
    """The values of a file's header, and what llama.cpp computes slightly differently.

    Raises `UnsupportedError` if llama.cpp cannot compute the model.
    """
    floats = dialect(_DIALECT).other["floats"]["names"]
    written = {key: one for key, one in write(architecture.settings, values).items() if one is not None}
    if values["position_type"] == "rope":
        written["rope.dimension_count"] = values["rope_dim"] or int(values["head_dim"] * values["rotary"])
    scales = _scales()
    stated = {key: _typed(one * scales[key] if key in scales else one, key in floats) for key, one in written.items()}
    entries = {**_as_entries(stated), **_evidence(names, values["tied"])}
    if values["position_type"] == "rope":
        entries |= {"rotary": values["rotary"], "rope_freqs": values["rope_type"] == "llama3"}
    if values["rope_type"] == "llama3":
        entries["rope_scaling_factor"] = values["rope_factor"]
    reading = hyperparameters.read(architecture.settings, entries, "llama.cpp")
    for name, value, other in differences(values, reading):
        raise UnsupportedError(
            f"llama.cpp cannot compute a model with {name} {_text(value)}: its architecture {architecture.name} has "
            f"{name} {_text(other)}",
            hint="Other formats hold this model.",
        )
    for name, problem in reading.problems.items():
        raise UnsupportedError(
            f"llama.cpp cannot compute a model with {name} {_text(values[name])}: {problem.what}",
            hint="Other formats hold this model.",
        )
    own = {f"{architecture.name}.{key}": one for key, one in stated.items()}
    header = {ARCHITECTURE: architecture.name, "general.type": "model", **own}
    return header, noted(values, reading, "llama.cpp")


def _scales() -> Mapping[str, float]:
    """The values that files state as multiples of what expressions have, with the factors."""
    return dialect(_DIALECT).other["scaled"]


def _typed(value: Any, is_float: bool) -> Value:
    """A value of a header in its type there."""
    if isinstance(value, (bool, str)):
        return value
    return np.float32(value) if is_float or isinstance(value, float) else np.uint32(value)


def _as_entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as names of expressions. Floats have the shortest decimal that is the same float32."""
    entries = {}
    for key, value in values.items():
        if isinstance(value, np.floating):
            value = float(str(value))
        elif isinstance(value, np.generic):
            value = value.item()
        elif isinstance(value, np.ndarray):
            if value.size > _MAX_ARRAY:
                raise UnsafeError(f"`{printable(key)}` has {value.size:,} values: a model has one for each layer")
            value = value.tolist()
        if key in _scales() and isinstance(value, float):
            value = round(value / _scales()[key], _DIGITS)
        entries[_as_name(key)] = value
    return entries


def _as_name(key: str) -> str:
    """The key of a value as expressions name it."""
    return key.replace(".", "_").replace("-", "_")


def _known_names(architecture: LlamaArchitecture) -> frozenset[str]:
    """The values that an architecture reads or writes, as expressions name them."""
    settings = architecture.settings
    stated = {name for expression in settings.read.values() for name in names_of(expression)}
    return frozenset({*stated, *map(_as_name, settings.write), "rope_dimension_count"})


def _evidence(names: Iterable[str], tied: bool = False) -> dict[str, bool]:
    """What the names of tensors state. `tied`: the head is not among a file's tensors, although it has a name."""
    there = list(names)
    evidence = {
        key: any(name == end or name.endswith(f".{end}") for name in there)
        for key, end in dialect(_DIALECT).other["evidence"].items()
    }
    return {**evidence, "head": evidence["head"] and not tied}


def _architecture_of(source: Checkpoint) -> LlamaArchitecture:
    values = source.extras.get(GGUF_VALUES)
    name = values.get(ARCHITECTURE) if isinstance(values, dict) else None
    known = {one.name: one for one in llama_architectures()}
    if not isinstance(name, str) or name not in known:
        raise UnsupportedError(
            f"models of llama.cpp of the architecture {printable(str(name))[:60]} are not known",
            where=source.path,
            hint=f"ckpt knows {', '.join(known)}. Formats that keep names, such as safetensors, take all.",
        )
    return known[name]


def _described(source: Checkpoint) -> ModelDescription:
    """The model that the values of a file describe."""
    architecture = _architecture_of(source)
    prefix = f"{architecture.name}."
    own = {key.removeprefix(prefix): one for key, one in source.extras[GGUF_VALUES].items() if key.startswith(prefix)}
    entries = {**_as_entries(own), **_evidence(source.parameters)}
    table = source.parameters.get(_VOCABULARY)
    if table is None or not table.shape:
        raise IncompleteError(f"`{_VOCABULARY}` is missing", where=source.path)
    entries["vocab_size"] = table.shape[0]
    with hyperparameters.located(source.path):
        if entries["rope_freqs"]:
            entries["rope_scaling_factor"] = float(read(source.parameters[_FREQUENCIES].weight).max())
        entries["rotary"] = 1.0
        head_dim = hyperparameters.read(architecture.settings, entries, _SOURCE).values["head_dim"]
        if head_dim and isinstance(entries.get("rope_dimension_count"), int):
            entries["rotary"] = entries["rope_dimension_count"] / head_dim
        values = hyperparameters.read(architecture.settings, entries, _SOURCE).checked()
    _check_frequencies(source, values)
    family = _family(architecture, values, source.path)
    config = to_config(values, family, weights_dtype(source))
    notices = [Notice(f"config.json is created from the values of the file: a {family.name} model")]
    notices += noted(values, read_config(config, family), "transformers")
    if unread := tuple(key for key in own if _as_name(key) not in _known_names(architecture)):
        text = "values of the file that config.json does not state, and that may change what the model computes"
        notices.append(Notice(text, unread, Weight.UNSURE))
    described = ModelDescription(model_of(family, values), family, config, tuple(notices))
    return replace(described, model=_with_names(described, architecture))


def _check_frequencies(source: Checkpoint, values: Values) -> None:
    if values["rope_type"] != "llama3":
        return
    stored, expected = read(source.parameters[_FREQUENCIES].weight), frequency_factors(values)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-5, atol=0):
        raise UnsupportedError(
            f"`{_FREQUENCIES}` scales rotary frequencies otherwise than Llama 3",
            where=source.path,
            hint="Name the model's config.json with --config.",
        )


def _family(architecture: LlamaArchitecture, values: Values, where: Path) -> Family:
    """The family of an architecture that can state these hyperparameters."""
    known = [family for family in families() if family.name in architecture.families]
    fitting = [family for family in known if not differing(values, family) and is_preferred(values, family)]
    if fitting:
        return fitting[0]
    names = "; ".join(entries_of(architecture.settings, name) for name in differing(values, known[0]))
    raise UnsupportedError(
        f"no family of the architecture {architecture.name} has these values: {names}",
        where=where,
        hint="Name the model's config.json with --config.",
    )


def _text(value: Any) -> str:
    return printable(str(value))[:60]
