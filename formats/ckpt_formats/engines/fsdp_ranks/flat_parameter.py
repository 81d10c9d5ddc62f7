"""Read FSDP1's local state dicts: each rank's part of flattened parameters, whose shapes are not stored.

A unit (a wrapped module) concatenates its parameters and splits the result over the
ranks: `<unit>._flat_param`, a ShardedTensor with one axis. With `use_orig_params`, the
file also has a view for each parameter: the rank's slice of it, which may be empty.
The slices in the order of the ranks are the flattened parameter. Without this option,
only the order of the parameters tells which elements belong to which parameter.

Source: torch.distributed.fsdp, _flat_param.py and _state_dict_utils.py, 2.4 to 2.13.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.flat_partitions import FlatPiece, tensor_in
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import FileBlob, Tensor, is_c_order, with_replicas
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.engines.fsdp_ranks.leaves import Leaf
from ckpt_formats.engines.fsdp_ranks.lookups import FLAT
from ckpt_formats.engines.fsdp_ranks.sharded_tensor import ShardedTensor, gather, ranks_of_copies

_ALIGNMENT = 16
"""An upper limit of the padding after a parameter, in elements. The next one begins at a multiple of 16 bytes."""
_SHAPES = (
    "Pass --shapes CKPT with any checkpoint of the same model: the weights that the run started from, or a full "
    "or sharded checkpoint of another step."
)
_SAME = "Is the checkpoint given with --shapes of the same model?"


@dataclass(frozen=True)
class FlatParameter:
    """A flat parameter: the part of each rank, and the complete vector, (n,)."""

    prefix: str
    leaves: Mapping[int, ShardedTensor]
    tensor: Tensor

    def has_view(self, rank: int, ref: TensorRef) -> bool:
        """Is this tensor of the rank's file a view of the rank's part of the flat parameter?"""
        return ref.size > 0 and any(ref.storage is own.storage for _, own in self.leaves[rank].shards)


def units_of(leaves: Mapping[str, Mapping[int, Leaf]]) -> dict[str, FlatParameter]:
    """The flat parameters among a model's tensors, by the prefix of their names."""
    units = {}
    for name, by_rank in leaves.items():
        sharded = {rank: leaf for rank, leaf in by_rank.items() if isinstance(leaf, ShardedTensor)}
        if name.rpartition(".")[2] == FLAT and len(sharded) == len(by_rank):
            if any(len(leaf.shape) != 1 for leaf in sharded.values()):
                raise CorruptError(f"`{printable(name)}` is not flat: it has several axes")
            units[name.removesuffix(FLAT)] = FlatParameter(name.removesuffix(FLAT), sharded, gather(name, sharded))
    return units


def unflatten(
    leaves: Mapping[str, Mapping[int, Leaf]],
    units: Mapping[str, FlatParameter],
    shapes: Mapping[str, Shape],
    listed: Sequence[str],
    where: Path,
) -> dict[str, Tensor]:
    """The parameters of all units, in their original shapes. Tensors outside of units are left to the caller.

    `leaves` are by name and rank. `listed` are the parameters' names in the order of the model.
    Raises `UnsupportedError` if shapes or names are not known, `CorruptError` if they contradict the files.
    """
    sliced = dict(_parameter_slices(leaves, units, shapes))
    with_views = {unit.prefix for unit in sliced.values()}
    parameters: dict[str, Tensor] = {}
    _need_shapes([name for name in sliced if name not in shapes], where)
    for name, unit in sliced.items():
        refs = {rank: leaf for rank, leaf in leaves[name].items() if isinstance(leaf, TensorRef)}
        parameters[name] = _of_slices(name, shapes[name], unit, refs)
    for unit in units.values():
        if unit.prefix not in with_views:
            members = [name for name in listed if innermost(name, units) == unit.prefix]
            _need_shapes([name for name in members if name not in shapes], where)
            parameters |= _of_flat(unit, {name: shapes[name] for name in members}, where)
    return parameters


def slices_of(name: str, shape: Shape, refs: Iterable[TensorRef], hint: str) -> Tensor:
    """The parameter of this shape from its slices, (n,) each, in order.

    Raises `CorruptError` if the sizes do not fit.
    """
    parts, at = [], 0
    vectors = [_vector(ref) for ref in refs]
    for vector in vectors:
        parts.append(FlatPiece(at, vector))
        at += vector.shape[0]
    if at != prod(shape):
        raise CorruptError(
            f"`{printable(name)}`: the ranks' slices have {at:,} elements, but shape {list(shape)} has {prod(shape):,}",
            hint=hint,
        )
    return tensor_in(shape, vectors[0].dtype, 0, parts)


def _parameter_slices(
    leaves: Mapping[str, Mapping[int, Leaf]], units: Mapping[str, FlatParameter], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, FlatParameter]]:
    """The names of tensors that are slices of parameters, with their units.

    Buffers are also vectors. A vector is a slice if it is a view of the flat parameter, or if its shape
    is not that of the parameter.
    """
    vectors: dict[str, tuple[FlatParameter, dict[int, TensorRef]]] = {}
    for name, by_rank in leaves.items():
        prefix = innermost(name, units)
        refs = {rank: leaf for rank, leaf in by_rank.items() if isinstance(leaf, TensorRef)}
        if prefix is not None and refs and all(len(ref.shape) == 1 for ref in refs.values()):
            vectors[name] = units[prefix], refs
    for unit in units.values():
        own = {name: refs for name, (its, refs) in vectors.items() if its is unit}
        views = {name for name, refs in own.items() if any(unit.has_view(*one) for one in refs.items())}
        for name, refs in own.items():
            is_sliced = len(unit.leaves) == 1 or any(ref.shape != shapes.get(name) for ref in refs.values())
            if name in views or (name in shapes and is_sliced):
                yield name, unit
            elif name not in shapes and not views and _may_be_sliced(unit, own.values()):
                raise UnsupportedError(
                    f"`{printable(name)}` may be a buffer, or a slice of a flattened parameter: the files do not "
                    "state which",
                    hint=_SHAPES,
                )


def _may_be_sliced(unit: FlatParameter, vectors: Collection[Mapping[int, TensorRef]]) -> bool:
    """Have these vectors, together with padding, at least as many elements as the flat parameter?"""
    count = sum(ref.size for refs in vectors for ref in refs.values())
    return count + _ALIGNMENT * len(vectors) >= unit.tensor.size


def _of_slices(name: str, shape: Shape, unit: FlatParameter, refs: Mapping[int, TensorRef]) -> Tensor:
    copies = []
    for ranks in ranks_of_copies(unit.leaves):
        if absent := [rank for rank in ranks if rank not in refs]:
            raise CorruptError(
                f"rank {absent[0]} has its part of `{printable(unit.prefix + FLAT)}`, but no `{printable(name)}`"
            )
        copies.append(slices_of(name, shape, [refs[rank] for rank in ranks], _SAME))
    return with_replicas(copies)


def _of_flat(unit: FlatParameter, shapes: Mapping[str, Shape], where: Path) -> dict[str, Tensor]:
    name = unit.prefix + FLAT
    flat, total = unit.tensor, sum(map(prod, shapes.values()))
    if flat.size != total:
        raise UnsupportedError(
            f"`{printable(name)}` has {flat.size:,} elements, but the {len(shapes)} known parameters of its module "
            f"have {total:,}",
            where=where,
            hint="It was saved with use_orig_params=False: list all its parameters in the order of the module with "
            f"--param-order, each once. {_SHAPES}",
        )
    parameters: dict[str, Tensor] = {}
    offset = 0
    for member, shape in shapes.items():
        copies = []
        for copy in (flat, *flat.replicas):
            parts = [FlatPiece(f.box.start[0], f.blob) for f in copy.fragments if isinstance(f.blob, FileBlob)]
            copies.append(tensor_in(shape, flat.dtype, offset, parts))
        parameters[member] = with_replicas(copies)
        offset += prod(shape)
    return parameters


def innermost(name: str, units: Collection[str]) -> str | None:
    """The prefix of the innermost unit that contains the tensor of this name; None if there is none."""
    parts = name.split(".")
    prefixes = (".".join(parts[:i]) + "." if i else "" for i in reversed(range(len(parts))))
    return next((prefix for prefix in prefixes if prefix in units), None)


def _vector(ref: TensorRef) -> FileBlob:
    blob = tensor_of(ref).fragments[0].blob
    if (
        not isinstance(blob, FileBlob)
        or len(ref.shape) != 1
        or not is_c_order(blob.shape, blob.strides, blob.dtype.itemsize)
    ):
        raise CorruptError(f"a slice of a flattened parameter has the shape {list(ref.shape)}, or is not contiguous")
    return blob


def _need_shapes(names: Sequence[str], where: Path) -> None:
    if names:
        raise UnsupportedError(
            f"{list_names(names, max_count=1)}: the files contain flattened parameters (LOCAL_STATE_DICT of FSDP1) "
            "without their shapes",
            where=where,
            hint=_SHAPES,
        )
