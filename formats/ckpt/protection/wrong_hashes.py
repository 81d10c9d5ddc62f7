"""Find hashes of a manifest that are wrong: what is in their blocks fits all others of the stripe.

A bit that flips in memory before the manifest gets its checksum is in all copies. The block is then taken for damaged,
and counts among those that parity replaces; with one more that is lost, both would be. But parities know what is right.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import xxhash

from ckpt_formats.parity.blocks import BlockAddress, ProtectedFolder, ThreadReaders, combine
from ckpt_formats.parity.code import recovery_matrix

_MOST = 64
"""Blocks that are tried although parity replaces them: it is rarely the hash that is wrong."""


def wrong_hashes(
    folder: ProtectedFolder, bad: Mapping[BlockAddress, bytes | None], irreplaceable: Collection[BlockAddress]
) -> dict[BlockAddress, bytes]:
    """Return the blocks whose hash in the manifest is wrong, each with the right one.

    bad: the blocks that do not fit their hash, each with that of what is there. irreplaceable: those of them that
    parity does not replace, because too many of their stripe are bad.
    """
    there = [at for at, digest in bad.items() if digest is not None]
    if len(there) > _MOST:
        there = [at for at in there if at in irreplaceable]
    stripes = defaultdict[tuple[int, int], list[BlockAddress]](list)
    for at in bad:
        stripes[at.group, at.stripe].append(at)
    result = dict[BlockAddress, bytes]()
    with ThreadReaders(1) as threads:
        for at in there:
            others = [one for one in stripes[at.group, at.stripe] if one != at and one not in result]
            digest = bad[at]
            if digest is not None and folder.places and _fits(folder, at, others, threads):
                result[at] = digest
    return result


def _fits(folder: ProtectedFolder, at: BlockAddress, bad: Iterable[BlockAddress], threads: ThreadReaders) -> bool:
    """Whether a block and good ones give another one of the stripe, which fits its hash.

    Each block has a factor in each other one: what is in its place is right, up to the length of the stripe.
    """
    group = folder.manifest.groups[at.group]
    data, wrong = len(group.domains), {one.column for one in bad}
    blocks = {one.column: one for one in folder.blocks_of(at.group, at.stripe)}
    good = [column for column in range(data + group.parities) if column not in wrong | {at.column}]
    good.sort(key=lambda column: column in blocks)  # of a domain without a block here, zeros are known
    chosen = sorted([at.column, *good[: data - 1]])
    witness = next((column for column in (*good[data - 1 :], *sorted(wrong)) if column in blocks), None)
    if len(chosen) < data or witness is None:
        return False
    sources = [column for column in chosen if column in blocks]
    matrix = recovery_matrix(data, group.parities, chosen, [witness])
    factors = np.ascontiguousarray(matrix[:, [chosen.index(column) for column in sources]])
    places, nbytes = [folder.place(blocks[column]) for column in sources], group.stripe_nbytes[at.stripe]
    _, sums = combine(threads.reader, places, factors, nbytes, threads.buffers)
    length = folder.place(blocks[witness]).nbytes
    is_right = xxhash.xxh3_128_digest(sums[0, :length].data) == folder.hash(blocks[witness])
    return is_right and not sums[0, length:].any()
