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
from ckpt_codecs.lossy import state_types as forms
from ckpt_codecs.lossy.byte_reader import ByteReader, length_prefixed

EXACT, CLUSTERS = 0, 1
ITERATIONS, CAP = 25, 2.5
DANGER = 0.99
"""`beta2` from which pruned second moments are known to blow training up."""
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 20}]


@dataclass(frozen=True)
class Excp(DeltaCodec):
    """Prunes the change of the weights and both moments together, and clusters what is left.

    A change is kept where it is above `min(2.5, alpha / sqrt(mean(v))) * median(|change|)`,
    moments where the change is kept and `|m| > beta * mean(|m|)`. What is kept becomes the
    nearest of 2^bits - 1 centres. As published, but chunk by chunk, with centres in float32,
    first centres at quantiles instead of at random, and LZMA instead of 7zip.

    Second moments are set to zero where they are pruned: the next steps divide by nearly
    nothing. With `beta2` at 0.999 training was seen to blow up.
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
                raise CodecError(f"{name} is a number of at least 0, not {value!r}")
        if self.bits not in (2, 4, 8):
            raise CodecError("bits are 2, 4 or 8")

    def warning(self, step: StepInfo) -> str | None:
        """What the user of this codec should know about this run."""
        betas = step.options.get("betas")
        beta2 = betas[1] if isinstance(betas, list | tuple) and len(betas) == 2 else None
        if isinstance(beta2, int | float) and beta2 < DANGER:
            return None
        known = "unknown" if beta2 is None else f"{beta2:g}"
        return (
            f"excp sets second moments to zero where it prunes them, and beta2 is {known}: "
            "training restored from it may blow up; use subspace instead"
        )

    def encode(self, change: StatePair) -> bytes:
        form = {name: array.dtype for name, array in change.after.items()}
        forms.check(form)
        kept = self._kept(change)
        made = []
        for name in forms.in_order(form):
            if name in kept:
                made.append(bytes([CLUSTERS]) + length_prefixed(self._clustered(kept[name])))
            else:
                made.append(bytes([EXACT]) + length_prefixed(bytes(Planes().encode(change.after[name], None))))
        return b"".join(made)

    def _kept(self, change: StatePair) -> dict[str, Array]:
        """Of the weights the change, of moments the values, with zeros for what is pruned. None of it if not finite."""
        name = forms.weights_of(change.after)
        if name is None or name not in change.before:
            return {}
        states = [s for s in (name, "exp_avg", "exp_avg_sq") if s in change.after]
        if any(change.after[s].dtype.name != "float32" for s in states):
            return {}
        values = {s: forms.to_float32(change.after[s]) for s in states}
        with np.errstate(over="ignore", invalid="ignore"):
            delta = values[name] - forms.to_float32(change.before[name])
        if not all(np.isfinite(x).all() for x in (*values.values(), delta)) or not delta.size:
            return {}
        threshold = CAP
        if "exp_avg_sq" in values:
            mean = float(values["exp_avg_sq"].mean(dtype=np.float64))
            threshold = min(CAP, self.alpha / sqrt(mean)) if mean > 0 else CAP
        delta = np.where(np.abs(delta) > threshold * float(np.median(np.abs(delta))), delta, np.float32(0))
        kept = {name: delta}
        if "exp_avg" in values:
            size = np.abs(values["exp_avg"])
            mask = (size > self.beta * float(size.mean(dtype=np.float64))) & (delta != 0)
            kept |= {s: np.where(mask, values[s], np.float32(0)) for s in ("exp_avg", "exp_avg_sq") if s in values}
        return kept

    def _clustered(self, values: Array) -> bytes:
        """How many centres, the centres, the codes: packed, the first lowest, and compressed."""
        flat = values.reshape(-1)
        some = flat[flat != 0]
        centres = _centres(some, (1 << self.bits) - 1)
        codes = np.zeros(flat.size, np.uint8)
        codes[flat != 0] = 1 + np.searchsorted((centres[1:] + centres[:-1]) / 2, some)
        per = 8 // self.bits
        padded = np.zeros(-(-flat.size // per) * per, np.uint8)
        padded[: flat.size] = codes
        packed = np.zeros(padded.size // per, np.uint8)
        for i in range(per):
            packed |= padded[i::per] << np.uint8(self.bits * i)
        return (
            bytes([centres.size])
            + centres.tobytes()
            + lzma.compress(packed.tobytes(), lzma.FORMAT_RAW, filters=_FILTERS)
        )

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        source, made = ByteReader(data), {}
        weights = forms.weights_of(form)
        for name in forms.in_order(form):
            (kind,), held = source.take(1), source.piece()
            if wanted is not None and name not in wanted:
                continue
            if kind == EXACT:
                made[name] = Planes().decode(held, shape, form[name], None)
                continue
            if kind != CLUSTERS or form[name].name != "float32" or (name == weights and name not in before):
                raise CodecError(f"a chunk of excp holds {name} in no way that is known")
            values = self._values(held, forms.matrix_shape(shape))
            with np.errstate(over="ignore", invalid="ignore"):
                values = forms.to_float32(before[name]) + values if name == weights else values
            made[name] = values.reshape(shape)
        source.end()
        return {name: made[name] for name in form if name in made}

    def _values(self, held: bytes, matrix: tuple[int, int]) -> Array:
        source = ByteReader(held)
        (many,) = source.take(1)
        centres = np.frombuffer(source.take(4 * many), np.float32)
        size, per = matrix[0] * matrix[1], 8 // self.bits
        packed = np.frombuffer(_expanded(held[1 + 4 * many :], -(-size // per)), np.uint8)
        codes = np.stack([(packed >> np.uint8(self.bits * i)) & np.uint8((1 << self.bits) - 1) for i in range(per)], 1)
        codes = codes.reshape(-1)[:size]
        if codes.max(initial=0) > many:
            raise CodecError("a chunk of excp has a code without a centre")
        return np.concatenate([np.zeros(1, np.float32), centres])[codes].reshape(matrix)


def _expanded(data: bytes, size: int) -> bytes:
    try:
        source = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_FILTERS)
        made = source.decompress(data, max_length=size + 1)
    except lzma.LZMAError as error:
        raise CodecError(f"lzma: {error}") from None
    if len(made) != size or not source.eof or source.unused_data:
        raise CodecError(f"a chunk of excp does not hold {size} bytes")
    return made


def _centres(values: Array, many: int) -> Array:
    """K-means in one dimension: ascending centres as float32, fewer where there are fewer values."""
    ordered = np.sort(values.astype(np.float64))
    distinct = np.unique(ordered)
    if distinct.size <= many:
        return distinct.astype(np.float32)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    centres = np.unique(ordered[(np.arange(many) * 2 + 1) * ordered.size // (2 * many)])
    for _ in range(ITERATIONS):
        edges = np.concatenate([[0], np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2), [ordered.size]])
        counts = np.diff(edges)
        centres = np.where(counts > 0, (sums[edges[1:]] - sums[edges[:-1]]) / np.maximum(counts, 1), centres)
    return np.unique(centres.astype(np.float32))
