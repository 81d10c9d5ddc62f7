"""What does not fit between a run and a checkpoint, and the error that says so."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.edits import WeightsOnly
from ckpt_formats.core.errors import IncompleteError, InvalidArgumentError, UnsupportedError
from ckpt_formats.core.quantised.weights import parts_of, quantised_weights
from ckpt_formats.core.text import list_names, printable

_DEQUANTISE = 'Load plain weights: `ckpt.open(path).cast("bf16")` dequantises them.'
_SHOWN = 4
"""The names of a kind that an error shows."""


@dataclass
class Mismatches:
    """What does not fit between the model and a checkpoint. Names are the model's; a state follows in parentheses."""

    missing: dict[str, None] = field(default_factory=dict)
    """What the checkpoint lacks."""
    shapes: dict[str, str] = field(default_factory=dict)
    """Both shapes, as text."""
    cast: dict[str, str] = field(default_factory=dict)
    """What has another dtype, with both dtypes, as text."""
    refused: dict[str, str] = field(default_factory=dict)
    """What would be rounded and must not be, with both dtypes, as text."""
    codes: dict[str, str] = field(default_factory=dict)
    """Codes or scales of quantised weights for memory of another dtype, with both dtypes, as text."""


def check_rounding(mismatches: Mismatches, source: Checkpoint, target: str) -> None:
    """Raise `UnsupportedError` for values that would be rounded and must not be. `target`: what is loaded into."""
    if mismatches.codes:
        name, dtypes = next(iter(mismatches.codes.items()))
        raise UnsupportedError(
            f"{len(mismatches.codes)} tensors are codes or scales of quantised weights, which mean nothing in another "
            f"type, such as `{printable(name)}`: {dtypes}",
            where=source.path,
            hint=_DEQUANTISE,
        )
    if mismatches.refused:
        name, dtypes = next(iter(mismatches.refused.items()))
        raise UnsupportedError(
            f"{len(mismatches.refused)} tensors would be rounded, such as `{printable(name)}`: {dtypes}",
            where=source.path,
            hint=f'Allow it with rounding="all", or give the {target} the dtypes of the checkpoint.',
        )


def check_fit(
    mismatches: Mismatches, missing: Sequence[str], unexpected: Sequence[str], strict: bool, source: Checkpoint
) -> None:
    """Raise an error for what does not fit; unless `strict`, only for values that would be rounded."""
    check_rounding(mismatches, source, "run")
    missing = () if source.is_partial else missing
    if any(isinstance(edit, WeightsOnly) for edit in source.history):
        missing = [name for name in missing if not name.endswith(")")]
    if not strict or not (missing or unexpected or mismatches.shapes):
        return
    shapes = [f"`{name}` ({text})" for name, text in mismatches.shapes.items()]
    lists = (
        ("missing", listed(missing)),
        ("unexpected", listed(unexpected)),
        ("mismatched", list_names(shapes, str, _SHOWN)),
    )
    what = "; ".join(f"{kind}: {text}" for kind, text in lists if text)
    error = IncompleteError if missing else InvalidArgumentError
    codes = parts_of(quantised_weights(source)).keys()
    hint = _hint(missing, unexpected) if codes.isdisjoint(unexpected) else _DEQUANTISE
    raise error(f"the checkpoint does not fit the run: {what}", where=source.path, hint=hint)


def listed(names: Iterable[str]) -> str:
    """Return the first names as messages show them, and how many more there are; empty if there are none."""
    return list_names(list(names), max_count=_SHOWN)


def _hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What would make the names fit: another prefix, if that is all; else what to do about the rest."""
    weights = [name for name in missing if not name.endswith(")")]
    if weights and unexpected:
        stored = set(unexpected)
        for name in stored:
            prefix = name.removesuffix(weights[0])
            if prefix != name and all(prefix + one in stored for one in weights):
                return f"Pass names=lambda name: name.removeprefix({prefix!r})."
        for prefix in (weights[0].removesuffix(one) for one in stored if weights[0].endswith(one)):
            if prefix and all(one.removeprefix(prefix) in stored for one in weights):
                return f"Pass names=lambda name: {prefix!r} + name."
    if missing and not weights:
        return "To load weights alone, pass ckpt.open(source).weights_only() as the source."
    return "Pass names= to rename tensors, or strict=False to load what fits."
