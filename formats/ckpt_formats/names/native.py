"""Models under the names of libraries whose checkpoints state no model: TorchTitan's, Meta's and MaxText's; and back.

`dialects/torchtitan.toml`, `meta.toml` and `maxtext.toml` have the names, and the families of which they are known.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.tensor import with_replicas
from ckpt_formats.names.config import CONFIG
from ckpt_formats.names.describe import ModelDescription, by_config_alone, check_further_tokens, of_present
from ckpt_formats.names.scaled import Scaling, scaled, scalings
from ckpt_formats.names.scanned import ALL, Scan, are_scanned, one_by_one, scan_of, scanned
from ckpt_formats.names.tables import Dialect, changed_dialect, dialect
from ckpt_formats.names.translate import NATIVE, translated, without

MAXTEXT = "maxtext"
"""The names of which layers may be scanned, and are when they are written."""
_COMPUTED = re.compile(r"rope\.freqs|freqs_cis")
"""Tensors that old files have, although all versions compute them."""


def to_native(
    source: Checkpoint,
    name: str,
    config: Mapping[str, Any] | None = None,
    *,
    partial: bool = False,
    allow_rounding: bool = False,
) -> Checkpoint:
    """A checkpoint with transformers' names under those of a library: one of `NATIVE`.

    `config` is the model's configuration; by default it is the checkpoint's own. `partial` allows missing tensors,
    `allow_rounding` weights that the library stores rounded.

    Raises: UnsupportedError for a model whose names are not known or whose weights would be rounded, IncompleteError or
    CorruptError for tensors that are missing or contradict the configuration.
    """
    description = by_config_alone(source, config)
    family = description.family
    if family.name not in dialect(name).other["families"]:
        known = ", ".join(dialect(name).other["families"])
        raise UnsupportedError(
            f"the names of models of the family {family.name} in {name} are not known",
            hint=f"ckpt knows them in {known}.",
        )
    own = without(source, family.ignored)
    if name == MAXTEXT:
        check_further_tokens(description.model.values, source, "MaxText")
        scan = _scan(description)  # it refuses models before values are scaled
        own = scaled(own, _scalings(description), "MaxText", back=False, allow_rounding=allow_rounding)
    renamed = translated(own, _with_names(description, name), "hf", name, partial=partial)
    if name == MAXTEXT:
        renamed = scanned(renamed, scan)
    return replace(renamed, extras={**source.extras, CONFIG: dict(description.config)})


def from_native(
    source: Checkpoint,
    name: str,
    config: Mapping[str, Any] | None = None,
    *,
    partial: bool = False,
    allow_rounding: bool = False,
) -> Checkpoint:
    """A checkpoint with the names of a library under those of transformers. Raises as `to_native`."""
    description = by_config_alone(source, config, None)
    family = description.family.name
    known = next(
        (one for one in ((name,) if name == MAXTEXT else (name, *NATIVE)) if family in dialect(one).other["families"]),
        None,
    )
    if known is None:
        raise UnsupportedError(f"the names of models of the family {family} in {name} are not known", where=source.path)
    if name == MAXTEXT:
        source = one_by_one(source, _scan(description))
    named = of_present(_with_names(description, known), known, source)
    renamed = translated(_with_one_head(without(source, _COMPUTED), named, known), named, known, "hf", partial=partial)
    if name == MAXTEXT:
        renamed = scaled(renamed, _scalings(description), "MaxText", back=True, allow_rounding=allow_rounding)
    return replace(renamed, extras={**source.extras, CONFIG: dict(description.config)})


def with_scanned_layers(source: Checkpoint, config: Mapping[str, Any] | None) -> Checkpoint:
    """A checkpoint with MaxText's names, in which layers are scanned, as `to_native` returns them. Lazy.

    Raises: UnsupportedError for a model whose names are not known, or whose layers cannot be scanned, IncompleteError
    for layers one by one, or biases where earlier versions have them, without a configuration.
    """
    if are_scanned(source, {name for own in dialect(MAXTEXT).other["collections"].values() for name in own}):
        return source
    scan = _scan(by_config_alone(source, config, None))
    return scanned(one_by_one(source, scan), scan)


def _with_one_head(source: Checkpoint, description: ModelDescription, name: str) -> Checkpoint:
    """The checkpoint with one tensor for a tied head that was saved twice. Both are compared when they are read."""
    tie = description.model.tie(name)
    if tie is None or source.aliases:
        return source
    names = {other for one in description.model.stored(name) if tie.alias in one.names for other in one.names}
    heads = names & source.parameters.keys()
    embedding = source.parameters.get(tie.name)
    if len(heads) != 1 or embedding is None:
        return source
    (head,) = heads
    if source.parameters[head].states.keys() != {MODEL}:
        return source  # refused: it was trained as a tensor of its own
    states = {**embedding.states, MODEL: with_replicas([embedding.weight, source.parameters[head].weight])}
    parameters = {key: one for key, one in source.parameters.items() if key != head}
    groups = tuple(replace(one, names=tuple(n for n in one.names if n != head)) for one in source.groups)
    return replace(source, parameters={**parameters, tie.name: replace(embedding, states=states)}, groups=groups)


def _with_names(description: ModelDescription, name: str) -> ModelDescription:
    values = description.model.values
    own = {**description.family.dialects, name: _names_of(name, description.family.name, values["rope_type"])}
    return replace(description, model=replace(description.model, dialects=own))


@cache
def _names_of(name: str, family: str, rope_type: str | None) -> Dialect:
    """The dialect with the names of a family, of which some may depend on how its positions are computed."""
    base = dialect(name)
    names = base.other["families"][family]
    return changed_dialect(base, name, {"names": {**names, **names.get("rope_type", {}).get(rope_type, {})}})


def _scan(description: ModelDescription) -> Scan:
    values = description.model.values
    kind = dialect(MAXTEXT).other["scans"].get(description.family.name, ALL)
    collections = dialect(MAXTEXT).other["collections"].get(description.family.name, {})
    return scan_of(kind, values["layers"], values["moe_layers"], collections)


def _scalings(description: ModelDescription) -> dict[str, Scaling]:
    return scalings(description.model, dialect(MAXTEXT).other["scales"].get(description.family.name, {}))
