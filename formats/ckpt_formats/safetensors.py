"""Model weights in safetensors: one file, or a folder of them with an index, as Hugging Face has them."""

from collections.abc import Sequence
from pathlib import Path

from ckpt_formats.base import MODEL, Checkpoint, Goal, Options, Origin, Parameter, Part, Receipt, WritableFormat
from ckpt_formats.safetensors_shards import (
    SAFETENSORS_INDEX,
    SUFFIX,
    cut,
    listed,
    lost_states,
    read_weights,
    weights_part,
    write_last,
    write_weights,
)
from ckpt_formats.shard_index import index_text, numbered_names
from ckpt_formats.transfer import Transfer

INDEX = f"model{SAFETENSORS_INDEX}"
METADATA = {"format": "pt"}


class Safetensors(WritableFormat):
    name = "safetensors"
    summary = "model weights: a .safetensors file, or a folder of them with an index"

    def detect(self, path: Path) -> bool:
        if path.is_dir():
            return any(path.glob(f"*{SAFETENSORS_INDEX}")) or any(path.glob(f"*{SUFFIX}"))
        return path.name.endswith((SUFFIX, SAFETENSORS_INDEX)) and path.is_file()

    def read(self, path: Path, options: Options) -> Checkpoint:
        found = read_weights(*listed(path))
        parameters = {name: Parameter(name, "parameter", {MODEL: tensor}) for name, tensor in found.tensors.items()}
        aliases = found.aliases()
        extras = {key: value for key, value in found.metadata.items() if key not in aliases}
        return Checkpoint(path, Origin("safetensors"), parameters, (), extras, aliases, found.shards)

    def plan(self, source: Checkpoint, goal: Goal) -> tuple[Part, ...]:
        weights = [p for p in source.parameters.values() if p.role != "extra"]
        groups = cut(weights, goal.shard_nbytes if self.product(goal.target) is None else None)
        return tuple(
            weights_part(name, group, {**METADATA, **_aliases(source, group)})
            for name, group in zip(numbered_names(len(groups)), groups, strict=True)
        )

    def write(self, folder: Path, part: Part, transfer: Transfer) -> Receipt:
        return write_weights(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        if len(receipts) > 1:
            write_last(folder, INDEX, index_text((receipt.file, receipt.entry) for receipt in receipts))

    def product(self, target: Path) -> str | None:
        return f"model{SUFFIX}" if target.name.endswith(SUFFIX) else None

    def losses(self, source: Checkpoint, parts: Sequence[Part]) -> tuple[str, ...]:
        lost = lost_states(source)
        return (*lost, f"extras ({', '.join(source.extras)})") if source.extras else lost


def _aliases(source: Checkpoint, group: Sequence[Parameter]) -> dict[str, str]:
    """Other names of tied tensors, where the ecosystem's own writer puts them: in the metadata."""
    names = {parameter.name for parameter in group}
    return {alias: name for alias, name in source.aliases.items() if name in names}
