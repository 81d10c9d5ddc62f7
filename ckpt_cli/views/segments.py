"""The lines and the JSON of a chain's log of gradients."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpt.chains.segments import SegmentView, steps_nbytes
from ckpt_formats.core.text import format_nbytes, printable

if TYPE_CHECKING:
    from ckpt_formats.universal.gradients.layout import LoggedOptimizer
    from ckpt_formats.universal.gradients.segment import Segment


def to_json(view: SegmentView) -> dict[str, Any]:
    """A segment as plain data."""
    logged, segment = view.logged, view.segment
    facts: dict[str, Any] = {"folder": logged.folder, "first": logged.first, "last": view.last, "time": logged.time}
    if segment is None:
        return facts | {"error": None if view.error is None else view.error.what}
    steps = segment.last - segment.first
    return facts | {
        "has_ended": view.has_ended,
        "ranks": len(segment.layout.ranks),
        "codec": segment.layout.codec,
        "optimizers": [
            {"type": one.type, "method": one.method, "exactness": one.exactness, "figures": dict(one.figures)}
            for one in segment.layout.optimizers
        ],
        "exact": segment.is_exact,
        "proved": _proved(segment),
        "difference": segment.difference,
        "doubts": [
            {"first": one.first, "last": one.last, "tensors": list(one.names)} for one in segment.doubtful_steps
        ],
        "elements": segment.layout.numel,
        "stored_nbytes": segment.nbytes,
        "nbytes_per_parameter": round(steps_nbytes(segment) / max(steps * segment.layout.numel, 1), 4),
        "torn": {path.name: reason for path, reason in segment.torn.items()},
    }


def lines(views: list[SegmentView]) -> Iterator[str]:
    """The segments as lines of text."""
    for view in views:
        segment = view.segment
        if segment is None:
            yield f"gradients from step {view.logged.first}: cannot be read: {view.error}"
            continue
        steps = segment.last - segment.first
        average = steps_nbytes(segment) // max(steps, 1)
        ranks = len(segment.layout.ranks)
        yield (
            f"gradients of steps {segment.first + 1} to {segment.last}"
            f"{'' if view.has_ended else ', not ended'}: {format_nbytes(segment.nbytes)}, {format_nbytes(average)} a "
            "step"
            f" ({average / max(segment.layout.numel, 1):.2f} B for each parameter), {ranks} rank{'s' * (ranks > 1)}"
        )
        for one in segment.layout.optimizers:
            yield f"  {one.type}: {_exactness(one, segment)}"
        yield from _proof(segment)
        for path, reason in segment.torn.items():
            yield f"  {path.name}: records after step {segment.last} do not count: {reason}"


def _proved(segment: "Segment") -> int | None:
    """The last step that is proved; None if there are no proofs: of lossy gradients, and in logs of version 1."""
    return segment.proved if segment.has_proofs else None


def _proof(segment: "Segment") -> Iterator[str]:
    if segment.difference is not None:
        yield f"  DIFFERS from the run: {segment.difference}"
    for one in segment.doubtful_steps:
        names = ", ".join(f"`{printable(name)}`" for name in one.names[:3]) + ", …" * (len(one.names) > 3)
        yield f"  in doubt: {names} at steps {one.first} to {one.last}, changed in a way that torch does not count"
    if not segment.has_proofs:
        return
    if segment.proved >= segment.last:
        yield "  proved: every step was compared with the run"
    else:
        yield f"  proved up to step {segment.proved}; `ckpt verify --replay` compares the others"


def _exactness(optimizer: "LoggedOptimizer", segment: "Segment") -> str:
    from ckpt_formats.universal.gradients.layout import UPDATE

    if optimizer.method == UPDATE:
        return "exact: the log has the states after each step"
    if optimizer.exactness == "approximate":
        return "approximate: replayed with other rounding"
    if not segment.is_exact:
        return f"approximate: gradients stored as {segment.layout.codec}"
    if optimizer.exactness == "same library":
        return "exact if replayed by torch on a machine like the run's"
    return "exact, without torch"
