"""Model weights in safetensors: one file, or a folder of them with an index, as Hugging Face has them."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ckpt_formats.containers.safetensors import MAX_HEADER, is_natural, read_header
from ckpt_formats.containers.safetensors_shards import (
    SAFETENSORS_INDEX,
    SUFFIX,
    lost_states,
    read_weights,
    shard_paths,
    split_weights,
    weights_part,
    write_last,
    write_weights,
)
from ckpt_formats.containers.shard_index import index_text, numbered_names
from ckpt_formats.core.checkpoint import (
    MODEL,
    Checkpoint,
    FilePlan,
    Goal,
    Origin,
    OriginalForm,
    Parameter,
    ReadOptions,
    Receipt,
    WritableFormat,
)
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Value

INDEX = f"model{SAFETENSORS_INDEX}"
METADATA = {"format": "pt"}


class Safetensors(WritableFormat):
    name = "safetensors"
    summary = "model weights: a .safetensors file, or a folder of them with an index"

    def detect(self, path: Path) -> bool:
        if path.is_dir():
            return any(path.glob(f"*{SAFETENSORS_INDEX}")) or any(path.glob(f"*{SUFFIX}"))
        return path.name.endswith((SUFFIX, SAFETENSORS_INDEX)) and path.is_file()

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        found = read_weights(*shard_paths(path))
        single = path.name.endswith(SUFFIX) and path.is_file()
        if single and found.has_blocks:
            raise Unsupported(
                "holds blocks of tensors, as one rank of several writes them",
                where=path,
                hint=f"Name the folder: {printable(str(path.parent))}",
            )
        parameters = {name: Parameter(name, "parameter", {MODEL: tensor}) for name, tensor in found.tensors.items()}
        aliases = found.aliases()
        extras = {key: value for key, value in found.metadata.items() if key not in aliases}
        original = OriginalForm(self.name, path.name, partial(_form, path)) if single else None
        return Checkpoint(
            path,
            Origin("safetensors"),
            parameters,
            (),
            extras,
            aliases,
            found.shards,
            (),
            found.notices,
            original=original,
        )

    def plan(self, source: Checkpoint, goal: Goal) -> tuple[FilePlan, ...]:
        weights = [p for p in source.parameters.values() if p.role != "extra"]
        groups = split_weights(weights, goal.shard_nbytes if self.product(goal.target) is None else None)
        form = _form_of(source)
        header = form.get("header", 0)
        return tuple(
            weights_part(name, group, _metadata(source, group, form), header if is_natural(header, MAX_HEADER) else 0)
            for name, group in zip(numbered_names(len(groups)), groups, strict=True)
        )

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        return write_weights(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        if len(receipts) > 1:
            write_last(folder, INDEX, index_text((receipt.file, receipt.entry) for receipt in receipts))

    def product(self, target: Path) -> str | None:
        return f"model{SUFFIX}" if target.name.endswith(SUFFIX) else None

    def losses(self, source: Checkpoint, parts: Sequence[FilePlan]) -> tuple[str | Notice, ...]:
        lost = lost_states(source)
        kept = _metadata(source, (), _form_of(source))
        extras = [key for key in source.extras if key not in kept]
        return (*lost, Notice("extras", tuple(extras))) if extras else lost


def _form(path: Path) -> dict[str, Value]:
    """What is noted of a file: the keys of its metadata, what that says of the format, and where the data begins."""
    file = read_header(path)
    begins = min((raw.offset for raw in file.tensors.values()), default=file.nbytes)
    return {"metadata": list(file.metadata), "format": file.metadata.get("format"), "header": begins}


def _form_of(source: Checkpoint) -> Mapping[str, Value]:
    """What was noted of the file that a checkpoint once was; nothing, if it was something else."""
    original = source.original
    if original is None or original.form is None or original.format != Safetensors.name:
        return {}
    form = original.form()
    return form if isinstance(form, dict) else {}


def _metadata(source: Checkpoint, group: Sequence[Parameter], form: Mapping[str, Value]) -> dict[str, str]:
    """The metadata of a file with these tensors: as it was, where it was one of safetensors."""
    aliases = _aliases(source, group)
    if not isinstance(form.get("metadata"), list):
        return {**METADATA, **aliases}
    texts = {key: value for key, value in source.extras.items() if isinstance(value, str)}
    known = {"format": form.get("format"), **texts, **aliases}
    kept = {key: known.get(key) for key in form["metadata"] if isinstance(key, str)}
    return {key: value for key, value in kept.items() if isinstance(value, str)} | aliases


def _aliases(source: Checkpoint, group: Sequence[Parameter]) -> dict[str, str]:
    """Other names of tied tensors, where the ecosystem's own writer puts them: in the metadata."""
    names = {parameter.name for parameter in group}
    return {alias: name for alias, name in source.aliases.items() if name in names}
