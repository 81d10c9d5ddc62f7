"""Inshrinkerator (Agrawal et al., SoCC 2024, arXiv 2306.11800): weights pruned, kept or in clusters; their changes.

Known: three classes of weights by quantiles of a score (here |w|): pruned to 0, protected (the largest 0.5 %, kept in
bfloat16), all others in 2^bits clusters of k-means on a histogram; and that a delta is the difference of cluster
numbers, rearranged by the earlier number, as run lengths and Huffman codes. The paper searches the shares by the
quality of the model; here the caller states them. Clusters begin where those of the earlier state were.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from papers.coding import Array, decode_runs, encode_runs, frame, unframe, unzstd, zstd

PROTECTED = 0.005
_BINS = 1 << 14
_ROUNDS = 25


@dataclass(frozen=True)
class Clustered:
    """What a decoder has of a tensor: 0 is pruned, the last number protected."""

    numbers: Array
    """(n,) uint8."""
    centers: Array
    """(2^bits,) float32."""
    protected: Array
    """bfloat16, in the order of the weights."""

    def values(self) -> Array:
        """(n,) float32."""
        table = np.concatenate([[0], self.centers, [0]]).astype(np.float32)
        values = table[self.numbers]
        values[self.numbers == table.size - 1] = self.protected.astype(np.float32)
        return values


def quantise(weights: Array, bits: int, pruned: float, earlier: Clustered | None = None) -> Clustered:
    """float32 weights in classes."""
    values = weights.reshape(-1)
    size = np.abs(values)
    least, most = (float(np.quantile(size, at)) for at in (pruned, 1 - PROTECTED))
    middle = (size >= least) & (size <= most)
    centers = _k_means(values[middle], 1 << bits, None if earlier is None else earlier.centers)
    edges = (centers[1:] + centers[:-1]) / 2
    numbers = np.zeros(values.size, np.uint8)
    numbers[middle] = 1 + np.searchsorted(edges, values[middle])
    numbers[size > most] = centers.size + 1
    return Clustered(numbers, centers.astype(np.float32), values[size > most].astype(ml_dtypes.bfloat16))


def encode(after: Clustered, before: Clustered) -> bytes:
    classes = after.centers.size + 2
    order = np.argsort(before.numbers, kind="stable")
    change = (after.numbers[order].astype(np.int16) - before.numbers[order]) % classes
    protected = after.protected.view(np.uint8).reshape(-1, 2).T
    return frame(
        encode_runs(change.astype(np.uint8)), after.centers.tobytes(), zstd(np.ascontiguousarray(protected).tobytes())
    )


def decode(data: bytes, before: Clustered) -> Clustered:
    runs, centers, packed = unframe(data)
    table = np.frombuffer(centers, np.float32)
    order = np.argsort(before.numbers, kind="stable")
    numbers = np.empty_like(before.numbers)
    numbers[order] = (before.numbers[order].astype(np.int16) + decode_runs(runs)) % (table.size + 2)
    count = int((numbers == table.size + 1).sum())
    planes = np.frombuffer(unzstd(packed, 2 * count), np.uint8).reshape(2, -1)
    return Clustered(numbers, table, np.ascontiguousarray(planes.T).reshape(-1).view(ml_dtypes.bfloat16))


def _k_means(values: Array, clusters: int, start: Array | None) -> Array:
    """Centers of clusters, from a histogram: (clusters,) float64, ascending."""
    counts, edges = np.histogram(values, _BINS)
    middles = (edges[1:] + edges[:-1]) / 2
    below, sums = np.concatenate([[0], np.cumsum(counts)]), np.concatenate([[0], np.cumsum(counts * middles)])
    centers = np.quantile(values, (np.arange(clusters) + 0.5) / clusters) if start is None else np.sort(start)
    for _ in range(_ROUNDS):
        ends = np.concatenate([[0], np.searchsorted(middles, (centers[1:] + centers[:-1]) / 2), [_BINS]])
        many, total = np.diff(below[ends]), np.diff(sums[ends])
        centers = np.sort(np.where(many > 0, total / np.maximum(many, 1), centers))
    return centers
