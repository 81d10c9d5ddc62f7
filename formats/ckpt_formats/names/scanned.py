"""Scanned layers of MaxText: one tensor has those of several layers, along its second axis; and layers one by one.

`decoder.layers.mlp.wo.kernel` of shape (ffn, layers, hidden) is `decoder.layers_0.mlp.wo.kernel` (ffn, hidden) and so
on, with all states. Layers that are not all alike have their own stacks:

| scan | stacks | layers one by one |
|---|---|---|
| `all` | `layers.X` | `layers_L.X` |
| `cycles of N` | `layers.layers_B.X` (B, B + N, ...) | `layers_L.X` |
| `cycles of N and a remainder` | the same, at the end `layers_remainder.layers_R.X` | `layers_L.X` |
| `pairs` | `layers.M_local.X`, `layers.M_global.X`: the module M of even, odd layers | `layers_P.M_local.X`, ... |
| `dense, then experts` | `dense_layers.X`, `moe_layers.X` | `dense_layers_L.X`, `moe_layers_L.X` |

Tensors in a collection of their own have its name before theirs (`MoEBiasVar.decoder.moe_layers.X`), and their stacks
have the layers along the first axis.

Source: MaxText 0.2.5, `scan_layers`, `param_scan_axis: 1`, checkpoint_conversion/utils/param_mapping.py.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType

from ckpt_formats.containers.zarr_chunks import ChunkBlob
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.claims import MAX_NUMBER
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.views import permuted, stacked, unstacked_all
from ckpt_formats.names.renames import TensorRename, apply_renames

ALL, PAIRS, DENSE_FIRST = "all", "pairs", "dense, then experts"
_NAME = re.compile(
    r"(?:(?P<collection>MoEBiasVar)\.)?decoder\.(?P<stack>layers|dense_layers|moe_layers|layers_remainder)(?:_(?P<layer>\d{1,6}))?"
    r"(?:\.layers_(?P<block>\d{1,6}))?\.(?P<rest>.+)"
)
_OF_PAIR = re.compile(r"(?P<module>\w+)_(?P<half>local|global)\.(?P<rest>.+)")
_DECODED_ONCE = 1 << 25
"""Bytes of values in compressed chunks that a thread keeps decoded while it reads layers in turn."""
_DECODED_OFTEN = (
    "layers are cut out of compressed chunks, which are decoded once for each layer if they are read layer by layer: "
    "with many layers, `ckpt convert` to universal first, whose values are plain, and go on from there"
)
_PLAIN = re.compile(r"decoder\.layers_(\d{1,6})\.(.+)")


@dataclass(frozen=True)
class Scan:
    """How the layers of a model are scanned."""

    kind: str
    layers: int
    dense: int = 0
    """How many layers without experts come first, if the kind is `DENSE_FIRST`."""
    collections: Mapping[str, str] = field(default_factory=dict)
    """The collections of tensors that are not in `params`, by their names in a layer."""

    @property
    def cycle(self) -> int:
        """The layers of a cycle; 0: there are no cycles."""
        words = self.kind.split()
        return int(words[2]) if words[0] == "cycles" else 0


def scan_of(
    kind: str, layers: int, moe_layers: Sequence[bool] | None, collections: Mapping[str, str] = MappingProxyType({})
) -> Scan:
    """The scan of a model. Raises `UnsupportedError` for layers that it cannot have."""
    experts = list(moe_layers or [False] * layers)
    dense = experts.index(True) if True in experts else layers
    if kind == DENSE_FIRST and not all(experts[dense:]):
        raise UnsupportedError("MaxText has layers without experts only before those with experts")
    if kind != DENSE_FIRST and 0 < sum(experts) < layers:
        raise UnsupportedError("MaxText has no models of this family with experts in some layers only")
    if kind == PAIRS and layers % 2:
        raise UnsupportedError(f"MaxText has pairs of layers in this family, but the model has {layers}")
    scan = Scan(kind, layers, dense, collections)
    if scan.cycle and layers % scan.cycle and not kind.endswith("remainder"):
        raise UnsupportedError(f"MaxText has cycles of {scan.cycle} layers in this family, but the model has {layers}")
    return scan


def are_scanned(source: Checkpoint, in_collections: Collection[str]) -> bool:
    """Whether no tensor is one of a single layer, but for the layers behind the last cycle, and those that belong into
    collections, by their names in a layer, are in one."""
    matches = (_NAME.fullmatch(name) for name, one in source.parameters.items() if one.role != "extra")
    return not any(
        match["layer"] or (match["rest"] in in_collections and not match["collection"]) for match in matches if match
    )


def one_by_one(source: Checkpoint, scan: Scan) -> Checkpoint:
    """The checkpoint with its layers one by one, as `decoder.layers_L`, lazily.

    Raises `CorruptError` for a tensor without an axis of its layers.
    """
    changes = []
    packed_nbytes = 0
    for name, parameter in source.parameters.items():
        match = _NAME.fullmatch(name)
        if match is None or parameter.role == "extra":
            continue
        layers, rest, is_stack = _layers(match, scan)
        new = tuple(f"decoder.layers_{layer}.{rest}" for layer in layers)
        if not is_stack:
            if new != (name,):
                changes.append(TensorRename((name,), new, tuple))
            continue
        shape, axis = parameter.weight.shape, 0 if match["collection"] else 1
        if len(shape) < axis + 1 or not 0 < shape[axis] <= MAX_NUMBER or shape[axis] != len(layers):
            raise CorruptError(
                f"`{printable(name)}` of shape {list(shape)} has no axis of layers: its {('first', 'second')[axis]} "
                f"axis must have {len(layers)}",
                where=source.path,
            )
        changes.append(TensorRename((name,), new, _cut if axis else _cut_first))
        if len(layers) > 1:
            packed_nbytes += sum(map(_compressed_nbytes, parameter.states.values()))
    if packed_nbytes > _DECODED_ONCE:
        source = replace(source, notices=(*source.notices, Notice(_DECODED_OFTEN, weight=Weight.UNSURE)))
    return apply_renames(source, changes) if changes else source


def _compressed_nbytes(tensor: Tensor) -> int:
    """The bytes of the values that are in compressed chunks."""
    blobs = (fragment.blob for fragment in tensor.fragments)
    compressed = (blob for blob in blobs if isinstance(blob, ChunkBlob) and blob.layout.codec.compression)
    return sum(prod(blob.shape) for blob in compressed) * tensor.dtype.itemsize


def scanned(source: Checkpoint, scan: Scan) -> Checkpoint:
    """The checkpoint with scanned layers, lazily. Raises `UnsupportedError` if some of a stack's layers are missing."""
    members: dict[str, dict[int, str]] = {}
    for name, parameter in source.parameters.items():
        if (match := _PLAIN.fullmatch(name)) and parameter.role != "extra":
            members.setdefault(match[2], {})[int(match[1])] = name
    changes = []
    for rest, names in members.items():
        for new, layers, is_stack in _stacks(rest, names, scan):
            if missing := [layer for layer in layers if layer not in names]:
                raise UnsupportedError(
                    f"`{printable(new)}` has layers that are not there: {', '.join(map(str, missing[:4]))}",
                    where=source.path,
                    hint="MaxText scans the layers of the whole model.",
                )
            collection = scan.collections.get(rest)
            join = tuple if not is_stack else _join if collection is None else _join_first
            new = new if collection is None else f"{collection}.{new}"
            changes.append(TensorRename(tuple(names[layer] for layer in layers), (new,), join))
    return apply_renames(source, changes) if changes else source


def _layers(match: "re.Match[str]", scan: Scan) -> tuple[Sequence[int], str, bool]:
    """The layers of a tensor of MaxText, the rest of its name in each, and whether it is a stack."""
    stack, rest = match["stack"], match["rest"]
    number = None if match["layer"] is None else int(match["layer"])
    block = None if match["block"] is None else int(match["block"])
    if scan.kind == PAIRS and (half := _OF_PAIR.fullmatch(rest)):
        first, rest = ("local", "global").index(half["half"]), f"{half['module']}.{half['rest']}"
        return (range(first, scan.layers, 2), rest, True) if number is None else ([2 * number + first], rest, False)
    if scan.cycle and block is not None:
        whole = scan.layers - scan.layers % scan.cycle
        if stack == "layers_remainder":
            return [whole + block], rest, False
        return range(block, whole, scan.cycle), rest, True
    first = scan.dense if stack == "moe_layers" else 0
    if number is not None:
        return [first + number], rest, False
    return range(first, scan.dense if stack == "dense_layers" else scan.layers), rest, True


def _stacks(rest: str, names: Mapping[int, str], scan: Scan) -> Iterator[tuple[str, Sequence[int], bool]]:
    """The tensors of MaxText with one of each layer: the name, the layers, whether it is a stack."""
    if scan.kind == PAIRS:
        module, _, inner = rest.partition(".")
        for first, half in enumerate(("local", "global")):
            yield f"decoder.layers.{module}_{half}.{inner}", range(first, scan.layers, 2), True
    elif scan.cycle:
        whole = scan.layers - scan.layers % scan.cycle
        for block in range(scan.cycle if whole else 0):
            yield f"decoder.layers.layers_{block}.{rest}", range(block, whole, scan.cycle), True
        for layer in range(whole, scan.layers):
            yield f"decoder.layers_remainder.layers_{layer - whole}.{rest}", [layer], False
    elif scan.kind == DENSE_FIRST:
        for stack, layers in (("dense", range(scan.dense)), ("moe", range(scan.dense, scan.layers))):
            if any(layer in names for layer in layers):
                yield f"decoder.{stack}_layers.{rest}", layers, True
    else:
        yield f"decoder.layers.{rest}", range(scan.layers), True


def _cut(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (tensor,) = tensors
    return tuple(unstacked_all(_swapped(tensor)))


def _cut_first(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (tensor,) = tensors
    return tuple(unstacked_all(tensor))


def _join_first(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (stacked(tensors),)


def _join(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (_swapped(stacked(tensors)),)


def _swapped(tensor: Tensor) -> Tensor:
    """The tensor with its first two axes swapped."""
    return permuted(tensor, (1, 0, *range(2, len(tensor.shape))))
