"""The hyperparameters in a config.json of transformers, and the config.json of a model."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_formats.core.errors import CkptError, CorruptError, UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.text import printable
from ckpt_formats.names.expressions import Expression, evaluate, names_of
from ckpt_formats.names.hyperparameters import (
    LETTERS,
    ModelReading,
    Values,
    check_plain,
    differences,
    located,
    read,
    write,
)
from ckpt_formats.names.model import Model, ModelTensor, Tie
from ckpt_formats.names.packings import atoms_of, stored_shape
from ckpt_formats.names.tables import Family, blocks, family_of

CONFIG = "hf/config.json"
"""The key of a model's configuration in a checkpoint's extras."""

LLAMA3: dict[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The parameters of Llama 3's scaling that Megatron supports. Only its factor can be chosen."""
_SOURCE = "config.json"
_HINT = "Name the model's own config.json with --config."


@dataclass(frozen=True)
class ConfiguredModel:
    """A model of a known family that a config.json describes."""

    family: Family
    reading: ModelReading

    @property
    def model(self) -> Model:
        """The model, with defaults where the configuration is not valid."""
        return model_of(self.family, self.reading.values)

    @property
    def tie(self) -> Tie | None:
        """The model's tied names in files, or None."""
        return self.model.tie("hf")

    def names(self, dialect: str, present: Collection[str] | None = None) -> tuple[str, ...] | None:
        """The names of all parameters, in the model's order; None if the configuration does not state the sizes.

        They include the second name of a tied tensor. If `present` names are given, those of layers for multi-token
        prediction are left out unless some are among them.
        """
        if {"layers", "experts", "moe_layers", "mixers", "mtp_layers"} & self.reading.problems.keys():
            return None
        try:
            model = self.model if present is None else self.model.of_present(dialect, present)
            return model.names(dialect)
        except CkptError:
            return None

    def shapes(self, dialect: str) -> dict[str, Shape]:
        """The shapes of the tensors by name, where the configuration states them."""
        stored = self.model.stored(dialect)
        shapes = ((one.names[0], self._shape(one)) for one in stored)
        return {name: shape for name, shape in shapes if shape is not None}

    def entries_of_shape(self, name: str) -> tuple[str, ...]:
        """The entries of the configuration that state the shape of a tensor in files."""
        atoms = {atom for one in self.model.stored("hf") if name in one.names for atom in atoms_of(one.packing)}
        axes = (axis for block in blocks() for atom, axes in block.atoms.items() if atom in atoms for axis in axes)
        sizes = sorted({size for axis in axes for size in names_of(axis)})
        expressions = (self.family.settings.read[size] for size in sizes if size in self.family.settings.read)
        usual = sorted({entry for expression in expressions for entry in names_of(expression)})
        return tuple(self.family.entries.get(entry, entry) for entry in usual)

    def _shape(self, one: ModelTensor) -> Shape | None:
        try:
            return stored_shape(one.packing, one.scope, self.model.shape)
        except CorruptError:
            return None


def configured_model(config: Mapping[str, Any] | None) -> ConfiguredModel | None:
    """The model that a configuration describes; None for a family that is not known."""
    family = None if config is None else family_of(config)
    return None if family is None or config is None else ConfiguredModel(family, read_config(config, family))


def model_of(family: Family, values: Values) -> Model:
    """The model of a family with these hyperparameters."""
    return Model(values, family.base_prefix, family.dialects)


def read_config(config: Mapping[str, Any], family: Family) -> ModelReading:
    """The hyperparameters that a config.json states."""
    config = _of_text(config, family)
    entries = {**config, **_rotary(config)}
    for name, kind in ((LETTERS, str), ("layers_block_type", list)):
        if isinstance(layers := config.get(name), kind):
            entries["num_hidden_layers"] = len(layers)
            break
    entries |= {usual: config[own] for usual, own in family.entries.items() if own in config}
    defaults = family.settings.defaults
    entries |= {
        usual: defaults[own] for usual, own in family.entries.items() if own in defaults and entries.get(usual) is None
    }
    return read(family.settings, entries, _SOURCE)


def checked_values(config: Mapping[str, Any], family: Family, where: Path) -> Values:
    """The hyperparameters that a config.json states.

    Raises: IncompleteError or CorruptError if an entry is missing or not valid, UnsupportedError for a model that
    Megatron cannot compute.
    """
    with located(where):
        check_plain(family.settings, _of_text(config, family), _SOURCE, _HINT)
        values = read_config(config, family).checked()
        _check_heads(values)
        _check_scaling(_of_text(config, family), values)
    return values


def to_config(values: Values, family: Family, dtype: str | None) -> dict[str, Any]:
    """The config.json of a model of this family. Raises `UnsupportedError` if the family cannot state the model."""
    config, reading = _written(values, family)
    for name, value, other in differences(values, reading, training=False):
        raise UnsupportedError(
            f"models of the family {family.name} have {name} {_text(other)}, but this one has {name} {_text(value)}"
        )
    return {
        "architectures": [family.architectures[0]],
        "model_type": family.model_types[0],
        **config,
        # The tokenizer is not known. Without these entries, transformers would use defaults of another tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
        **({"torch_dtype": dtype} if dtype else {}),
    }


def differing(values: Values, family: Family) -> tuple[str, ...]:
    """The hyperparameters that models of the family cannot have."""
    try:
        _, reading = _written(values, family)
    except CkptError:
        return tuple(sorted(_not_stated(values, family)))
    return tuple(name for name, _, _ in differences(values, reading))


def _not_stated(values: Values, family: Family) -> Iterator[str]:
    """The hyperparameters of entries that cannot be computed of these values."""
    for expression in family.settings.write.values():
        if not _can_be_computed(expression, values):
            yield from names_of(expression)


def _can_be_computed(expression: Expression, values: Values) -> bool:
    try:
        evaluate(expression, values)
    except CkptError:
        return False
    return True


def is_preferred(values: Values, family: Family) -> bool:
    """Whether a model is of this family rather than of one with fewer options, which could state it, too."""
    return bool(evaluate(family.only, values))


def _of_text(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The entries for the part for text. Those of the whole model, such as tied embeddings, come first."""
    text = config.get(family.text) if family.text else None
    return {**text, **config} if isinstance(text, dict) else config


def _written(values: Values, family: Family) -> tuple[dict[str, Any], ModelReading]:
    """The entries of the config.json of a model of this family, and the hyperparameters that they state."""
    config: dict[str, Any] = {}
    for usual, value in write(family.settings, values).items():
        if own := family.entries.get(usual, usual):
            config[own] = value
    if "rope_theta" in config:
        config["rope_scaling"] = _scaling(values)
    reading = read_config(config, family)
    if "rope_theta" in config and reading.values["rope_type"] != values["rope_type"] == "default":
        config["rope_scaling"] = {"rope_type": "default"}  # where the family has another default
        reading = read_config(config, family)
    return config, reading


def _check_heads(values: Values) -> None:
    if values["heads"] is not None and values["heads"] % values["groups"]:
        raise UnsupportedError(
            f"config.json states {values['heads']} attention heads, which cannot be divided into "
            f"{values['groups']} groups"
        )


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary positions as flat entries, from those of transformers 4 or 5."""
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rotary, dict):
        return {"rope_type": rotary}
    kind = rotary.get("rope_type", rotary.get("type", "default")) if rotary else None
    entries = {f"rope_{key}" if not key.startswith("rope_") else key: value for key, value in rotary.items()}
    partial = rotary.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return {**entries, "rope_type": kind, **({} if partial is None else {"partial_rotary_factor": partial})}


def _check_scaling(config: Mapping[str, Any], values: Values) -> None:
    """Raise `UnsupportedError` for a scaling of rotary frequencies that Megatron does not have."""
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = values["rope_type"]
    is_known = (
        kind in ("default", "linear")
        or (kind == "llama3" and all(rotary.get(key) == value for key, value in LLAMA3.items()))
        or (kind == "yarn" and not rotary.get("attention_factor"))
    )
    if not is_known:
        raise UnsupportedError(
            f"config.json scales rotary frequencies by {printable(str(rotary))[:120]}, which Megatron does not support"
        )


def _scaling(values: Values) -> dict[str, Any] | None:
    if values["rope_type"] == "default":
        return None
    mscale_all = values["rope_mscale_all"]
    further: dict[str, dict[str, Any]] = {
        "llama3": {**LLAMA3},
        "yarn": {
            "original_max_position_embeddings": values["rope_original"],
            "beta_fast": values["rope_beta_fast"],
            "beta_slow": values["rope_beta_slow"],
            "truncate": values["rope_truncate"],
            **({"mscale": values["rope_mscale"], "mscale_all_dim": mscale_all} if mscale_all else {}),
        },
    }
    kind = values["rope_type"]
    return {"rope_type": kind, "factor": values["rope_factor"], **further.get(kind, {})}


def _text(value: Any) -> str:
    return printable(str(value))[:60]
