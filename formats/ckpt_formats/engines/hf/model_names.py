"""Find the names of a model's tensors in its own library: without the prefixes of modules that wrapped it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.views import split_stack
from ckpt_formats.names.renames import TensorRename, apply_renames
from ckpt_formats.names.table import ExpertStack, Table, Tie
from ckpt_formats.names.tables import table_for
from ckpt_formats.names.transforms import TRANSFORMS, ModelSizes

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Prefixes that PyTorch inserts, at any depth, for modules that it compiles, checkpoints or shards."""
_PREFIXES = ("module.", "model.", "base_model.", *_WRAPPERS)
"""Prefixes that a module around the model adds to all names."""
_NO_SIZES = ModelSizes(heads=1, groups=1, vocabulary=0)
"""Placeholder for transforms that do not use sizes."""


@dataclass(frozen=True)
class NameMatch:
    """The new name of each tensor, and the differences between the tensors and the model."""

    names: Mapping[str, str]
    """The new names, by present name."""
    known: bool
    """True if there is a table of the model's names."""
    stacks: Mapping[str, ExpertStack] = field(default_factory=dict)
    """Tensors with another form than in files, by new name, if the names are those of a model in memory."""
    missing: tuple[str, ...] = ()
    surplus: tuple[str, ...] = ()
    tie: Tie | None = None
    """The model's tied names, of which files have one; None if there are none or this is not known."""


def match_names(names: Iterable[str], config: Mapping[str, Any] | None) -> NameMatch:
    """The names of the model that the configuration describes.

    Names change only if the new names fit the model and the old ones do not.
    """
    given = list(names)
    same = {name: name for name in given}
    table = table_for(config or {})
    expected = table.expected_names(config) if table and config else None
    if table is None or config is None or expected is None or "quantization_config" in config:
        return NameMatch(same, False)
    tie = table.tie(config)
    stacks = {stack.name: stack for stack in table.stacks(config)}
    in_files = {file for stack in stacks.values() for file in stack.files}
    running = [*(name for name in expected if name not in in_files), *stacks]
    for renamed in _renamings(given):
        if not any(_unfit(renamed.values(), expected, table, tie)):
            return NameMatch(renamed, True, tie=tie)
        if stacks and not any(_unfit(renamed.values(), running, table, tie)):
            return NameMatch(renamed, True, stacks, tie=tie)
    missing, surplus = _unfit(same.values(), expected, table, tie)
    return NameMatch(same, True, {}, missing, surplus, tie)


def with_model_names(source: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint under the names in the model's files, with all states. Stacks of experts are divided.

    Raises `UnsupportedError` for a stack with an unexpected shape.
    """
    own = [name for name, parameter in source.parameters.items() if parameter.role != "extra"]
    match = match_names([*own, *source.aliases], config)
    new = match.names
    changes = [_rename_of(name, new[name], match.stacks.get(new[name])) for name in own]
    if all(change.old == change.new for change in changes):
        return source
    aliases = {new.get(alias, alias): new.get(name, name) for alias, name in source.aliases.items()}
    return replace(apply_renames(source, changes), aliases=aliases)


def as_in_files(tensor: Tensor, stack: ExpertStack) -> tuple[Tensor, ...]:
    """The tensors in files for a tensor of a model in memory. Raises `UnsupportedError` for an unexpected shape."""
    tensors = (tensor,) if stack.experts is None else split_stack(tensor, stack.experts)
    return tuple(file_tensor for part in tensors for file_tensor in TRANSFORMS[stack.transform].split(part, _NO_SIZES))


def _rename_of(old: str, new: str, stack: ExpertStack | None) -> TensorRename:
    if stack is None:
        return TensorRename((old,), (new,), tuple)
    return TensorRename((old,), stack.files, lambda tensors: as_in_files(tensors[0], stack))


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
    names: Iterable[str], expected: Iterable[str], table: Table, tie: Tie | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(missing names, surplus names). A model without its head may also have no prefix."""
    present = set(names)
    needed = list(expected)
    if present and not any(name.startswith(table.base_prefix) for name in present):
        needed = [name.removeprefix(table.base_prefix) for name in needed]
    optional = {tie.alias} if tie else set()
    missing = tuple(name for name in needed if name not in present and name not in optional)
    surplus = tuple(sorted(name for name in present - set(needed) if not table.ignored.fullmatch(name)))
    return missing, surplus
