"""ExCP (Li et al., "Extreme LLM Checkpoint Compression via Weight-Momentum Joint Shrinking", ICML 2024)."""

import lzma
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes, StepInfo
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.lossy import state_types
from ckpt_codecs.lossy.byte_reader import ByteReader, length_prefixed

EXACT, CLUSTERS = 0, 1
ITERATIONS, CAP = 25, 2.5
UNSAFE_BETA2 = 0.99
"""From this `beta2` on, training with pruned second moments is known to diverge."""
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 20}]


@dataclass(frozen=True)
class Excp(DeltaCodec):
    """Prunes the change of the weights and both moments together, and clusters the remaining values.

    A change remains where it is above `min(2.5, alpha / sqrt(mean(v))) * median(|change|)`, moments where the change
    remains and `|m| > beta * mean(|m|)`. Each remaining value becomes the nearest of 2^bits - 1 centers. This is the
    published method, except that it works chunk by chunk, with centers in float32, with first centers at quantiles
    instead of at random, and with LZMA instead of 7zip.

    Pruned second moments are set to zero, so the next steps divide by very small numbers. In our measurements,
    training with `beta2` = 0.999 diverges.
    """

    name: ClassVar[str] = "excp"
    lossless: ClassVar[bool] = False

    alpha: float = 5e-5
    beta: float = 2.0
    bits: int = 4

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
                raise CodecError(f"{name} must be a number of at least 0, not {value!r}")
        if self.bits not in (2, 4, 8):
            raise CodecError("bits must be 2, 4 or 8")

    def warning(self, step: StepInfo) -> str | None:
        """The warning about a run whose `beta2` is unknown or too large; else None."""
        betas = step.options.get("betas")
        beta2 = betas[1] if isinstance(betas, list | tuple) and len(betas) == 2 else None
        if isinstance(beta2, int | float) and beta2 < UNSAFE_BETA2:
            return None
        known = "unknown" if beta2 is None else f"{beta2:g}"
        return (
            f"excp sets second moments to zero where it prunes them, and beta2 is {known}: "
            "training that continues from this checkpoint may diverge; use subspace instead"
        )

    def encode(self, change: StatePair) -> bytes:
        form = {name: array.dtype for name, array in change.after.items()}
        state_types.check(form)
        pruned = self._prune(change)
        sections = []
        for name in state_types.in_order(form):
            if name in pruned:
                sections.append(bytes([CLUSTERS]) + length_prefixed(self._encode_clusters(pruned[name])))
            else:
                sections.append(bytes([EXACT]) + length_prefixed(bytes(Planes().encode(change.after[name], None))))
        return b"".join(sections)

    def _prune(self, change: StatePair) -> dict[str, Array]:
        """The change of the weights and the moments, with zeros where they are pruned: each (n, m) float32.

        Empty if the chunk has no weights before, or if values are not float32 and finite.
        """
        name = state_types.weights_of(change.after)
        if name is None or name not in change.before:
            return {}
        states = [s for s in (name, "exp_avg", "exp_avg_sq") if s in change.after]
        if any(change.after[s].dtype.name != "float32" for s in states):
            return {}
        values = {s: state_types.to_float32(change.after[s]) for s in states}
        with np.errstate(over="ignore", invalid="ignore"):
            delta = values[name] - state_types.to_float32(change.before[name])
        if not all(np.isfinite(x).all() for x in (*values.values(), delta)) or not delta.size:
            return {}
        threshold = CAP
        if "exp_avg_sq" in values:
            mean = float(values["exp_avg_sq"].mean(dtype=np.float64))
            threshold = min(CAP, self.alpha / sqrt(mean)) if mean > 0 else CAP
        delta = np.where(np.abs(delta) > threshold * float(np.median(np.abs(delta))), delta, np.float32(0))
        pruned = {name: delta}
        if "exp_avg" in values:
            size = np.abs(values["exp_avg"])
            mask = (size > self.beta * float(size.mean(dtype=np.float64))) & (delta != 0)
            pruned |= {s: np.where(mask, values[s], np.float32(0)) for s in ("exp_avg", "exp_avg_sq") if s in values}
        return pruned

    def _encode_clusters(self, values: Array) -> bytes:
        """The count of centers, the centers, and the codes: packed into bytes, the first lowest, and compressed.

        `values`: (n, m) float32.
        """
        flat = values.reshape(-1)
        nonzero = flat[flat != 0]
        centers = _centers(nonzero, (1 << self.bits) - 1)
        codes = np.zeros(flat.size, np.uint8)
        codes[flat != 0] = 1 + np.searchsorted((centers[1:] + centers[:-1]) / 2, nonzero)
        codes_per_byte = 8 // self.bits
        padded = np.zeros(-(-flat.size // codes_per_byte) * codes_per_byte, np.uint8)
        padded[: flat.size] = codes
        packed = np.zeros(padded.size // codes_per_byte, np.uint8)
        for i in range(codes_per_byte):
            packed |= padded[i::codes_per_byte] << np.uint8(self.bits * i)
        return (
            bytes([centers.size])
            + centers.tobytes()
            + lzma.compress(packed.tobytes(), lzma.FORMAT_RAW, filters=_FILTERS)
        )

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        source, decoded = ByteReader(data), {}
        weights = state_types.weights_of(form)
        for name in state_types.in_order(form):
            (kind,), content = source.take(1), source.part()
            if wanted is not None and name not in wanted:
                continue
            if kind == EXACT:
                decoded[name] = Planes().decode(content, shape, form[name], None)
                continue
            if kind != CLUSTERS or form[name].name != "float32" or (name == weights and name not in before):
                raise CodecError(f"a chunk of excp has an unknown kind for {name}")
            if name == weights and before[name].shape != shape:
                raise CodecError(f"a chunk of excp needs the {name} before it in its shape")
            values = self._decode_clusters(content, state_types.matrix_shape(shape))
            with np.errstate(over="ignore", invalid="ignore"):
                values = state_types.to_float32(before[name]) + values if name == weights else values
            decoded[name] = values.reshape(shape)
        source.end()
        return {name: decoded[name] for name in form if name in decoded}

    def _decode_clusters(self, content: bytes, matrix: tuple[int, int]) -> Array:
        """The values of clusters: (n, m) float32. `matrix`: (n, m)."""
        source = ByteReader(content)
        (count,) = source.take(1)
        centers = np.frombuffer(source.take(4 * count), np.float32)
        size, codes_per_byte = matrix[0] * matrix[1], 8 // self.bits
        packed = np.frombuffer(_decompress(content[1 + 4 * count :], -(-size // codes_per_byte)), np.uint8)
        mask = np.uint8((1 << self.bits) - 1)
        codes = np.stack([(packed >> np.uint8(self.bits * i)) & mask for i in range(codes_per_byte)], 1)
        codes = codes.reshape(-1)[:size]
        if codes.max(initial=0) > count:
            raise CodecError("a chunk of excp has a code without a center")
        return np.concatenate([np.zeros(1, np.float32), centers])[codes].reshape(matrix)


def _decompress(data: bytes, size: int) -> bytes:
    try:
        source = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_FILTERS)
        content = source.decompress(data, max_length=size + 1)
    except lzma.LZMAError as error:
        raise CodecError(f"lzma: {error}") from None
    if len(content) != size or not source.eof or source.unused_data:
        raise CodecError(f"a chunk of excp does not decompress to {size} bytes")
    return content


def _centers(values: Array, count: int) -> Array:
    """Ascending centers of k-means in one dimension: (k,) float32, k <= `count`. `values`: (n,) float32."""
    ordered = np.sort(values.astype(np.float64))
    distinct = np.unique(ordered)
    if distinct.size <= count:
        return distinct.astype(np.float32)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    centers = np.unique(ordered[(np.arange(count) * 2 + 1) * ordered.size // (2 * count)])
    for _ in range(ITERATIONS):
        edges = np.concatenate([[0], np.searchsorted(ordered, (centers[1:] + centers[:-1]) / 2), [ordered.size]])
        counts = np.diff(edges)
        centers = np.where(counts > 0, (sums[edges[1:]] - sums[edges[:-1]]) / np.maximum(counts, 1), centers)
    return np.unique(centers.astype(np.float32))
