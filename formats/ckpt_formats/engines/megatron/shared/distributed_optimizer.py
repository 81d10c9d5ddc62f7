"""Read `distrib_optim.pt`: the distributed optimizer's buffers, gathered over data-parallel ranks, without names.

    since 2024-04   {'buckets_coalesced': True, 0: {dtypes: {'param': vector, 'exp_avg': ...}}, ...}
    2024-02..04     {'per_bucket_numel_unpadded': ..., 0: {dtypes: {'param': [vector of each bucket], ...}}, ...}
    before          {'per_bucket_numel': ..., 0: {dtype: {'param': [vector of each bucket, padded], ...}}, ...}

The integer keys number the buffers: there is one for each model chunk and each pair of dtypes (of parameters and of
gradients). With expert parallelism the file is a list: the buffers of the dense parameters, then those of the experts.
An entry is None if the rank does not save it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path

from ckpt_formats.core.checkpoint import MASTER
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value
from ckpt_formats.core.views import reshaped
from ckpt_formats.engines.megatron.shared.arguments import Arguments, Parallel, has_mtp
from ckpt_formats.engines.megatron.shared.buffers import (
    ALIGNMENTS,
    BufferItem,
    BufferLayout,
    default_bucket_size,
    fill,
    fit,
)
from ckpt_formats.engines.megatron.shared.model_chunk import ModelChunk
from ckpt_formats.engines.megatron.shared.names import TIED, WORD_TABLE
from ckpt_formats.engines.megatron.shared.optimizer_states import Key
from ckpt_formats.state_dicts.leaves import Leaf, tensor_leaf

STATES = {"param": MASTER}
"""State names in the file that differ from the names used here."""
_NO_STATE = ("numel_unpadded", "padding", "step")


@dataclass(frozen=True)
class Buffer:
    """A buffer of one rank: the number of its model chunk, and its parameters in the module's order."""

    chunk: int
    items: tuple[BufferItem, ...]


@dataclass(frozen=True)
class Buckets:
    """The options that determine the buckets of a rank's buffers."""

    sizes: tuple[int | None, ...]
    """Bucket sizes to try for the first chunk, in elements: releases differ if the user sets none. None: no limit."""
    padding: int
    """A bucket is padded to a multiple of this number of elements."""
    shared: frozenset[str]
    """The names of the tables that the first and the last stage share. Each has a bucket of its own."""

    def limits(self, chunk: int) -> tuple[int | None, ...]:
        """The bucket sizes to try for a chunk, in elements; None stands for no limit."""
        return self.sizes if chunk == 0 else (None,)


def buckets_of(args: Arguments, parallel: Parallel, stage: int, dp: int, numel: int) -> Buckets:
    """The bucket options of one rank of a pipeline stage.

    `dp` is the number of ranks that share the optimizer; `numel` is the number of elements of the rank's parameters.
    """
    size, number = args.optional("ddp_bucket_size"), args.optional("ddp_num_buckets")
    if not args.flag("overlap_grad_reduce") or stage > 0:
        sizes: tuple[int | None, ...] = (None,)
    elif size is not None or number:
        sizes = (size if size is not None else numel // (number or 1),)
    else:
        sharing = (parallel.dp, args.number("data_parallel_size", default=parallel.dp))
        sizes = tuple(dict.fromkeys(default_bucket_size(ranks) for ranks in sharing))
    wide = args.flag("ddp_pad_buckets_for_high_nccl_busbw")
    return Buckets(sizes, lcm(dp, 128, 1 << 16 if wide else 1), _shared_tables(args, parallel))


def _shared_tables(args: Arguments, parallel: Parallel) -> frozenset[str]:
    if parallel.pp == 1:
        return frozenset()
    if has_mtp(args):
        return frozenset({WORD_TABLE})
    return frozenset({*TIED, *TIED.values()}) if is_tied(args) else frozenset()


def is_tied(args: Arguments) -> bool:
    """True if the output layer uses the table of the embedding."""
    return not args.flag("untie_embeddings_and_output_weights")


def buffers_of(chunks: Sequence[ModelChunk], shared: frozenset[str], experts: bool | None) -> list[Buffer]:
    """The buffers of a rank in Megatron's order: by chunk, then by dtype in the order of first use.

    `experts` selects the parameters of experts (True), all others (False), or all (None).
    """
    buffers = []
    for number, chunk in enumerate(chunks):
        by_dtype: dict[str, list[BufferItem]] = {}
        for name in chunk.trained(experts=experts):
            tensor = chunk.tensors[name]
            item = BufferItem(name, tensor.shape, name in shared)
            by_dtype.setdefault(tensor.dtype.name, []).append(item)
        buffers += [Buffer(number, tuple(items)) for items in by_dtype.values()]
    return buffers


def is_no_buffer(key: Value) -> bool:
    """True if an entry of `distrib_optim.pt` is neither a buffer nor a description of the buffers' form."""
    return type(key) is not int and key not in ("buckets_coalesced", "per_bucket_numel", "per_bucket_numel_unpadded")


def read_buffers(
    saved: Mapping[Value, Value], buffers: Sequence[Buffer], buckets: Buckets, where: Path
) -> dict[Key, dict[str, Tensor]]:
    """The states of each parameter, in its local shape, as views of the flat buffers.

    Raises: CorruptError if the buffers do not match the parameters, UnsupportedError for an unknown form of the
    buffers.
    """
    numbered = sorted(key for key in saved if type(key) is int)
    if len(numbered) != len(buffers):
        raise CorruptError(
            f"the optimizer has {len(numbered)} buffers, but the model's parameters need {len(buffers)}",
            where=where,
            hint=_FROZEN,
        )
    states: dict[Key, dict[str, Tensor]] = {}
    for number, buffer in zip(numbered, buffers, strict=True):
        by_dtype = saved[number]
        if len(by_dtype) != 1:
            raise UnsupportedError("a buffer has several element types", where=where)
        (vectors,) = by_dtype.values()
        if isinstance(vectors, list):
            raise UnsupportedError(
                "the optimizer's buffers are stored by parameter, which is an unknown form", where=where
            )
        for name, tensor in _of_buffer(vectors, buffer, buckets, where):
            states.setdefault((buffer.chunk, name), {}).update(tensor)
    return states


_FROZEN = "Files of several runs may be mixed, or some parameters may be frozen."


def _of_buffer(
    stored: Mapping[str, Value], buffer: Buffer, buckets: Buckets, where: Path
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    vectors = {str(k): [v] if isinstance(v, Leaf) else v for k, v in stored.items() if k not in _NO_STATE}
    coalesced = isinstance(stored.get("param"), Leaf)
    for state, listed in vectors.items():
        parts = [tensor_leaf(part) for part in listed]
        if any(len(part.shape) != 1 for part in parts):
            raise CorruptError(f"the buffer of `{state}` is not flat", where=where)
        lengths = [part.shape[0] for part in parts]
        filled = _filled(buffer, lengths, buckets, coalesced)
        if filled is None:
            raise CorruptError(
                f"the optimizer's buffer of `{state}` has {sum(lengths):,} elements, "
                f"but the model's parameters have {sum(item.numel for item in buffer.items):,}",
                where=where,
                hint=_FROZEN,
            )
        starts = filled.flat()
        for item in buffer.items:
            place = filled.places[item.name]
            vector, start = (parts[0], starts[item.name]) if coalesced else (parts[place.bucket], place.start)
            yield item.name, {STATES.get(state) or from_stored(state): reshaped(vector, start, item.shape)}


def _filled(buffer: Buffer, lengths: Sequence[int], buckets: Buckets, coalesced: bool) -> BufferLayout | None:
    """The layout of the parameters in vectors of these lengths; None if they do not fit exactly."""
    for alignment in ALIGNMENTS:
        for limit in buckets.limits(buffer.chunk):
            filled = fill(buffer.items, limit, alignment)
            if sum(filled.buckets) == sum(lengths) if coalesced else _padded(filled.buckets, lengths, buckets.padding):
                return filled
        if not coalesced and (fitting := fit(buffer.items, lengths, alignment)):
            return fitting
    return None


def _padded(buckets: Sequence[int], lengths: Sequence[int], padding: int) -> bool:
    """True if the vectors have the lengths of the buckets, with or without padding."""
    same = len(buckets) == len(lengths)
    return same and all(0 <= b - a < padding for a, b in zip(buckets, lengths, strict=True))
