"""Compare the weights of a checkpoint with what a model expects, as `load_state_dict(strict=True)` does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.compare.fitting.expected import Expected, expected_of
from ckpt.compare.fitting.renamings import Renaming, find_renamings, renamed
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.geometry import Shape


@dataclass(frozen=True)
class Reshaped:
    """A tensor that the model expects in another shape."""

    name: str
    shape: Shape
    """In the checkpoint."""
    expected: Shape


@dataclass(frozen=True)
class Retyped:
    """A tensor that the model has in another element type. Loading it rounds or widens its values."""

    name: str
    dtype: str
    """In the checkpoint."""
    expected: str


@dataclass(frozen=True)
class Fit:
    """How the weights and buffers of a checkpoint differ from those that a model expects."""

    fitting: int
    """Tensors that have the right name and no other shape."""
    missing: tuple[str, ...] = ()
    """Names that the model expects, and the checkpoint has not."""
    unexpected: tuple[str, ...] = ()
    """Names that the checkpoint has, and the model does not expect."""
    reshaped: tuple[Reshaped, ...] = ()
    retyped: tuple[Retyped, ...] = ()
    """Other element types are no misfit: libraries convert them while they load."""
    tied: tuple[str, ...] = ()
    """Names that are not there and need not be, because they share a tensor with another name."""
    renamings: tuple[Renaming, ...] = ()
    """Renamings, in this order, under which more would fit: patterns and replacements, as `--rename` takes them."""
    mismatches_after: int = 0
    """How many mismatches would remain after `renamings`."""

    @property
    def ok(self) -> bool:
        """Would the model load it, with every name and every shape as expected?"""
        return not self.mismatches

    @property
    def mismatches(self) -> int:
        """How many names are missing, unexpected, or of another shape."""
        return len(self.missing) + len(self.unexpected) + len(self.reshaped)


@checked
def check(source: Checkpoint, like: Any) -> Fit:
    """Compare the names, shapes and types of the weights and buffers with those of a model. Reads no tensor.

    `like` is another checkpoint, the content of the model's config.json, a module or state dict of torch, or a list of
    names. Raises `UnsupportedError` for a configuration of an unknown family, `InvalidArgumentError` for anything else.
    """
    names = tuple(dict.fromkeys((*source, *source.aliases)))
    fits = [_fit(source, names, names, expected) for expected in expected_of(like, names)]
    return min(fits, key=lambda fit: (fit.mismatches, fit.mismatches_after))


def _fit(source: Checkpoint, names: Sequence[str], new: Sequence[str], expected: Expected) -> Fit:
    """The fit of the names as they are, with renamings that help."""
    fit = _compared(source, dict(zip(new, names, strict=True)), expected)
    if not (fit.missing and fit.unexpected):
        return fit
    renamings, current = find_renamings(names, expected.names), list(names)
    if not renamings:
        return fit
    for one in renamings:
        current = renamed(current, one)
    after = _compared(source, dict(zip(current, names, strict=True)), expected)
    if after.mismatches >= fit.mismatches:
        return fit
    return Fit(
        *(fit.fitting, fit.missing, fit.unexpected, fit.reshaped, fit.retyped, fit.tied),
        renamings=renamings,
        mismatches_after=after.mismatches,
    )


def _compared(source: Checkpoint, names: dict[str, str], expected: Expected) -> Fit:
    """The differences of a checkpoint under other names: the name in the checkpoint by the new one."""
    wanted = set(expected.names)
    tied = tuple(name for name in expected.names if name not in names and expected.ties.get(name) in names)
    missing = tuple(name for name in expected.names if name not in names and name not in tied)
    unexpected = tuple(name for name in names if name not in wanted and expected.ties.get(name) not in wanted)
    reshaped: list[Reshaped] = []
    retyped: list[Retyped] = []
    fitting = 0
    for name, own in names.items():
        if name not in wanted or source.aliases.get(own, own) not in source.parameters:
            continue
        weight = source[own].weight
        shape, dtype = expected.shapes.get(name, weight.shape), expected.dtypes.get(name, weight.dtype.name)
        if shape != weight.shape:
            reshaped.append(Reshaped(name, weight.shape, shape))
        else:
            fitting += 1
        if dtype != weight.dtype.name:
            retyped.append(Retyped(name, weight.dtype.name, dtype))
    return Fit(fitting, missing, unexpected, tuple(reshaped), tuple(retyped), tied)
