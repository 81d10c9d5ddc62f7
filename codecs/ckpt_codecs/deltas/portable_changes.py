"""Halves of which few change, in Python and NumPy: what the kernels do."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.deltas.portable_ranges import MODELS_OF_A_BIT, Reader, Writer

KIND_BITS, STEP_BITS, MOST_SHIFT = 6, 16, 24
KINDS, SIGN = 0, MODELS_OF_A_BIT * KIND_BITS
FLAGS = SIGN + 1
MODELS_OF_A_BUCKET = 1 + MODELS_OF_A_BIT * STEP_BITS


def find_changes(
    foretold: Array, found: Array, which: Array, contexts: int, many: int
) -> tuple[Array, Array, Array, Array, Array]:
    changed = found != foretold
    buckets, steps = which[changed], (found - foretold)[changed]
    sizes, tails = np.bincount(which, minlength=contexts), np.zeros(contexts, np.int64)
    gaps = np.zeros(buckets.size, np.int64)
    for c in range(contexts):
        places = np.flatnonzero(changed[which == c])
        gaps[buckets == c] = np.diff(places, prepend=-1) - 1
        tails[c] = sizes[c] - (int(places[-1]) + 1 if places.size else 0)
    return buckets, gaps, steps, sizes, tails


def write_changes(
    buckets: Array, gaps: Array, steps: Array, sizes: Array, tails: Array, kinds: Array, out: Array
) -> int:
    contexts = kinds.size
    after, rest, following = tails.tolist(), sizes.tolist(), []
    for c, gap in zip(buckets[::-1].tolist(), gaps[::-1].tolist(), strict=True):
        following.append(after[c])
        after[c] = gap
    writer, last = Writer(FLAGS + contexts * MODELS_OF_A_BUCKET), 0
    for c, kind in enumerate(kinds.tolist()):
        if rest[c]:
            way, last = kind - last, kind
            writer.number(KINDS, KIND_BITS, (2 * way if way >= 0 else -2 * way - 1) + 1)
            _put_gap(writer, c, kind, after[c], rest[c])
            rest[c] -= after[c] + 1
    told = zip(buckets.tolist(), steps.view(np.int16).tolist(), reversed(following), strict=True)
    for c, step, gap in told:
        writer.bit(SIGN, step < 0)
        writer.number(FLAGS + c * MODELS_OF_A_BUCKET + 1, STEP_BITS, abs(step))
        _put_gap(writer, c, int(kinds[c]), gap, rest[c])
        rest[c] -= gap + 1
    data = writer.done()
    out[: len(data)] = np.frombuffer(data, np.uint8)[: out.size]
    return len(data)


def read_changes(data: Array, foretold: Array, which: Array, sizes: Array, out: Array) -> bool:
    contexts = sizes.size
    reader = Reader(FLAGS + contexts * MODELS_OF_A_BUCKET, data.tobytes())
    kinds, left, rest, last = [0] * contexts, [0] * contexts, sizes.tolist(), 0
    for c in range(contexts):
        if rest[c]:
            way = reader.number(KINDS, KIND_BITS)
            last += way >> 1 if way & 1 else -(way >> 1)
            if not 0 <= last <= MOST_SHIFT:
                return False
            kinds[c], left[c] = last, _get_gap(reader, c, last, rest[c])
            rest[c] -= left[c] + 1
    out[:] = foretold
    for i, c in enumerate(which.tolist()):
        left[c] -= 1
        if left[c] < 0:
            if rest[c] < 0:
                return False
            back = reader.bit(SIGN)
            step = reader.number(FLAGS + c * MODELS_OF_A_BUCKET + 1, STEP_BITS)
            out[i] = int(foretold[i]) + (-step if back else step) & 0xFFFF
            left[c] = _get_gap(reader, c, kinds[c], rest[c])
            rest[c] -= left[c] + 1
    return reader.all_read


def _put_gap(writer: Writer, c: int, shift: int, gap: int, rest: int) -> None:
    whole = 0
    while whole < rest:
        found = gap < rest and gap < whole + (1 << shift)
        writer.bit(FLAGS + c * MODELS_OF_A_BUCKET, found)
        if found:
            if shift:
                writer.even(gap - whole, shift)
            return
        whole += 1 << shift


def _get_gap(reader: Reader, c: int, shift: int, rest: int) -> int:
    gap = 0
    while gap < rest:
        if reader.bit(FLAGS + c * MODELS_OF_A_BUCKET):
            return gap + reader.even(shift)
        gap += 1 << shift
    return rest
