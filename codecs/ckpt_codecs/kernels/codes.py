# mypy: ignore-errors
"""Canonical Huffman codes of at most 11 bits: from how often symbols occur to the lengths and bits of their codes."""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import BYTES, COUNTS, NUMBERS32, OUT, OUT32, SIZE, kernel, part
from ckpt_codecs.kernels.memory import load64

LONGEST = 11
STREAMS = 8
ENTRIES = 1 << LONGEST

U64 = types.uint64
BYTE = np.uint64(255)


@part
def share(size):
    """Symbols in each stream but the last ones."""
    return (size + STREAMS - 1) // STREAMS


@kernel(types.void, BYTES, COUNTS)
def count(plane, counts):
    """How often each symbol occurs in each stream. Eight tables by turns, since one would wait for its own sums."""
    size = plane.size
    each = share(size)
    one = types.uint32(1)
    table = np.empty(2048, np.uint32)
    for s in range(STREAMS):
        start, stop = min(s * each, size), min((s + 1) * each, size)
        whole = start + (stop - start) // 8 * 8
        table[:] = 0
        for i in range(start, whole, 8):
            word = load64(plane, i)
            table[word & BYTE] += one
            table[((word >> U64(8)) & BYTE) + U64(256)] += one
            table[((word >> U64(16)) & BYTE) + U64(512)] += one
            table[((word >> U64(24)) & BYTE) + U64(768)] += one
            table[((word >> U64(32)) & BYTE) + U64(1024)] += one
            table[((word >> U64(40)) & BYTE) + U64(1280)] += one
            table[((word >> U64(48)) & BYTE) + U64(1536)] += one
            table[(word >> U64(56)) + U64(1792)] += one
        for i in range(whole, stop):
            table[plane[i]] += one
        for symbol in range(256):
            n = table[symbol]
            for turn in range(256, 2048, 256):
                n += table[symbol + turn]
            counts[s, symbol] = n


@part
def _depths(a, n):
    """From ascending weights to the depths of their leaves."""
    a[0] += a[1]
    root, leaf = 0, 2
    for node in range(1, n - 1):
        if leaf >= n or a[root] < a[leaf]:
            a[node] = a[root]
            a[root] = node
            root += 1
        else:
            a[node] = a[leaf]
            leaf += 1
        if leaf >= n or (root < node and a[root] < a[leaf]):
            a[node] += a[root]
            a[root] = node
            root += 1
        else:
            a[node] += a[leaf]
            leaf += 1
    a[n - 2] = 0
    for node in range(n - 3, -1, -1):
        a[node] = a[a[node]] + 1
    free, depth, root, node = 1, 0, n - 2, n - 1
    while free > 0:
        inner = 0
        while root >= 0 and a[root] == depth:
            inner += 1
            root -= 1
        while free > inner:
            a[node] = depth
            node -= 1
            free -= 1
        free = 2 * inner
        depth += 1


@part
def _limit(lengths, n):
    """Shorten to the limit, pay with the rarest symbols that can be longer, give what is left to the commonest."""
    taken = 0
    for i in range(n):
        lengths[i] = min(lengths[i], LONGEST)
        taken += 1 << (LONGEST - lengths[i])
    rarest = 0
    while taken > ENTRIES:
        while lengths[rarest] == LONGEST:
            rarest += 1
        lengths[rarest] += 1
        taken -= 1 << (LONGEST - lengths[rarest])
    while taken < ENTRIES:
        for i in range(n - 1, -1, -1):
            step = 1 << (LONGEST - lengths[i])
            if lengths[i] > 1 and taken + step <= ENTRIES:
                lengths[i] -= 1
                taken += step
                break


@kernel(SIZE, COUNTS, OUT32, NUMBERS32, OUT, short=True)
def assign(counts, total, order, lengths):
    """Lengths of an optimal code, near optimal where it would be longer than 11 bits. Returns how many symbols occur.

    In place on the sorted counts, after Moffat and Katajainen (1995).
    """
    used = 0
    for symbol in range(256):
        lengths[symbol] = 0
        n = types.uint32(0)
        for s in range(STREAMS):
            n += counts[s, symbol]
        if n:
            at = used
            while at and total[at - 1] > n:
                total[at], order[at] = total[at - 1], order[at - 1]
                at -= 1
            total[at], order[at] = n, symbol
            used += 1
    if used < 2:
        return used
    weight = np.empty(256, np.int64)
    for i in range(used):
        weight[i] = total[i]
    _depths(weight, used)
    _limit(weight, used)
    for i in range(used):
        lengths[order[i]] = weight[i]
    return used


@part
def span(lengths):
    first, last = 0, 255
    while first < 255 and not lengths[first]:
        first += 1
    while last > first and not lengths[last]:
        last -= 1
    return first, last


@part
def stream_size(counts, lengths, s):
    bits = types.int64(7)
    for symbol in range(256):
        bits += types.int64(counts[s, symbol]) * types.int64(lengths[symbol])
    return bits >> 3


@kernel(SIZE, COUNTS, BYTES, short=True)
def cost(counts, lengths):
    """Bytes that `encode` will write."""
    first, last = span(lengths)
    size = 2 + (last - first + 2) // 2 + 4 * STREAMS
    for s in range(STREAMS):
        size += stream_size(counts, lengths, s)
    return size


@part
def canonical(lengths, codes):
    """Canonical codes, the first bit lowest."""
    code = 0
    for length in range(1, LONGEST + 1):
        for symbol in range(256):
            if lengths[symbol] == length:
                turned = 0
                for bit in range(length):
                    turned |= ((code >> bit) & 1) << (length - 1 - bit)
                codes[symbol] = turned
                code += 1
        code <<= 1
