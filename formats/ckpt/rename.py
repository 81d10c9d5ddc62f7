"""Rename a checkpoint's tensors: to the names that the user chooses, or to those that a format needs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_formats.core.arguments import StrPath, checked
from ckpt_formats.core.checkpoint import Checkpoint, Edit
from ckpt_formats.core.claims import MAX_NEW_NAME
from ckpt_formats.core.edits import edited
from ckpt_formats.core.errors import NoMatchError, RulesError, UnsafeError, UnsupportedError
from ckpt_formats.core.format import Naming, WritableFormat
from ckpt_formats.core.name_patterns import MAX_PATTERN, backtracking, search
from ckpt_formats.core.quantised.weights import may_have_quantised_states
from ckpt_formats.core.rules import safe_pattern
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record
from ckpt_formats.stores.location import source_path

_MEGATRON = ("megatron", "megatron-legacy")
_CUTS_STATES = (*_MEGATRON, "deepspeed", "deepspeed-universal")
"""Formats that divide or flatten each state as its weight."""


@dataclass(frozen=True)
class UseNames(Edit):
    """All tensors under the names of one library."""

    naming: Naming
    config: Mapping[str, Any] | None = None
    """The configuration that the user gave; None: that of the checkpoint, whose files are known."""
    allow_rounding: bool = False


def rename_by(
    source: Checkpoint, patterns: Sequence[tuple[str, str]] = (), strip_prefix: str = "", add_prefix: str = ""
) -> Checkpoint:
    """The checkpoint under names that are changed in this order: a prefix is removed, patterns are replaced, a prefix
    is added. Lazy.

    `patterns` are pairs of a regular expression, searched anywhere in a name, and what stands in its place, with `\\1`
    for its first group. Raises `NoMatchError` for a prefix or pattern that fits no name, `RulesError` for no regular
    expression, `UnsupportedError` if two parameters would get the same name.
    """
    names = {name: name for name in (*source, *source.aliases)}
    if strip_prefix:
        if not any(name.startswith(strip_prefix) for name in names.values()):
            raise _no_name(f"begins with `{printable(strip_prefix)}`", "--strip-prefix")
        names = {old: name.removeprefix(strip_prefix) for old, name in names.items()}
    for pattern, replacement in patterns:
        names = _replaced(names, pattern, replacement)
    names = {old: f"{add_prefix}{name}" for old, name in names.items()}
    if empty := next((old for old, name in names.items() if not name), None):
        raise RulesError(f"nothing would be left of the name `{printable(empty)}`", where=source.path)
    return source.rename(names)


def _replaced(names: Mapping[str, str], pattern: str, replacement: str) -> dict[str, str]:
    safe_pattern(pattern, "--rename")
    if not any(search(pattern, name) for name in names.values()):
        raise _no_name(f"matches `{printable(pattern)}`", "--rename")
    if len(replacement) > MAX_PATTERN:
        raise UnsafeError(f"a replacement of {len(replacement):,} characters", where="--rename")
    compiled = backtracking(pattern, max(map(len, names.values())))
    try:
        return {old: _with_replacement(compiled, replacement, name) for old, name in names.items()}
    except (re.error, IndexError) as error:
        text = f"`{printable(replacement)}` cannot stand in place of `{printable(pattern)}`: {error}"
        raise RulesError(text, where="--rename", hint=r"Groups of the pattern are \1, \2, ...") from None


def _with_replacement(pattern: re.Pattern[str], replacement: str, name: str) -> str:
    """The name with all matches replaced. Raises `UnsafeError` as soon as it becomes too long."""
    room = MAX_NEW_NAME - len(name)

    def replaced(match: re.Match[str]) -> str:
        nonlocal room
        text = match.expand(replacement)
        room -= len(text) - len(match[0])
        if room < 0:
            raise UnsafeError(
                f"the new name of `{printable(name[:80])}` would have more than {MAX_NEW_NAME:,} characters",
                where="--rename",
            )
        return text

    return pattern.sub(replaced, name)


def _no_name(what: str, option: str) -> NoMatchError:
    return NoMatchError(f"no parameter's name {what}", where=option, hint="`ckpt inspect` lists their names.")


@checked
def use_names(
    source: Checkpoint, naming: Naming, config: StrPath | None = None, *, allow_rounding: bool = False
) -> Checkpoint:
    """The checkpoint under other names, its tensors split and joined as those names need it. Lazy.

    `config` is the model's configuration, or the folder that holds it; None: what came with the source.
    `allow_rounding`: round weights, and their moments, that MaxText stores scaled by no power of two, or with one
    added. Raises `CkptError` of the kind that fits for a model that cannot have these names.
    """
    from ckpt_formats.names.nemo import from_nemo
    from ckpt_formats.names.translate import naming_of

    known_config = _configuration(source, None if config is None else source_path(config))
    named = from_nemo(source, with_arguments=known_config is None)
    renamed = _renamed(named, naming_of(named), naming, known_config, allow_rounding=allow_rounding)
    return edited(renamed, UseNames(naming, None if config is None else known_config, allow_rounding))


def prepare(source: Checkpoint, format: WritableFormat) -> Checkpoint:
    """The source under the names that the format needs, unless the user has chosen names. Lazy.

    Raises `CkptError` of the kind that fits for a model that cannot have these names.
    """
    _check_states(source, format)
    if format.naming is None or any(isinstance(edit, UseNames) for edit in source.history):
        return source
    # Imported only here: it loads the tables of many models.
    from ckpt_formats.names.nemo import from_nemo
    from ckpt_formats.names.translate import naming_of

    path = next(iter(format.input_files()), None)
    config = _configuration(source, path)
    named = from_nemo(source, with_arguments=config is None)
    current = naming_of(named)
    needed = _needed(named, current, format.naming, config, path is not None)
    return named if needed is None else _renamed(named, current, needed, config)


def _check_states(source: Checkpoint, format: WritableFormat) -> None:
    """Raise `UnsupportedError` for quantised states in a format that cuts states: their scales are of flat blocks."""
    if format.name not in _CUTS_STATES or not may_have_quantised_states(source):
        return
    from ckpt_formats.core.quantised.states import quantised_states  # other optimizers need no codecs

    if states := quantised_states(source):
        raise UnsupportedError(
            f"`{printable(states[0].name)}` of `{printable(states[0].parameter)}` is quantised ({states[0].scheme}): "
            f"{format.name} has no such states",
            where=source.path,
            hint="--dtype fp32 writes plain states, --model-only none.",
        )


def _configuration(source: Checkpoint, path: Path | None) -> Mapping[str, Any] | None:
    from ckpt_formats.engines.hf.side_files import config_of
    from ckpt_formats.engines.hf.write import files_of_model
    from ckpt_formats.names.config import CONFIG

    return config_of(source.extras, CONFIG) if path is None else config_of(files_of_model(path))


def _renamed(
    source: Checkpoint,
    current: Naming | None,
    naming: Naming,
    config: Mapping[str, Any] | None,
    *,
    allow_rounding: bool = False,
) -> Checkpoint:
    from ckpt_formats.engines.hf.model_names import with_model_names
    from ckpt_formats.names.legacy import to_core, to_legacy
    from ckpt_formats.names.translate import NATIVE, to_hf, to_megatron

    partial = source.is_partial
    if current == naming and naming in ("gguf", *NATIVE):
        if naming != "maxtext" or partial:
            return source
        from ckpt_formats.names.native import with_scanned_layers

        return with_scanned_layers(source, config)
    if current in NATIVE:
        from ckpt_formats.names.native import from_native

        source = from_native(source, current, config, partial=partial, allow_rounding=allow_rounding)
        current = "hf"
    if current == "gguf":
        from ckpt_formats.names.llama_cpp import from_llama_cpp

        source, current = from_llama_cpp(source, config, partial=partial), "hf"
        config = _configuration(source, None)
    is_megatron = current in _MEGATRON
    if naming in ("hf", "gguf", *NATIVE) and is_megatron:
        named = to_hf(source, config, partial=partial)
    else:
        named = source if is_megatron or config is None else with_model_names(source, config)
    if naming == "hf":
        return named
    if naming == "gguf":
        from ckpt_formats.names.llama_cpp import to_llama_cpp

        return to_llama_cpp(named, config, partial=partial)
    if naming in NATIVE:
        from ckpt_formats.names.native import to_native

        return to_native(named, naming, config, partial=partial, allow_rounding=allow_rounding)
    megatron = named if is_megatron else to_megatron(named, config, partial=partial)
    return to_legacy(megatron) if naming == "megatron-legacy" else to_core(megatron)


def _needed(
    source: Checkpoint, current: Naming | None, naming: Naming, config: Mapping[str, Any] | None, chosen: bool
) -> Naming | None:
    """The names that the format needs, if they differ from the current ones and can be derived; else None."""
    from ckpt_formats.names.arguments import ARGUMENTS
    from ckpt_formats.names.tables import family_of
    from ckpt_formats.names.translate import GGUF_VALUES, NATIVE

    if "gguf" in (current, naming):
        # The names of an architecture that is not known stay as they are.
        is_unknown = current is None and isinstance(source.extras.get(GGUF_VALUES), dict)
        return None if current == naming or is_unknown else naming
    known = config is not None and family_of(config) is not None
    if naming == "hf":
        translatable = chosen or known or isinstance(source.extras.get(ARGUMENTS), Record)
        return "hf" if current in (*_MEGATRON, *NATIVE) and translatable else None
    return "megatron" if current not in _MEGATRON and known else None
