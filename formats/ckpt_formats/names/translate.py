"""Translate checkpoints from one library's names to another's: weights and all their optimizer states.

The results are views: no data is read. A tensor that the model does not have is an error, and so is a missing tensor.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar, cast

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.format import Naming
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.tensor import Tensor, with_replicas
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.names import legacy
from ckpt_formats.names.arguments import ARGUMENTS, to_arguments, updated
from ckpt_formats.names.config import CONFIG, configured_model
from ckpt_formats.names.describe import (
    COMPUTED,
    ModelDescription,
    by_config_alone,
    config_of,
    describe_model,
    pattern_of,
    weights_dtype,
)
from ckpt_formats.names.expressions import Scope
from ckpt_formats.names.hyperparameters import noted, read
from ckpt_formats.names.model import AtomKey, Model, ModelTensor, key_of
from ckpt_formats.names.packings import pack, unpack
from ckpt_formats.names.renames import TensorRename, apply_renames
from ckpt_formats.names.tables import Family, dialect

NATIVE: tuple[Naming, ...] = ("torchtitan", "meta", "maxtext")
"""The names of libraries whose checkpoints state no model."""
_OF_TITAN = re.compile(r"layers\.\d{1,6}\.(?:attention\.qkv_linear\..+|moe\..+)")
_OF_MAXTEXT = re.compile(
    r"decoder\.(?:dense_|moe_)?layers(?:_remainder)?(?:_\d{1,6})?(?:\.layers_\d{1,6})?"
    r"\.(?:self_attention(?:_local|_global)?|GptOssAttention)\.(?:query|wkv_a)\.kernel"
)
_OF_META = re.compile(r"layers\.\d{1,6}\.attention\.w[qkvo]\.weight")

GGUF_VALUES = "gguf"
"""The key of the values of a file of llama.cpp in a checkpoint's extras: a dict."""
_OF_LLAMA_CPP = re.compile(r"blk\.\d{1,6}\..+|token_embd\.weight|output_norm\.weight")

T = TypeVar("T")

_HEAD = "output_layer.weight"
_PLACEHOLDER = re.compile(r"\{\w+\}")


def naming_of(checkpoint: Checkpoint) -> Naming | None:
    """The library whose names a checkpoint's tensors have; None if it is not known."""
    if legacy.has_legacy_names(checkpoint):
        return "megatron-legacy"
    own = [name for name, parameter in checkpoint.parameters.items() if parameter.role != "extra"]
    if isinstance(checkpoint.extras.get(GGUF_VALUES), dict) and any(map(_OF_LLAMA_CPP.fullmatch, own)):
        return "gguf"
    if _megatron_patterns().intersection(map(pattern_of, own)):
        return "megatron"
    for naming, pattern in (("torchtitan", _OF_TITAN), ("meta", _OF_META), ("maxtext", _OF_MAXTEXT)):
        if any(map(pattern.fullmatch, own)):
            return cast(Naming, naming)
    configured = configured_model(config_of(checkpoint))
    if configured is None:
        return None
    return "hf" if checkpoint.parameters.keys() & set(configured.names("hf") or ()) else None


def to_hf(checkpoint: Checkpoint, config: Mapping[str, Any] | None = None, *, partial: bool = False) -> Checkpoint:
    """A checkpoint with Megatron's names under the names of transformers. Its configuration is the extra `CONFIG`.

    `config` is the model's configuration; by default it is the checkpoint's own, or created from the run's arguments.
    `partial` allows missing tensors.

    Raises: UnsupportedError for a model of no known family, CorruptError if tensors, arguments and configuration
    contradict each other, IncompleteError if something is missing.
    """
    source = without(legacy.to_core(checkpoint), COMPUTED)
    description = describe_model(source, config_of(source) if config is None else config, partial)
    renamed = translated(source, description, "megatron", "hf", partial=partial)
    padding = _padding(source, description.model)
    text = f"the last {padding} rows of the vocabulary's tables are padding and are left out"
    padded = (Notice(text),) if padding else ()
    return replace(
        renamed,
        extras={**source.extras, CONFIG: dict(description.config)},
        notices=(*source.notices, *description.notices, *padded),
    )


def to_megatron(
    checkpoint: Checkpoint, config: Mapping[str, Any] | None = None, *, partial: bool = False
) -> Checkpoint:
    """A checkpoint with transformers' names under the names of Megatron core. Its arguments are the extra `ARGUMENTS`.

    Tables of the vocabulary have no padding: it is added when they are split over ranks. Raises the errors of `to_hf`.
    """
    description = by_config_alone(checkpoint, config)
    source = without(checkpoint, description.family.ignored)
    arguments = to_arguments(description.model.values, weights_dtype(source))
    reading = read(dialect("megatron").settings, arguments, "Megatron core")
    renamed = translated(source, description, "hf", "megatron", partial=partial)
    step = {} if source.origin.step is None else {"iteration": source.origin.step}
    return replace(
        renamed,
        notices=(*renamed.notices, *noted(description.model.values, reading, "Megatron core")),
        extras={
            legacy.VERSION: legacy.CURRENT,
            **step,
            **source.extras,
            ARGUMENTS: updated(source.extras.get(ARGUMENTS), arguments),
            CONFIG: dict(description.config),
        },
    )


def translated(
    source: Checkpoint, description: ModelDescription, old: str, new: str, *, partial: bool = False
) -> Checkpoint:
    """The checkpoint of a model with the names of dialect `old` under those of dialect `new`, in its order.

    `partial` allows missing tensors.

    Raises: UnsupportedError for tensors that the model does not have, IncompleteError for missing ones, CorruptError
    for shapes that are not those of the model.
    """
    model = description.model
    stored, new_tie = _without_tie(model, old, source), model.tie(new)
    wanted = [one for one in model.stored(new) if new_tie is None or new_tie.alias not in one.names]
    _check_known(source, {name for one in stored for name in one.names}, description.family)
    present, missing = _present(stored, source)
    changes = list(renames(model, present, wanted))
    if not partial:
        _check_there(source, missing)
    elif incomplete := [name for name in missing if _is_half(name, stored, present, wanted)]:
        _check_there(source, incomplete)
    new_names = {key: one.names[0] for one in wanted if not one.is_copy for key in one.keys}
    by_old = {name: new_names[one.keys[0]] for one in stored if not one.is_copy for name in one.names}
    return replace(
        apply_renames(source, changes, [one.names[0] for one in wanted]),
        aliases=_aliases(source, {**by_old, **_tied(model, old, new)}),
    )


def renames(model: Model, old: Mapping[str, ModelTensor], new: Sequence[ModelTensor]) -> Iterable[TensorRename]:
    """The renames from present tensors, by name, to those of another dialect. Those that share atoms are one rename.

    Tensors of which no atom is there are left out.
    """
    holders: dict[AtomKey, list[str]] = {}
    for name, one in old.items():
        for key in one.keys:
            holders.setdefault(key, []).append(name)
    groups: dict[str, _SharedAtoms] = {}
    for target in new:
        sources = dict.fromkeys(name for key in target.keys for name in holders.get(key, ()))
        if not sources or any(key not in holders for key in target.keys):
            continue
        merged = _SharedAtoms({}, [])
        for group in {id(groups[name]): groups[name] for name in sources if name in groups}.values():
            merged.old.update(group.old)
            merged.new.extend(group.new)
        merged.old.update(sources)
        merged.new.append(target)
        groups.update(dict.fromkeys(merged.old, merged))
    for group in {id(one): one for one in groups.values()}.values():
        names = tuple(group.old)
        make = _make(model, {name: old[name] for name in names}, group.new)
        yield TensorRename(names, tuple(one.names[0] for one in group.new), make)


def renames_between(model: Model, names: Iterable[str], old: str, new: str) -> tuple[TensorRename, ...]:
    """The renames of tensors with these names of dialect `old` that have others, or another form, in dialect `new`."""
    present = {name: one for one in model.stored(old) for name in one.names}
    changes = renames(model, {name: present[name] for name in names if name in present}, model.stored(new))
    return tuple(change for change in changes if change.old != change.new)


class _SharedAtoms:
    """Tensors that share atoms, while they are collected."""

    def __init__(self, old: dict[str, None], new: list[ModelTensor]) -> None:
        self.old, self.new = old, new


def _make(
    model: Model, old: Mapping[str, ModelTensor], new: Sequence[ModelTensor]
) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    def make(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        atoms: dict[AtomKey, list[Tensor]] = {}
        for (name, stored), tensor in zip(old.items(), tensors, strict=True):
            for atom, scope, part in _checked(name, partial(unpack, stored.packing, tensor, stored.scope, model.shape)):
                atoms.setdefault(key_of(atom, scope), []).append(part)
        # Copies of one tensor must be equal: this is compared whenever their values are read.
        merged = {key: with_replicas(parts) for key, parts in atoms.items()}
        return tuple(_checked(one.names[0], partial(_packed, model, one, merged)) for one in new)

    return make


def _checked(name: str, make: Callable[[], T]) -> T:
    """The result. An error of the tensor's shape or dtype names the tensor."""
    try:
        return make()
    except CorruptError as error:
        raise CorruptError(
            f"`{printable(name)}` {error.what}",
            hint="The configuration or the arguments contradict the tensors: name the right config.json with --config.",
        ) from error


def _packed(model: Model, one: ModelTensor, atoms: Mapping[AtomKey, Tensor]) -> Tensor:
    def get(atom: str, scope: Scope) -> Tensor:
        return atoms[key_of(atom, scope)]

    return pack(one.packing, one.scope, get, model.shape)


@cache
def _megatron_patterns() -> frozenset[str]:
    """The names of Megatron core, with `{}` for numbers, without those that other libraries have, too."""
    own = dialect("megatron")
    names = (
        (own.prefixes[place] if rule.place == "layer" else "") + name
        for rule in own.rules
        for name in rule.names
        for place in (("layer", "mtp") if rule.place == "layer" else ("model",))
    )
    return frozenset(_PLACEHOLDER.sub("{}", name) for name in names) - {_HEAD}


def _without_tie(model: Model, name: str, source: Checkpoint) -> tuple[ModelTensor, ...]:
    """The model's tensors. The second name of a tied tensor is included only if the source has the alias."""
    stored, tie = model.stored(name), model.tie(name)
    if tie is None:
        return stored
    if own := {tie.alias, _HEAD} & source.parameters.keys():
        raise UnsupportedError(
            f"`{own.pop()}` is a separate tensor, but the model's configuration ties it to the embeddings",
            where=source.path,
        )
    return tuple(one for one in stored if tie.alias not in one.names)


def _tied(model: Model, old: str, new: str) -> dict[str, str]:
    old_tie, new_tie = model.tie(old), model.tie(new)
    return {} if old_tie is None or new_tie is None else {old_tie.alias: new_tie.alias}


def _present(stored: Sequence[ModelTensor], source: Checkpoint) -> tuple[dict[str, ModelTensor], list[str]]:
    """The tensors of the source, by name, and the names of missing ones. Raises `UnsupportedError` for two of one."""
    present: dict[str, ModelTensor] = {}
    missing = []
    aliases = source.aliases.keys()
    for one in stored:
        names = [name for name in one.names if name in source.parameters]
        if len(names) > 1:
            raise UnsupportedError("two tensors of the source are the same tensor of the model, under two names")
        if names:
            present[names[0]] = one
        elif not one.is_copy and not aliases & set(one.names):
            missing.append(one.names[0])
    return present, missing


def _is_half(
    name: str, stored: Sequence[ModelTensor], present: Mapping[str, ModelTensor], new: Sequence[ModelTensor]
) -> bool:
    """Whether the missing tensor shares one of the other dialect with a tensor that is there."""
    keys = {key for one in stored if one.names[0] == name for key in one.keys}
    there = {key for one in present.values() for key in one.keys}
    return any(keys & set(one.keys) and there & set(one.keys) for one in new)


def _check_known(source: Checkpoint, known: set[str], family: Family) -> None:
    surplus = [
        name
        for name, parameter in source.parameters.items()
        if parameter.role != "extra" and name not in known and not family.others.fullmatch(name)
    ]
    if surplus:
        raise UnsupportedError(
            f"a model of the family {family.name} has no {list_names(surplus)}",
            where=source.path,
            hint="Leave them out with --skip, or name the right config.json with --config.",
        )


def _check_there(source: Checkpoint, missing: Sequence[str]) -> None:
    if missing:
        raise IncompleteError(
            f"tensors of the model are missing: {list_names(missing)}",
            where=source.path,
            hint="Is the configuration the model's own? Are files missing?",
        )


def _aliases(source: Checkpoint, new: Mapping[str, str]) -> dict[str, str]:
    """The aliases under the new names. Raises `UnsupportedError` for a name that the model does not have."""
    if strange := [name for pair in source.aliases.items() for name in pair if name not in new]:
        raise UnsupportedError(f"`{printable(strange[0])}` is tied, but is not a name of the model", where=source.path)
    return {new[alias]: new[name] for alias, name in source.aliases.items()}


def without(source: Checkpoint, computed: re.Pattern[str]) -> Checkpoint:
    """The checkpoint without tensors that models compute instead of loading them."""
    retained = {name: parameter for name, parameter in source.parameters.items() if not computed.fullmatch(name)}
    return source if len(retained) == len(source.parameters) else replace(source, parameters=retained)


def _padding(source: Checkpoint, model: Model) -> int:
    """The rows of padding in the tables of the vocabulary."""
    rows = [
        source.parameters[name].weight.shape[0]
        for one in model.stored("megatron")
        if one.keys[0][0] in ("embedding.tokens", "head.tokens")
        for name in one.names
        if name in source.parameters
    ]
    return max(rows, default=model.values["vocabulary"]) - int(model.values["vocabulary"])
