"""Convert DeepSpeed's description of tensor parallelism (`universal_checkpoint_info`) to rules.

Its patterns are regular expressions that match at the start of a name. Tensors that
match no pattern are split along axis 0. `affine_map`, the newest form, lists the
strided pieces of every rank and has priority.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.layout import Partitioning, Rule, ShardBlock
from ckpt_formats.core.tensor import c_strides
from ckpt_formats.core.values import Value, is_natural

ORIGIN = "universal_checkpoint_info"


def rules_of(info: Mapping[str, Value], where: Path) -> tuple[Rule, ...]:
    """The rules in order of priority. Raises `CorruptError` if the entry is not of the known form."""
    try:
        return tuple(_rules(info, where))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise CorruptError(f"{ORIGIN} is not of the known form: {error}", where=where) from None


def _rules(info: Mapping[str, Value], where: Path) -> Iterator[Rule]:
    origin = f"{where.name}: {ORIGIN}"
    for pattern, reason in dict(info.get("autotp_unsupported_parameter_patterns") or {}).items():
        raise UnsupportedError(f"DeepSpeed marked `{pattern}` as not convertible: {reason}", where=where)
    for pattern, mapped in dict((info.get("affine_map") or {}).get("params") or {}).items():
        yield _affine(_prefix(pattern, origin), mapped, origin)
    vocabulary = {_prefix(p, origin) for p in info.get("vocabulary_parameter_patterns") or ()}
    true_rows = info.get("original_vocab_size")
    if vocabulary and not is_natural(true_rows):
        raise ValueError("vocabulary patterns without original_vocab_size")
    unsharded: tuple[tuple[str, Partitioning], ...] = (
        ("tp_replicated_parameter_patterns", "replicated"),
        ("parameter_to_average_patterns", "averaged"),
    )
    for key, how in unsharded:
        for pattern in info.get(key) or ():
            yield Rule(_prefix(pattern, origin), how, origin=origin)
    for pattern in info.get("parameter_with_2_sub_params_cat_dim_0") or ():
        yield Rule(_prefix(pattern, origin), fused=2, origin=origin)
    widths = dict(info.get("sub_param_shard_widths") or {})
    for entry in info.get("parameter_with_sub_params") or ():
        fields = entry if isinstance(entry, dict) else entry.state
        axis = fields["partition_dim"]
        for pattern in fields["patterns"]:
            yield Rule(
                _prefix(pattern, origin),
                axis=axis,
                fused=_fused(fields["shape"][axis]),
                widths=tuple(tuple(w) for w in widths.get(pattern, ())),
                origin=origin,
            )
    for pattern in info.get("parameter_with_row_parallelism_patterns") or ():
        yield Rule(_prefix(pattern, origin), axis=1, origin=origin)
    for pattern in sorted(vocabulary):
        yield Rule(pattern, vocabulary=true_rows, origin=origin)
    yield Rule(".*", origin=f"{origin} (all other tensors: axis 0)")


def _prefix(pattern: Any, origin: str) -> str:
    if not isinstance(pattern, str):
        raise ValueError(f"a pattern is {pattern!r}")
    from ckpt_formats.core.rules import safe_pattern  # only tensor parallelism has patterns

    safe_pattern(pattern, origin)
    return f"(?:{pattern}).*"


def _fused(value: Any) -> int | tuple[int, ...]:
    """The lengths of the fused parts, such as (q, k, v), or their number, such as 3 or in the older form (3, -1)."""
    if is_natural(value) and value:
        return int(value)
    lengths = tuple(value)
    if len(lengths) == 2 and lengths[1] == -1:
        return _fused(lengths[0])
    if not all(map(is_natural, lengths)) or not lengths:
        raise ValueError(f"sub-parameters of lengths {value!r}")
    return lengths


def _affine(pattern: str, mapped: Mapping[str, Any], origin: str) -> Rule:
    shape = _shape(mapped["logical_shape"])
    ranks = {int(rank): entry for rank, entry in mapped["ranks"].items()}
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError("affine_map: ranks are not numbered from 0")
    blocks = [
        tuple(_shard_block(piece, _shape(ranks[r]["shard_shape"]), shape) for piece in ranks[r]["pieces"])
        for r in range(len(ranks))
    ]
    if all(block == (ShardBlock(Box.whole(shape), Box.whole(shape)),) for block in blocks):
        return Rule(pattern, "replicated", origin=f"{origin}.affine_map")
    return Rule(pattern, "blocks", shape=shape, blocks=tuple(blocks), origin=f"{origin}.affine_map")


def _shard_block(piece: Mapping[str, Any], shard: Shape, full: Shape) -> ShardBlock:
    if piece.get("scale", 1) != 1:
        raise UnsupportedError("affine_map: a piece is scaled, which optimizer states cannot follow")
    size = _shape(piece["shape"])
    return ShardBlock(_box(size, piece["dest"], shard), _box(size, piece["source"], full))


def _box(size: Shape, view: Any, tensor: Shape) -> Box:
    """The block of a C-ordered tensor that a strided view covers. Raises `UnsupportedError` if it is not a block."""
    offset, strides = view
    expected = c_strides(tensor, 1)
    if (
        not is_natural(offset)
        or len(size) != len(tensor)
        or any(s != e for s, e, n in zip(strides, expected, size, strict=True) if n > 1)
    ):
        raise UnsupportedError("affine_map: a piece is not a block of its tensor")
    start = []
    for stride in expected:
        start.append(offset // stride if stride else 0)
        offset -= start[-1] * stride
    box = Box(tuple(start), tuple(a + n for a, n in zip(start, size, strict=True)))
    if any(b > n for b, n in zip(box.stop, tensor, strict=True)):
        raise ValueError(f"affine_map: piece {box} reaches beyond shape {list(tensor)}")
    return box


def _shape(value: Any) -> Shape:
    shape = tuple(value)
    if not all(map(is_natural, shape)) or len(shape) > 64:
        raise ValueError(f"shape {value!r:.60}")
    return shape
