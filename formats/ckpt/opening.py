"""Open a checkpoint of any format, list those in a folder, make one of tensors in memory."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_formats.core.arguments import LocalPath, StrPath, checked
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.edits import Replace
from ckpt_formats.core.errors import InvalidArgumentError, NotFoundError, at_tensor
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.interchange import from_torch
from ckpt_formats.core.layout import Layout, Rule
from ckpt_formats.core.rules import rules_of
from ckpt_formats.core.tensor import Array, ArrayBlob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.registry.location import checkpoints_in, detect
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.stores.location import source_path


@checked
def open(
    path: StrPath,
    *,
    rules: LocalPath | Sequence[Rule] = (),
    order: Sequence[str] = (),
    orders: Mapping[str, Sequence[str]] | None = None,
    shapes: Checkpoint | None = None,
    anonymous: bool = False,
) -> Checkpoint:
    """The checkpoint at a path, or at a URL such as `s3://bucket/run`, whatever its format. Reads headers, no tensor.

    `rules` is a TOML file, or rules, for how tensor-parallel tensors are sharded. `order` lists the parameters that
    an optimizer numbers; `orders` does so for several, by their places in the file. `shapes` is another checkpoint
    of the model, for files that hold flat slices without their shapes. `anonymous`: ask a store without credentials,
    for what is public. A state of a chain is `run.chain@1234`.

    Raises `CkptError` of the kind that fits: `NotFoundError`, `CorruptError`, `IncompleteError`, `UnsafeError`,
    `UnsupportedError`, `RulesError`.
    """
    numbered = {place: tuple(names) for place, names in (orders or {}).items()}
    return open_checkpoint(source_path(path, anonymous), ReadOptions(rules_of(rules), tuple(order), numbered, shapes))


@checked
def checkpoints(folder: StrPath, *, anonymous: bool = False) -> list[Path]:
    """Return the paths of all checkpoints in the folder of a run, the newest last. A checkpoint's own path is alone.

    `folder` may be in a store. `anonymous`: ask a store without credentials. Raises `NotFoundError` if there is
    nothing at the path; the list is empty if ckpt recognises no checkpoint there.
    """
    place = source_path(folder, anonymous)
    inside = checkpoints_in(place)
    if inside:
        return inside
    try:
        detect(place)
    except NotFoundError:
        if not place.is_dir():
            raise
        return []
    return [place]


@checked
def from_state_dict(state_dict: Mapping[str, Any], *, step: int | None = None) -> Checkpoint:
    """The checkpoint of weights in memory: tensors of torch, or arrays, by name. To be saved, compared or edited.

    Names of one tensor are tied. Tensors in CPU memory are not copied: leave them as they are until the checkpoint has
    been saved. Raises `InvalidArgumentError` for a value that is no tensor, `UnsupportedError` for one whose element
    type no checkpoint holds.
    """
    parameters: dict[str, Parameter] = {}
    aliases: dict[str, str] = {}
    owners: dict[object, str] = {}
    digests: dict[str, str] = {}
    for name, value in state_dict.items():
        values = _values_of(name, value)
        place = (values.__array_interface__["data"][0], values.shape, values.dtype.name)
        if values.size and (owner := owners.setdefault(place, name)) != name:
            aliases[name] = owner
            continue
        parameters[name] = Parameter(name, "parameter", {MODEL: Tensor.of(ArrayBlob(values))})
        digest = blake2b(values.reshape(-1).view(np.uint8).data, digest_size=16).hexdigest()
        digests[name] = f"{values.dtype.name} {list(values.shape)} {digest}"
    return Checkpoint(
        path=Path("state_dict"),
        origin=Origin("state dict", step=step),
        parameters=parameters,
        aliases=aliases,
        history=(Replace(digests),),
    )


def _values_of(name: str, value: Any) -> Array:
    """The values of a tensor of torch or an array: C-contiguous."""
    if hasattr(value, "detach"):
        with at_tensor(printable(name)):
            return np.ascontiguousarray(from_torch(value)).reshape(tuple(value.shape))
    if isinstance(value, np.ndarray) or np.isscalar(value):
        values = np.asarray(value, order="C")
        if values.dtype in DTYPES.values():
            return values
    raise InvalidArgumentError(
        f"`{printable(name)}` is {type(value).__name__}, which is not a tensor that a checkpoint holds",
        hint="Give a flat dict of tensors, such as model.state_dict().",
    )


def effective_layout(checkpoint: Checkpoint, own: Sequence[Rule] = ()) -> Layout:
    """The rules by which the format read the tensors, or by which its engine shards them. `own` rules come first."""
    if checkpoint.layout.rules:
        return checkpoint.layout
    if checkpoint.origin.engine == "megatron":
        from ckpt_formats.engines.megatron.shared.rules import layout_of

        return layout_of(checkpoint, tuple(own))
    return Layout(tuple(own))
