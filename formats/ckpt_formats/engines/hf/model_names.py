"""What a model's tensors are called in its own library, whatever wrapped the model when it was saved."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.names import ExpertStack, Table, Tie, table_for
from ckpt_formats.names.renames import TensorRename, apply_renames
from ckpt_formats.names.transforms import TRANSFORMS, ModelSizes
from ckpt_formats.names.views import unstacked

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What PyTorch puts before the names of a module that it compiles, checkpoints or cuts, at any depth."""
_PREFIXES = ("module.", "model.", "base_model.", *_WRAPPERS)
"""What those that hold a model put before all of its names."""
_NO_SIZES = ModelSizes(heads=1, groups=1, vocabulary=0)
"""Of transforms that ask for none."""


@dataclass(frozen=True)
class NameMatch:
    """How each tensor of a checkpoint is to be called, and what does not fit the model."""

    names: Mapping[str, str]
    """By the name that it has now."""
    known: bool
    """Whether there is a table of the model's names."""
    stacks: Mapping[str, ExpertStack] = field(default_factory=dict)
    """Tensors that are not as files have them, by the new name, if the names are those of the running model."""
    missing: tuple[str, ...] = ()
    surplus: tuple[str, ...] = ()
    tie: Tie | None = None
    """The model's tied names, of which files hold one; None also where that is not known."""


def match_names(names: Iterable[str], config: Mapping[str, Any] | None) -> NameMatch:
    """The names of the model that the configuration describes.

    They change only if the changed ones fit the model and the old do not.
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
    """The checkpoint under the names that the model's files have, with all its states; stacks of experts taken apart.

    Raises `Unsupported` for a stack that is none.
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
    """What a tensor of a running model is in files. Raises `Unsupported` if it is not the stack that it should be."""
    tensors = (tensor,) if stack.experts is None else unstacked(tensor, stack.experts)
    return tuple(file_tensor for part in tensors for file_tensor in TRANSFORMS[stack.how].split(part, _NO_SIZES))


def _rename_of(old: str, new: str, stack: ExpertStack | None) -> TensorRename:
    if stack is None:
        return TensorRename((old,), (new,), tuple)
    return TensorRename((old,), stack.files, lambda tensors: as_in_files(tensors[0], stack))


def _renamings(names: list[str]) -> Iterator[dict[str, str]]:
    """Ways to call the tensors: as they are, then with less and less before their names. No two are called alike."""
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
    """Names that the model lacks, and names that it has no use for. Without its head it may lack the prefix, too."""
    present = set(names)
    wanted = list(expected)
    if present and not any(name.startswith(table.base_prefix) for name in present):
        wanted = [name.removeprefix(table.base_prefix) for name in wanted]
    optional = {tie.alias} if tie else set()
    missing = tuple(name for name in wanted if name not in present and name not in optional)
    surplus = tuple(sorted(name for name in present - set(wanted) if not table.ignored.fullmatch(name)))
    return missing, surplus
