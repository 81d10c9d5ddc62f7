"""Plain weights as quantised ones: codes and scales, computed block by block from the weights."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckpt_codecs.quantised.scaled import codes_of, scales_of
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Edit, Parameter
from ckpt_formats.core.dtypes import DTYPES, DType, is_float
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.name_patterns import search
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.quantised.weights import CONFIGS, described, quantised_weights
from ckpt_formats.core.rules import safe_pattern
from ckpt_formats.core.tensor import Array, Blob, BlockBlob, Tensor, read
from ckpt_formats.core.text import printable

SCHEMES_TO_WRITE = ("fp8-block",)
BLOCK = 128
_BAND = 16
"""Blocks side by side that are quantised at once."""
_FP8 = DTYPES["float8_e4m3fn"]
_FLOAT32 = np.dtype(np.float32)
_PLAIN = re.compile(
    r"(?:^|\.)(?:lm_head|output_layer|output|score|classifier|embed\w*|\w*embeddings?|wte|wpe|shared|router|gate"
    r"|shared_expert_gate|\w*norm\w*|ln_\w+)\.weight$"
)
"""Matrices that models in FP8 leave plain: embeddings, the head, routers."""
_NAMES_IN_CONFIG = 100_000


@dataclass(frozen=True)
class Quantise(Edit):
    """Weights as codes and scales."""

    scheme: str
    plain: tuple[str, ...]


@dataclass(frozen=True)
class _Fp8Blob(BlockBlob):
    """A block of what FP8 blocks store of a matrix `base`, (n, m), of a float type."""

    base: Tensor
    box: Box
    name: str
    """The weight."""

    def parts(self) -> tuple[Blob, ...]:
        return (self.base.crop(self._tiles(self.box)),)

    def _tiles(self, box: Box) -> Box:
        """The whole blocks of the matrix in which a block of the stored part lies."""
        raise NotImplementedError

    def _values(self, tiles: Box, reader: Reader) -> Array:
        """The values of whole blocks, float32. Raises `UnsupportedError` for values that have no scale."""
        with np.errstate(over="ignore", invalid="ignore"):
            values = read(self.base.crop(tiles), reader).astype(_FLOAT32)
        if not np.isfinite(values).all():
            raise UnsupportedError(
                f"`{printable(self.name)}` has values that are NaN or infinite, so its blocks have no scale",
                hint="`ckpt verify --values` says where they are.",
            )
        return values


@dataclass(frozen=True)
class Fp8CodesBlob(_Fp8Blob):
    """Codes of FP8: a block of (n, m)."""

    @property
    def dtype(self) -> DType:
        return _FP8

    def _tiles(self, box: Box) -> Box:
        return _outer(box, self.base.shape)

    def read_into(self, out: Array, reader: Reader) -> None:
        """Fill `out`, (rows, columns) of the dtype float8_e4m3fn."""
        for band in _bands(self._tiles(self.box)):
            values = self._values(band, reader)
            codes = np.empty(values.shape, _FP8)
            codes_of(values, scales_of(values, (BLOCK, BLOCK)), (BLOCK, BLOCK), codes)
            common = band & self.box
            if common is not None:
                out[common.within(self.box).index] = codes[common.within(band).index]


@dataclass(frozen=True)
class Fp8ScalesBlob(_Fp8Blob):
    """Scales of FP8 blocks: a block of (ceil(n / 128), ceil(m / 128))."""

    @property
    def dtype(self) -> DType:
        return _FLOAT32

    def _tiles(self, box: Box) -> Box:
        start = tuple(at * BLOCK for at in box.start)
        stop = tuple(min(at * BLOCK, n) for at, n in zip(box.stop, self.base.shape, strict=True))
        return Box(start, stop)

    def read_into(self, out: Array, reader: Reader) -> None:
        """Fill `out`, (rows, columns) float32."""
        for band in _bands(self._tiles(self.box)):
            place = Box(tuple(at // BLOCK for at in band.start), tuple(-(-at // BLOCK) for at in band.stop))
            out[place.within(self.box).index] = scales_of(self._values(band, reader), (BLOCK, BLOCK))


def _outer(box: Box, shape: Shape) -> Box:
    start = tuple(at // BLOCK * BLOCK for at in box.start)
    return Box(start, tuple(min(-(-at // BLOCK) * BLOCK, n) for at, n in zip(box.stop, shape, strict=True)))


def _bands(tiles: Box) -> Sequence[Box]:
    """Whole blocks in pieces: one row of at most `_BAND` blocks each."""
    (top, left), (bottom, right) = tiles.start, tiles.stop
    width = _BAND * BLOCK
    return [
        Box((row, column), (min(row + BLOCK, bottom), min(column + width, right)))
        for row in range(top, bottom, BLOCK)
        for column in range(left, right, width)
    ]


def quantised(source: Checkpoint, scheme: str, plain: Sequence[str] = ()) -> Checkpoint:
    """See `Checkpoint.quantise`."""
    if scheme not in SCHEMES_TO_WRITE:
        raise InvalidArgumentError(f"{scheme!r:.40} is no scheme that ckpt writes: {', '.join(SCHEMES_TO_WRITE)}")
    for pattern in plain:
        safe_pattern(pattern, "--leave-plain")
        if not any(search(pattern, name) for name in source.parameters):
            raise NoMatchError(f"no parameter matches `{printable(pattern)}`", hint="`ckpt inspect` lists their names.")
    if weights := quantised_weights(source):
        raise UnsupportedError(
            f"{described(weights)} cannot be quantised again", where=source.path, hint="Add --dtype fp32."
        )
    chosen = [one.name for one in source.parameters.values() if _is_chosen(one, plain)]
    if not chosen:
        raise UnsupportedError("has no matrices of linear layers to quantise", where=source.path)
    trained = next((n for n in chosen if source.parameters[n].states.keys() - {MASTER, MODEL}), None)
    if trained is not None:
        raise UnsupportedError(
            f"`{printable(trained)}` has states of an optimizer, which codes cannot have",
            where=source.path,
            hint="Add --model-only.",
        )
    tied = next((alias for alias, name in source.aliases.items() if name in chosen), None)
    if tied is not None:
        raise UnsupportedError(
            f"`{printable(tied)}` is tied to a weight that would be quantised",
            where=source.path,
            hint="Name the weight with --leave-plain.",
        )
    parameters, own = dict[str, Parameter](), set(chosen)
    for name, parameter in source.parameters.items():
        if name not in own:
            parameters[name] = parameter
            continue
        base = parameter.states.get(MASTER, parameter.weight)
        grid = tuple(-(-n // BLOCK) for n in base.shape)
        codes = Tensor.of(Fp8CodesBlob(base, Box.whole(base.shape), name))
        scales = Tensor.of(Fp8ScalesBlob(base, Box.whole(grid), name))
        parameters[name] = replace(parameter, states={MODEL: codes}, values={})
        parameters[f"{name}_scale_inv"] = Parameter(f"{name}_scale_inv", parameter.role, {MODEL: scales})
    return replace(
        source,
        parameters=parameters,
        extras=_with_config(source, own),
        notices=tuple(dict.fromkeys((*source.notices, *_notices(source, chosen, scheme)))),
        digests={key: digest for key, digest in source.digests.items() if key[0] not in own},
        errors={key: figures for key, figures in source.errors.items() if key[0] not in own},
        history=(*source.history, Quantise(scheme, tuple(plain))),
    )


def _is_chosen(parameter: Parameter, plain: Sequence[str]) -> bool:
    weight = parameter.weight
    is_matrix = parameter.role != "extra" and len(weight.shape) == 2 and is_float(weight.dtype) and weight.size > 0
    named = parameter.name.endswith(".weight") and not _PLAIN.search(parameter.name)
    return is_matrix and named and not any(search(pattern, parameter.name) for pattern in plain)


def _with_config(source: Checkpoint, chosen: set[str]) -> dict[str, object]:
    """The extras, with a configuration that states the quantisation."""
    extras: dict[str, object] = dict(source.extras)
    config = extras.get(CONFIGS[0])
    if isinstance(config, dict):
        others = [
            name.removesuffix(".weight")
            for name, one in source.parameters.items()
            if name not in chosen and name.endswith(".weight") and one.role != "extra" and len(one.weight.shape) == 2
        ]
        stated = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": others[:_NAMES_IN_CONFIG],
        }
        extras[CONFIGS[0]] = {**config, "quantization_config": stated}
    return extras


def _notices(source: Checkpoint, chosen: Sequence[str], scheme: str) -> list[Notice]:
    count = f"{len(chosen):,} weight{'s' * (len(chosen) != 1)}"
    notices = [Notice(f"quantised to {scheme}, values are rounded: {count}", tuple(chosen))]
    ragged = [name for name in chosen if any(n % BLOCK for n in source.parameters[name].weight.shape)]
    if ragged:
        notices.append(Notice("with smaller blocks at their ends, which transformers does not read", tuple(ragged)))
    if not isinstance(source.extras.get(CONFIGS[0]), dict):
        notices.append(Notice("there is no config.json that could state the quantisation"))
    return notices
