"""Model weights in safetensors: one file, or a folder of files with an index, as Hugging Face writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckpt_formats.containers.safetensors import SUFFIX, is_safetensors, read_header
from ckpt_formats.containers.safetensors_shards import (
    OPTIMIZER_KEY,
    SAFETENSORS_INDEX,
    lost_states,
    read_weights,
    shard_paths,
    split_weights,
    weights_part,
    write_last,
    write_weights,
)
from ckpt_formats.containers.shard_index import index_text, numbered_names
from ckpt_formats.core.arguments import Positive
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Group, Origin, OriginalForm, Parameter
from ckpt_formats.core.claims import MAX_HEADER
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Value, is_natural

INDEX = f"model{SAFETENSORS_INDEX}"
METADATA = {"format": "pt"}


@dataclass(frozen=True, kw_only=True)
class Safetensors(WritableFormat):
    """Model weights in one .safetensors file, or in a folder of them with an index."""

    name = "safetensors"
    summary = "model weights: a .safetensors file, or a folder of them with an index"
    joins_ranks = False
    files_are_checkpoints = True

    shard_nbytes: Positive = 5 << 30
    """Bytes: about how large each file of a folder becomes."""
    single_file: bool = False
    """Write one file instead of a folder. A target that ends in .safetensors implies it."""
    with_optimizer: bool | None = None
    """Also write optimizer states, as tensors named such as `optimizer.exp_avg.NAME`: only in a single file. None:
    if the source was such a file."""

    def detect(self, path: Path) -> bool:
        if path.is_dir():
            return any(path.glob(f"*{SAFETENSORS_INDEX}")) or any(path.glob(f"*{SUFFIX}"))
        return path.is_file() and (path.name.endswith(SAFETENSORS_INDEX) or is_safetensors(path))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        single = path.is_file() and not path.name.endswith(SAFETENSORS_INDEX)
        weights = read_weights(*shard_paths(path), with_states=single)
        if single and weights.has_blocks:
            raise UnsupportedError(
                "has blocks of tensors: it is the file of one rank of several",
                where=path,
                hint=f"Name the folder: {printable(str(path.parent))}",
            )
        groups: tuple[Group, ...] = ()
        step = None
        if OPTIMIZER_KEY in weights.metadata:
            from ckpt_formats.state_dicts.states_beside_weights import parameters_of  # few files have states

            parameters, groups, step = parameters_of(weights.tensors, weights.metadata, path)
        else:
            parameters = {name: Parameter(name, "parameter", {MODEL: one}) for name, one in weights.tensors.items()}
        aliases = weights.aliases()
        extras = {key: value for key, value in weights.metadata.items() if key not in (*aliases, OPTIMIZER_KEY)}
        original = OriginalForm(self.name, path.name, partial(_form, path)) if single else None
        return Checkpoint(
            path=path,
            origin=Origin("safetensors", step=step),
            parameters=parameters,
            groups=groups,
            extras=extras,
            aliases=aliases,
            files=weights.shards,
            seals=(),
            notices=weights.notices,
            original=original,
        )

    def for_target(self, target: Path) -> WritableFormat:
        return replace(self, single_file=self.single_file or target.name.endswith(SUFFIX))

    def plan(self, source: Checkpoint) -> Plan:
        weights = [p for p in source.parameters.values() if p.role != "extra"]
        form, more = _form_of(source), dict[str, str]()
        with_states = self._writes_states(form)
        if with_states:
            if not self.single_file:
                raise UnsupportedError(
                    "optimizer states go into a single file of safetensors, not into a folder",
                    hint="End the target's name in .safetensors.",
                )
            from ckpt_formats.state_dicts.states_beside_weights import as_weights, metadata_of

            weights, form, more = list(as_weights(source)), {}, metadata_of(source)
        groups = split_weights(weights, None if self.single_file else self.shard_nbytes)
        header = form.get("header", 0)
        header = header if is_natural(header, MAX_HEADER) else 0
        files = tuple(
            weights_part(name, group, _metadata(source, group, form) | more, header)
            for name, group in zip(numbered_names(len(groups)), groups, strict=True)
        )
        dropped = _dropped(source, form, states=not with_states)
        return Plan(files, dropped, single_file=f"model{SUFFIX}" if self.single_file else None)

    def _writes_states(self, form: Mapping[str, Value]) -> bool:
        keys = form.get("metadata")
        as_before = self.single_file and isinstance(keys, list) and OPTIMIZER_KEY in keys
        return as_before if self.with_optimizer is None else self.with_optimizer

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        return write_weights(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        if len(receipts) > 1:
            write_last(folder, INDEX, index_text((receipt.file, receipt.entry) for receipt in receipts))


def _dropped(source: Checkpoint, form: Mapping[str, Value], states: bool) -> tuple[Notice, ...]:
    """Notices of the items of the source that files of weights cannot hold. `states`: among them are its states."""
    stored = _metadata(source, (), form)
    extras = tuple(key for key in source.extras if key not in stored)
    dropped = lost_states(source) if states else ()
    return (*dropped, Notice("extras", extras)) if extras else dropped


def _form(path: Path) -> dict[str, Value]:
    """What is noted about a file: the keys of its metadata, their `format`, and the byte at which the data begins."""
    file = read_header(path)
    begins = min((raw.offset for raw in file.tensors.values()), default=file.nbytes)
    return {"metadata": list(file.metadata), "format": file.metadata.get("format"), "header": begins}


def _form_of(source: Checkpoint) -> Mapping[str, Value]:
    """What was noted about the original file of a checkpoint; empty if it was of another format."""
    original = source.original
    if original is None or original.form is None or original.format != Safetensors.name:
        return {}
    form = original.form()
    return form if isinstance(form, dict) else {}


def _metadata(source: Checkpoint, group: Sequence[Parameter], form: Mapping[str, Value]) -> dict[str, str]:
    """The metadata of a file with these tensors: that of the original file, if it was one of safetensors."""
    aliases = _aliases(source, group)
    if not isinstance(form.get("metadata"), list):
        return {**METADATA, **aliases}
    texts = {key: value for key, value in source.extras.items() if isinstance(value, str)}
    known = {"format": form.get("format"), **texts, **aliases}
    metadata = {key: known.get(key) for key in form["metadata"] if isinstance(key, str)}
    return {key: value for key, value in metadata.items() if isinstance(value, str)} | aliases


def _aliases(source: Checkpoint, group: Sequence[Parameter]) -> dict[str, str]:
    """The other names of tied tensors, which transformers too stores in the metadata."""
    names = {parameter.name for parameter in group}
    return {alias: name for alias, name in source.aliases.items() if name in names}
