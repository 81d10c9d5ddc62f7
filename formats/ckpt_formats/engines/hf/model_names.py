"""Find the names of a model's tensors in its own library: without the prefixes of modules that wrapped it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.names.config import ConfiguredModel, configured_model
from ckpt_formats.names.model import Tie
from ckpt_formats.names.renames import TensorRename, apply_renames
from ckpt_formats.names.translate import renames_between

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Prefixes that PyTorch inserts, at any depth, for modules that it compiles, checkpoints or shards."""
_PREFIXES = ("module.", "model.", "base_model.", *_WRAPPERS)
"""Prefixes that a module around the model adds to all names."""


@dataclass(frozen=True)
class NameMatch:
    """The new name of each tensor, and the differences between the tensors and the model."""

    names: Mapping[str, str]
    """The new names, by present name."""
    known: bool
    """True if the model's family is known."""
    in_files: tuple[TensorRename, ...] = ()
    """From the new names to those in files, if the new names are those of a model in memory."""
    missing: tuple[str, ...] = ()
    surplus: tuple[str, ...] = ()
    tie: Tie | None = None
    """The model's tied names, of which files have one; None if there are none or this is not known."""
    configured: ConfiguredModel | None = None
    """The model that the configuration describes; None if it is not known."""


def match_names(names: Iterable[str], config: Mapping[str, Any] | None) -> NameMatch:
    """The names of the model that the configuration describes.

    Names change only if the new names fit the model and the old ones do not.
    """
    given = list(names)
    same = {name: name for name in given}
    configured = configured_model(config)
    expected = None if configured is None else configured.names("hf")
    if configured is None or config is None or expected is None:
        return NameMatch(same, False)
    tie = configured.tie
    if "quantization_config" in config:  # codes and scales have other names than the model's tensors
        return NameMatch(same, False, tie=tie)
    running = configured.names("hf_memory")
    for renamed in _renamings(given):
        expected = configured.names("hf", set(renamed.values())) or ()
        if not any(_unfit(renamed.values(), expected, configured, tie)):
            return NameMatch(renamed, True, tie=tie, configured=configured)
        if running not in (None, expected) and not any(_unfit(renamed.values(), running or (), configured, tie)):
            changes = renames_between(configured.model, renamed.values(), "hf_memory", "hf")
            return NameMatch(renamed, True, changes, tie=tie, configured=configured)
    expected = configured.names("hf", set(given)) or ()
    missing, surplus = _unfit(same.values(), expected, configured, tie)
    return NameMatch(same, True, (), missing, surplus, tie, configured)


def with_model_names(source: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint under the names in the model's files, with all states. Stacks of experts are divided.

    Raises `CorruptError` for a stack with an unexpected shape.
    """
    own = [name for name, parameter in source.parameters.items() if parameter.role != "extra"]
    match = match_names([*own, *source.aliases], config)
    new = match.names
    old_names = {name: old for old, name in new.items()}
    in_memory = {name for change in match.in_files for name in change.old}
    changes = [TensorRename((name,), (new[name],), tuple) for name in own if new[name] not in in_memory]
    changes += [replace(change, old=tuple(old_names[name] for name in change.old)) for change in match.in_files]
    if all(change.old == change.new for change in changes):
        return source
    aliases = {new.get(alias, alias): new.get(name, name) for alias, name in source.aliases.items()}
    return replace(apply_renames(source, changes), aliases=aliases)


def _renamings(names: list[str]) -> Iterator[dict[str, str]]:
    """Candidate names, by present name: first unchanged, then with more and more prefixes removed. They are unique."""
    yield {name: name for name in names}
    short = {name: re.sub("|".join(map(re.escape, _WRAPPERS)), "", name) for name in names}
    while len(set(short.values())) == len(names):
        yield short
        common = next((p for p in _PREFIXES if names and all(name.startswith(p) for name in short.values())), None)
        if common is None:
            return
        short = {name: long_name.removeprefix(common) for name, long_name in short.items()}


def _unfit(
    names: Iterable[str], expected: Iterable[str], configured: ConfiguredModel, tie: Tie | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(missing names, surplus names). A model without its head may also have no prefix."""
    present, family = set(names), configured.family
    needed = list(expected)
    if present and not any(name.startswith(family.base_prefix) for name in present):
        needed = [name.removeprefix(family.base_prefix) for name in needed]
    optional = {tie.alias} if tie else set()
    missing = tuple(name for name in needed if name not in present and name not in optional)
    allowed = re.compile(f"{family.ignored.pattern}|{family.others.pattern}")
    surplus = tuple(sorted(name for name in present - set(needed) if not allowed.fullmatch(name)))
    return missing, surplus
