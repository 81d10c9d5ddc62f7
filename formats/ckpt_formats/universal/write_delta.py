"""Write the states of a parameter as a delta: the bytes, and the errors of approximate values."""

from collections.abc import Mapping

import numpy as np
import xxhash

from ckpt_codecs import CodecError, NotApplicable
from ckpt_codecs.delta import StatePair
from ckpt_codecs.lossy import ErrorStats
from ckpt_codecs.lossy.error_stats import measured
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.state_names import STORED_MASTER, from_stored
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.transfer import Transfer, as_bytes
from ckpt_formats.universal.check_index import OVERHEAD
from ckpt_formats.universal.delta_plan import DeltaPlan
from ckpt_formats.universal.encode_state import flat
from ckpt_formats.universal.entry import DeltaEntry, StateEntry
from ckpt_formats.universal.error_figures import figures
from ckpt_formats.universal.model_copy import ModelCopy
from ckpt_formats.universal.pack_file import ChunkAppender, PackFile


def write_delta(
    out: PackFile, plan: DeltaPlan, copy: ModelCopy | None, check: bool, transfer: Transfer, where: str
) -> tuple[DeltaEntry, dict[str, StateEntry]]:
    """Write all chunks at the end of a pack. Returns the delta's entry, and each state's.

    Raises `NotApplicable` if the codec cannot encode a chunk, or if the result is longer than a reader accepts. Then
    nothing of it is part of the pack.
    """
    chunks = ChunkAppender(out)
    digests = {state: bytearray() for state in plan.after}
    errors = {state: ErrorStats() for state in plan.after}
    lossless = plan.codec.lossless
    copied = None if copy is None else flat(copy.tensor)
    for index in range(plan.chunking.count):
        change = plan.change(index, transfer)
        data = plan.codec.encode(change)
        raw = sum(values.nbytes for values in change.after.values())
        if len(data) > raw + OVERHEAD:
            raise NotApplicable(f"{len(data):,} bytes for {raw:,} of values")
        decoded = _decoded(plan, data, change, where) if check or not lossless else dict(change.after)
        if lossless and not _same(decoded, change.after):
            raise RuntimeError(
                f"codec {plan.codec.name} does not decode to the values that it encoded: {where}, chunk {index}"
            )
        if not lossless and (broken := plan.codec.broken_promise(change, decoded)) is not None:
            raise RuntimeError(f"codec {plan.codec.name} does not keep its promise: {where}, chunk {index}: {broken}")
        for state, values in decoded.items():
            digests[state] += xxhash.xxh3_128_digest(as_bytes(values).data)
            if not lossless:
                errors[state] += measured(change.after[state], values, change.before.get(state))
        if copy is not None and copied is not None and STORED_MASTER in decoded:
            approximate = None if lossless else decoded[STORED_MASTER].reshape(-1)
            copy.compare(
                plan.chunking.box(index), change.after[STORED_MASTER].reshape(-1), transfer, copied, approximate
            )
        chunks.add(data)
    states = {
        from_stored(state): StateEntry(
            tensor.dtype.name,
            plan.shape,
            bytes(digests[state]),
            error=figures(errors[state], state in plan.before, plan.codec.promised(state, plan.form)),
        )
        for state, tensor in plan.after.items()
    }
    names = tuple(map(from_stored, plan.after))
    before = tuple(from_stored(state) for state in plan.after if state in plan.before)
    return DeltaEntry(plan.codec.config(), names, before, *chunks.end()), states


def _decoded(plan: DeltaPlan, data: bytes, change: StatePair, where: str) -> dict[str, Array]:
    form = {state: values.dtype for state, values in change.after.items()}
    shape = next(iter(change.after.values())).shape
    try:
        decoded = plan.codec.decode(data, change.before, shape, form)
    except CodecError as error:
        raise UnsupportedError(f"codec {plan.codec.name} cannot decode what it encoded: {error}", where=where) from None
    return {state: np.ascontiguousarray(decoded[state]) for state in change.after}


def _same(decoded: Mapping[str, Array], original: Mapping[str, Array]) -> bool:
    return all(np.array_equal(as_bytes(decoded[state]), as_bytes(values)) for state, values in original.items())
