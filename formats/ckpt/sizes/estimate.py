"""Estimate from a few chunks of each kind of state how many bytes encoding saves."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

from ckpt.sizes.state_sizes import StateSizes, row_name
from ckpt_codecs import NotApplicable, Rounded
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_table import PLAIN
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal.encode_state import choose_for, flat

CHUNKS = 16
"""Chunks that are sampled of each kind of state, evenly spread over its elements."""

Member = tuple[Parameter, str]


def estimate(checkpoint: Checkpoint, coding: EncodingOptions, chunks: int = CHUNKS) -> list[StateSizes]:
    """Estimates of the rows that `sizes.rows` returns for the compressed checkpoint."""
    kinds: dict[tuple[str, str], list[Member]] = {}
    for parameter, state, tensor in checkpoint.tensors():
        if tensor.size:
            kinds.setdefault((row_name(parameter, state), tensor.dtype.name), []).append((parameter, state))
    with Reader(check=False) as reader:
        transfer = Transfer(reader)
        sizes = [_row(*key, members, coding, transfer, chunks) for key, members in kinds.items()]
    return sorted(sizes, key=lambda row: -row.raw)


def _row(
    state: str, dtype: str, members: list[Member], coding: EncodingOptions, transfer: Transfer, chunks: int
) -> StateSizes:
    tensors = [parameter.states[name] for parameter, name in members]
    elements, raw = sum(t.size for t in tensors), sum(t.nbytes for t in tensors)
    seen = stored = 0
    codecs: dict[str, None] = {}
    for (parameter, name), indices in _spread(members, elements, chunks):
        nbytes, codec, taken = _sample(parameter, name, indices, coding, transfer)
        seen, stored = seen + nbytes, stored + taken
        codecs[codec] = None
    return StateSizes(state, dtype, elements, raw, round(raw * stored / seen), tuple(codecs))


def _spread(members: list[Member], elements: int, chunks: int) -> Iterator[tuple[Member, list[int]]]:
    """Members, and the indices of their chunks that are sampled."""
    ends = list(accumulate(parameter.states[name].size for parameter, name in members))
    picked: dict[int, dict[int, None]] = {}
    for i in range(chunks):
        at = (2 * i + 1) * elements // (2 * chunks)
        which = bisect_right(ends, at)
        tensor = members[which][0].states[members[which][1]]
        inside = at - (ends[which] - tensor.size)
        picked.setdefault(which, {})[inside // Chunking.default(tensor.shape).chunk_size] = None
    for which, indices in picked.items():
        yield members[which], list(indices)


def _sample(
    parameter: Parameter, state: str, indices: list[int], coding: EncodingOptions, transfer: Transfer
) -> tuple[int, str, int]:
    """The bytes of some chunks, the codec for them, and their bytes in the file."""
    tensor = parameter.states[state]
    chunk = Chunking.default(tensor.shape).chunk_size
    ranges = [Box((i * chunk,), (min((i + 1) * chunk, tensor.size),)) for i in indices]
    nbytes = sum(box.size for box in ranges) * tensor.dtype.itemsize
    if state == MODEL and _is_derived(parameter, ranges, transfer):
        return nbytes, Rounded.name, 0
    choice = choose_for(parameter, state, coding, transfer, indices)
    return (nbytes, PLAIN, nbytes) if choice is None else (nbytes, choice.codec.name, choice.nbytes)


def _is_derived(parameter: Parameter, ranges: list[Box], transfer: Transfer) -> bool:
    """Is the model's copy its master, rounded, in these ranges of their elements?"""
    master, copy = parameter.states.get(MASTER), parameter.states[MODEL]
    if master is None or master.shape != copy.shape:
        return False
    try:
        for box in ranges:
            Rounded().encode(transfer.fetch(flat(copy), box, "copy"), transfer.fetch(flat(master), box))
    except NotApplicable:
        return False
    return True
