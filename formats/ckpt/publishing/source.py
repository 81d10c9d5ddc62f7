"""What is published of a checkpoint: the tensors and files that `convert` to a folder of a model would write."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from ckpt.pipeline import check_complete, check_not_suspicious
from ckpt.publishing.rank_buffers import RankBuffers
from ckpt.rename import prepare
from ckpt_formats.core.arguments import StrPath
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.chunking import DEFAULT_ELEMENTS
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.tensor import Array, Tensor, checked_read
from ckpt_formats.engines.hf import HuggingFace
from ckpt_formats.engines.hf.side_files import config_of
from ckpt_formats.engines.hf.write import ADAPTER, files_of_source
from ckpt_formats.engines.safetensors import Safetensors
from ckpt_formats.state_dicts.run_files import SideFile
from ckpt_formats.stores.location import source_path
from ckpt_formats.universal.boxes.table import BoxPlace
from ckpt_formats.universal.published.model import (
    MAX_FILE,
    PublishedModel,
    PublishedTensor,
    TensorPiece,
    is_file_name,
    model_digest,
)
from ckpt_formats.universal.published.records import ObjectRef

Names = Literal["hf", "as-is"]
"""Under which names tensors are published: those of Hugging Face's libraries, or those of the checkpoint."""
SHARE_NBYTES = 256 << 20
"""Bytes of values of one object, if one process publishes all: it has two copies of so many bytes in memory."""
_MAX_NBYTES = 4 * SHARE_NBYTES
"""Bytes of values of one rank that has published before, up to which one process takes its place."""


@dataclass(frozen=True, eq=False)
class ExportedModel:
    """The tensors and files that are published of a checkpoint. Nothing is read of the tensors."""

    checkpoint: Checkpoint
    """The checkpoint under the published names."""
    tensors: tuple[Tensor, ...]
    """In the order of the model."""
    files: Mapping[str, bytes]
    """The files of the model, such as `config.json`."""
    model: PublishedModel
    notices: tuple[Notice, ...]
    """What the user should know, and what of the checkpoint is not published."""

    __repr__ = short_repr

    def blocks(self, rank: int, piece: int, values: Array) -> Iterator[tuple[Tensor, Array]]:
        """The parts of a tensor that a piece has, each with its elements among `values`: (size,) of its dtype."""
        one = self.model.pieces[rank][piece]
        tensor, at = self.tensors[one.tensor], 0
        for box in one.place.boxes():
            yield (
                tensor if box.shape == tensor.shape else tensor.crop(box),
                values[at : at + box.size].reshape(box.shape),
            )
            at += box.size

    def divided_as(self, other: PublishedModel) -> "ExportedModel":
        """The source, divided among the ranks of another model, if that has the same tensors and no rank is too large.

        So a delta can be coded against a state that several ranks have published.
        """
        ranks = range(len(other.pieces))
        if model_digest(self.model) != model_digest(other) or any(
            RankBuffers.nbytes_of(other, rank) > _MAX_NBYTES for rank in ranks
        ):
            return self
        weights = {one.name: weight for one, weight in zip(self.model.tensors, self.tensors, strict=True)}
        model = PublishedModel(other.tensors, other.pieces, self.model.files, self.model.aliases)
        return replace(self, tensors=tuple(weights[one.name] for one in other.tensors), model=model)


def exported_model(
    checkpoint: Checkpoint,
    names: Names = "hf",
    dtype: str | None = None,
    config: StrPath | None = None,
    is_signed: bool = False,
) -> ExportedModel:
    """What is published of a checkpoint.

    Args:
        checkpoint: The checkpoint, of any format.
        names: Under which names.
        dtype: To which type floats are rounded, as by `Checkpoint.cast`; None: to none.
        config: The model's configuration, or its folder; None: that of the checkpoint.
        is_signed: Whether records are signed.

    Raises:
        UnsupportedError: The model's configuration is missing, or the names of the model are not known.
        IncompleteError: Parts of tensors are missing.
    """
    source = checkpoint if dtype is None else checkpoint.cast(dtype)
    format = HuggingFace(config=None if config is None else source_path(config)) if names == "hf" else Safetensors()
    prepared = prepare(source, format)
    own_files = files_of_source(prepared)
    if names == "hf" and config is None and config_of(own_files) is None and ADAPTER not in own_files:
        raise UnsupportedError(
            "the checkpoint has no config.json, so it is not known which names its tensors have in transformers",
            where=checkpoint.path,
            hint="Give the model's configuration with --config, or publish the names of the checkpoint: --names as-is.",
        )
    check_complete(prepared)
    check_not_suspicious(prepared)
    plan = format.plan(prepared)
    tensors, published = list[Tensor](), list[PublishedTensor]()
    files, left_out = dict[str, bytes](), list[str]()
    for part in plan.files:
        if isinstance(part.content, SideFile):
            if is_file_name(part.file):
                files[part.file] = _bytes_of(part.content, part.tensors, part.file)
            else:
                left_out.append(part.file)
        for parameter in part.parameters:
            weight = parameter.weight
            tensors.append(weight)
            published.append(PublishedTensor(parameter.name, weight.dtype, weight.shape))
    if not published:
        raise UnsupportedError("the checkpoint has no weights of a model", where=checkpoint.path)
    names_of = {one.name for one in published}
    aliases = {} if names == "hf" else {new: old for new, old in prepared.aliases.items() if old in names_of}
    model = PublishedModel(tuple(published), _divided(published), _refs(files, is_signed), aliases)
    more = (Notice("files with such a name", tuple(left_out)),) if left_out else ()
    notices = dict.fromkeys((*prepared.notices, *plan.notes, *more))
    return ExportedModel(prepared, tuple(tensors), files, model, tuple(notices))


def _bytes_of(content: SideFile, tensors: tuple[Tensor, ...], name: str) -> bytes:
    if content.text is not None:
        return content.text.encode()
    if tensors[0].nbytes > MAX_FILE:
        raise UnsupportedError(
            f"the file {name!r:.100} has {tensors[0].nbytes:,} bytes: at most {MAX_FILE:,} are published"
        )
    return checked_read(tensors[0]).tobytes()


def _refs(files: Mapping[str, bytes], is_signed: bool) -> dict[str, ObjectRef]:
    return {name: ObjectRef.of(data, is_signed) for name, data in files.items()}


def _divided(tensors: list[PublishedTensor]) -> tuple[tuple[TensorPiece, ...], ...]:
    """The tensors in turn, in shares of at most `SHARE_NBYTES`: whole ones, and ranges of larger ones."""
    shares: list[list[TensorPiece]] = [[]]
    room = SHARE_NBYTES
    for number, tensor in enumerate(tensors):
        size, itemsize = prod(tensor.shape), tensor.dtype.itemsize
        whole = Box.whole(tensor.shape)
        most = SHARE_NBYTES // itemsize // DEFAULT_ELEMENTS * DEFAULT_ELEMENTS
        for first in range(0, max(size, 1), most):
            count = min(most, size - first)
            if shares[-1] and count * itemsize > room:
                shares.append([])
                room = SHARE_NBYTES
            own = tensor.shape if count == size else (count,)
            shares[-1].append(TensorPiece(number, BoxPlace(tensor.shape, whole, first, own)))
            room -= count * itemsize
    return tuple(map(tuple, shares))
