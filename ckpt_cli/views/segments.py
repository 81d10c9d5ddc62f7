"""What `log` and `verify` show of a chain's log of gradients: each segment, as far as it can be read."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.views.report import size
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.universal.chain.file import ChainIndex, LoggedSteps
from ckpt_formats.universal.chain.states import open_steps
from ckpt_formats.universal.gradients.segment import Segment


@dataclass(frozen=True)
class SegmentView:
    """A segment, or why it cannot be read."""

    logged: LoggedSteps
    segment: Segment | None
    error: CkptError | None = None

    @property
    def has_ended(self) -> bool:
        """Was it closed, or was its end written down when the next one began?"""
        return self.logged.step is not None or (self.segment is not None and self.segment.has_ended)

    @property
    def last(self) -> int | None:
        """The last step that can be restored."""
        return None if self.segment is None else self.segment.last


def open_all(run: Path, chain: ChainIndex, check: bool = False) -> list[SegmentView]:
    """All segments of a chain. With `check`, each stored byte is compared with its hash."""
    return [_open(run, logged, check) for logged in chain.segments]


def _open(run: Path, logged: LoggedSteps, check: bool) -> SegmentView:
    try:
        segment = open_steps(run, logged, check)
        segment.last  # noqa: B018  # reads what each record says
    except CkptError as error:
        return SegmentView(logged, None, error)
    return SegmentView(logged, segment)


def to_json(view: SegmentView) -> dict[str, Any]:
    """All of it, for programs."""
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
        "elements": segment.layout.numel,
        "stored_nbytes": segment.nbytes,
        "nbytes_per_parameter": round(_step_nbytes(segment) / max(steps * segment.layout.numel, 1), 4),
        "torn": {path.name: reason for path, reason in segment.torn.items()},
    }


def lines(views: list[SegmentView]) -> Iterator[str]:
    """The same, for people."""
    for view in views:
        segment = view.segment
        if segment is None:
            yield f"gradients from step {view.logged.first}: cannot be read: {view.error}"
            continue
        steps = segment.last - segment.first
        average = _step_nbytes(segment) // max(steps, 1)
        ranks = len(segment.layout.ranks)
        yield (
            f"gradients of steps {segment.first + 1} to {segment.last}"
            f"{'' if view.has_ended else ', not ended'}: {size(segment.nbytes)}, {size(average)} a step"
            f" ({average / max(segment.layout.numel, 1):.2f} B for each parameter), {ranks} rank{'s' * (ranks > 1)}"
        )
        for one in segment.layout.optimizers:
            yield f"  {one.type}: {_exactness(one.exactness, segment)}"
        for path, reason in segment.torn.items():
            yield f"  {path.name}: what follows step {segment.last} does not count: {reason}"


def _exactness(exactness: str, segment: Segment) -> str:
    if exactness == "approximate":
        return "approximate: done again with other rounding"
    if not segment.is_exact:
        return f"approximate: gradients stored as {segment.layout.codec}"
    if exactness == "same library":
        return "exact, done again by torch on a machine like the run's"
    return "exact, without torch"


def _step_nbytes(segment: Segment) -> int:
    """Bytes of the gradients of all steps that count, without what else their records hold."""
    total, count = 0, segment.last - segment.first
    with Reader(check=False) as reader:
        for rank, steps in enumerate(segment.updates):
            chunks, path = segment.layout.ranks[rank].chunk_count, segment.path(rank)
            total += sum(
                update.record.nbytes_of(path, chunks, reader) for updates in steps[:count] for update in updates
            )
    return total
