"""The tensors that a model expects: from its configuration, from another checkpoint, from a module, or from names."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.text import printable
from ckpt_formats.names.config import ConfiguredModel, configured_model

_DIALECTS = ("hf", "hf_memory")
"""The names of transformers' files, and those of its modules where they differ."""


@dataclass(frozen=True)
class Expected:
    """The tensors of a model."""

    names: tuple[str, ...]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Of the names whose shape is known."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Of the names whose element type is known."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Names that share a tensor with another name, which suffices."""


def expected_of(like: Any, present: Iterable[str]) -> list[Expected]:
    """What a model may expect; several, if its library has several names for the same tensors.

    like: a checkpoint, the content of a config.json, a module or state dict of torch, or names. present: the names of
    the checkpoint that will be compared.

    Raises `InvalidArgumentError` for anything else, `UnsupportedError` for a configuration of an unknown family.
    """
    if isinstance(like, Checkpoint):
        return [_of_checkpoint(like)]
    if hasattr(like, "state_dict"):
        return [_of_tensors(like.state_dict())]
    if isinstance(like, Mapping):
        if like and all(hasattr(value, "shape") for value in like.values()):
            return [_of_tensors(like)]
        return list(_of_config(like, set(present)))
    if isinstance(like, Iterable):
        names = [like] if isinstance(like, str) else list(like)
        if all(isinstance(name, str) for name in names):
            return [Expected(tuple(dict.fromkeys(names)))]
    raise InvalidArgumentError(
        f"{type(like).__name__} describes no model",
        hint="Give a checkpoint, the content of a config.json, a module, a state dict, or a list of names.",
    )


def _of_checkpoint(like: Checkpoint) -> Expected:
    names = tuple(dict.fromkeys((*like, *like.aliases)))
    weights = {name: like[name].weight for name in names if like.aliases.get(name, name) in like.parameters}
    return Expected(
        names,
        {name: weight.shape for name, weight in weights.items()},
        {name: weight.dtype.name for name, weight in weights.items()},
        {**like.aliases, **{name: alias for alias, name in like.aliases.items()}},
    )


def _of_tensors(tensors: Mapping[str, Any]) -> Expected:
    """Of a state dict: names of one tensor count alone, as `load_state_dict` counts them."""
    shaped = {str(name): one for name, one in tensors.items() if hasattr(one, "shape")}
    return Expected(
        tuple(shaped),
        {name: tuple(map(int, one.shape)) for name, one in shaped.items()},
        {name: str(one.dtype).removeprefix("torch.") for name, one in shaped.items()},
    )


def _of_config(config: Mapping[str, Any], present: set[str]) -> Iterator[Expected]:
    configured = configured_model(config)
    if configured is None:
        kind = config.get("model_type")
        raise UnsupportedError(
            f"the tensors of models of type {printable(str(kind))[:60]} are not known"
            if kind
            else "the configuration states no known `model_type`",
            hint="`ckpt formats --families` lists known ones; or compare with another checkpoint or a file of names.",
        )
    for dialect in _DIALECTS:
        names = configured.names(dialect, present)
        if names is not None:
            yield Expected(names, _shapes(configured, dialect), {}, _ties(configured, dialect))
        elif dialect == _DIALECTS[0]:
            first, *others = map(str, configured.reading.problems.values())
            more = f", and {len(others)} more" if others else ""
            what = f"the configuration does not state the model's tensors: {printable(first)[:200]}{more}"
            hint = "Give the model's own config.json; or compare with another checkpoint or a file of names."
            raise UnsupportedError(what, hint=hint)


def _shapes(configured: ConfiguredModel, dialect: str) -> dict[str, Shape]:
    return configured.shapes(dialect)


def _ties(configured: ConfiguredModel, dialect: str) -> dict[str, str]:
    tie = configured.model.tie(dialect)
    return {} if tie is None else {tie.alias: tie.name, tie.name: tie.alias}
