"""What is quantised in a checkpoint: each weight with its scheme, its bits and the bytes that it takes."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ckpt_codecs.quantised.gguf_blocks import GgufBlocks
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.quantised.blob import QuantisedBlob
from ckpt_formats.core.quantised.plain import plain_model
from ckpt_formats.core.quantised.weights import parts_of, quantised_weights
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.tensor import Tensor


@dataclass(frozen=True)
class QuantisedParameter:
    """One weight that is stored as codes, with all that turns them into numbers."""

    name: str
    """Of the plain weight; of the module, if ckpt does not decode the scheme."""
    scheme: str
    bits: float | None
    """Bits of a code, in blocks of llama.cpp with its share of the scales; None if ckpt does not decode the scheme."""
    shape: Shape | None
    """Of the plain weight; None if ckpt does not decode the scheme."""
    stored_nbytes: int
    """Bytes of codes, scales, zero points and tables together."""
    parts: tuple[str, ...]
    """The names of the tensors that have them."""
    problem: str | None = None
    """Why ckpt does not decode it."""


@dataclass(frozen=True)
class QuantisedOverview:
    """All quantised weights of a checkpoint."""

    parameters: tuple[QuantisedParameter, ...]
    bits_per_weight: float | None
    """Bits of the whole model, plain weights included, for each of its numbers; None if a scheme is not decoded."""


def quantised_overview(source: Checkpoint) -> QuantisedOverview | None:
    """Describe what is quantised, or return None if nothing is. Only small tensors that describe weights are read.

    Raises `CkptError` if such a tensor cannot be read.
    """
    weights = (*_of_modules(source), *_of_blocks(source))
    if not weights:
        return None
    if any(one.shape is None for one in weights):
        return QuantisedOverview(weights, None)
    quantised = {name for one in weights for name in one.parts}
    unused = parts_of(quantised_weights(source)).keys() - quantised
    plain = [
        parameter.weight
        for name, parameter in source.parameters.items()
        if parameter.role != "extra" and name not in quantised and name not in unused
    ]
    sizes = [prod(one.shape) for one in weights if one.shape is not None] + [tensor.size for tensor in plain]
    nbytes = sum(one.stored_nbytes for one in weights) + sum(tensor.nbytes for tensor in plain)
    return QuantisedOverview(weights, 8 * nbytes / sum(sizes) if sum(sizes) else None)


def _of_modules(source: Checkpoint) -> Iterator[QuantisedParameter]:
    """Weights whose codes and scales are tensors of their own."""
    weights = quantised_weights(source)
    if not weights:
        return
    model = plain_model(source)
    for one in model.weights:
        nbytes = sum(source.parameters[name].weight.nbytes for name in one.parts)
        bits = float(one.quantisation.code_bits)
        yield QuantisedParameter(one.name, one.scheme, bits, one.tensor.shape, nbytes, one.parts)
    for weight in weights:
        if (problem := model.failures.get(weight.module or weight.parts[0])) is not None:
            nbytes = sum(source.parameters[name].weight.nbytes for name in weight.parts)
            name = weight.module or weight.parts[0]
            yield QuantisedParameter(name, weight.scheme, None, None, nbytes, weight.parts, problem)


def _of_blocks(source: Checkpoint) -> Iterator[QuantisedParameter]:
    """Weights that are stored in blocks, as llama.cpp does."""
    if isinstance(source.parameters, TabulatedParameters):
        return  # these are plain tensors
    for name, parameter in source.parameters.items():
        blob = _quantised_blob(parameter.weight) if parameter.role != "extra" else None
        if blob is not None and isinstance(blob.quantisation, GgufBlocks):
            nbytes, bits = sum(part.nbytes for part in blob.stored), float(blob.quantisation.code_bits)
            yield QuantisedParameter(name, blob.quantisation.type, bits, parameter.shape, nbytes, (name,))


def _quantised_blob(tensor: Tensor) -> QuantisedBlob | None:
    fragments = tensor.fragments
    blob = fragments[0].blob if type(fragments) is tuple and len(fragments) == 1 else None
    return blob if isinstance(blob, QuantisedBlob) else None
