"""`ckpt log`: the steps of a chain."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.chains.segments import SegmentView, open_segments, steps_nbytes
from ckpt_cli.progress import doing
from ckpt_cli.views import columns
from ckpt_cli.views.report import data
from ckpt_formats.core.folders import names_in
from ckpt_formats.core.text import PARTIAL, counted, format_nbytes, list_names, printable
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member
from ckpt_formats.universal.published.steps import PublishedStep, read_steps

if TYPE_CHECKING:
    from ckpt_formats.universal.gradients.layout import LoggedOptimizer
    from ckpt_formats.universal.gradients.segment import Segment

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 80


def show_log(run: Path, as_json: bool, html: Path | None = None) -> None:
    """Show the steps of a chain, and write them as a page."""
    if html is not None:
        from ckpt_cli.views import page

        page.check_place(html, "log")
    with doing(f"reading the chain {printable(str(run))}"):
        chain = chain_file.read(run)
        segments = open_segments(run, chain)
        published = read_steps(run) if chain.is_published else []
    unfinished = unfinished_states(run, time.time())
    fields = {**to_json(chain, segments, published), "unfinished": [asdict(one) for one in unfinished]}
    if html is not None:
        page.write(page_of(run, fields), html, "log")
    if as_json:
        data({"chain": str(run), **fields})
        return
    shown = _published_lines(published) if chain.is_published else lines(chain, segments)
    for line in (*shown, *([""] * bool(unfinished)), *map(str, unfinished)):
        columns.show(line)


def page_of(run: Path, fields: Mapping[str, Any]) -> str:
    """The page that `log --html` writes: size and error of the states of a chain, by step.

    It has ASCII characters only. `fields`: those of `--json`. Equal chains give equal pages.
    """
    from ckpt_cli.views.page import page

    return page("log", ("charts", "listing", "log"), {"chain": str(run), **fields})


@dataclass(frozen=True)
class Unfinished:
    """A state that a command is writing, or that an interrupted command left."""

    folder: str
    seconds: float
    """How long ago something in it was written last."""

    def __str__(self) -> str:
        ago = f"{self.seconds:.0f} s" if self.seconds < 120 else f"{self.seconds / 60:,.0f} min"
        return (
            f"unfinished: {printable(self.folder)}, written {ago} ago by a command that is running or was interrupted"
        )


def unfinished_states(run: Path, now: float) -> list[Unfinished]:
    """The states of a chain that are not complete. `now`: seconds since 1970."""
    unfinished = []
    for name in names_in(run):
        if not name.endswith(PARTIAL):
            continue
        times = [0.0]
        with suppress(OSError):  # it may be completed or removed meanwhile
            times += [path.stat().st_mtime for path in (run / name, *(run / name).rglob("*"))]
            folder = name.removeprefix(".").removesuffix(PARTIAL)
            unfinished.append(Unfinished(folder, round(max(now - max(times), 0.0), 1)))
    return unfinished


def to_json(chain: ChainIndex, segments: list[SegmentView], published: Sequence[PublishedStep] = ()) -> dict[str, Any]:
    """The steps and segments as plain data."""
    raw, stored = _sums(chain)
    logged = [one.last for one in segments if one.last is not None]  # none of damaged segments
    steps = [member.step for member in chain.members] + [one.step for one in published]
    return {
        "last": max((*steps, *logged), default=None),
        "segments": [_segment_json(one) for one in segments],
        "steps": [_member_json(chain, member) for member in chain.members],
        "raw_nbytes": raw,
        "stored_nbytes": stored,
        "ratio": round(raw / max(stored, 1), 4),
        "exact": all(member.exact for member in chain.members),
        **({} if chain.tip is None else {"tip": asdict(chain.tip)}),
        **({"published": [asdict(one) for one in published]} if chain.is_published else {}),
    }


def lines(chain: ChainIndex, segments: list[SegmentView]) -> Iterator[str]:
    """The steps and segments as lines of text."""
    if chain.is_family:
        yield from _model_lines(chain)
    elif chain.members:
        yield from _member_lines(chain)
        yield from [""] * bool(segments)
    yield from _segment_lines(segments)


def _published_lines(steps: Sequence[PublishedStep]) -> Iterator[str]:
    """The steps of a published chain as lines of text."""
    if not steps:
        yield "no step is published yet"
        return
    rows = [
        (str(one.step), str(one.epoch), one.kind, format_nbytes(one.stored_nbytes), str(one.ranks), one.time)
        for one in steps
    ]
    yield columns.table(("step", "epoch", "kind", "stored", "ranks", "published"), rows, right=(0, 1, 3, 4))
    yield ""
    sizes = [one.stored_nbytes for one in steps]
    yield f"stored  {sparkline(sizes)}"
    yield f"total   {format_nbytes(sum(sizes))} for {len(steps)} published steps"


def _model_lines(chain: ChainIndex) -> Iterator[str]:
    """The models of a family, each below the one that it is stored against."""
    rows = []
    for member, depth in _tree(chain):
        parent, needed = chain.parent_of(member), chain.upto(member.step)
        rows.append(
            (
                f"{'  ' * depth}{member.name}",
                "" if parent is None else parent.name or "",
                format_nbytes(member.stored_nbytes),
                format_nbytes(member.raw_nbytes),
                f"{member.raw_nbytes / member.stored_nbytes:.2f}",
                format_nbytes(_read(needed)),
                str(len(needed) - 1),
                accuracy(member),
                ", ".join(member.codecs),
            )
        )
    head = ("model", "parent", "stored", "raw", "ratio", "reads", "deltas", "values", "codecs")
    yield columns.table(head, rows, right=(2, 3, 4, 5, 6), breaks=(7, 8))
    raw, stored = _sums(chain)
    yield ""
    sizes = f"{format_nbytes(stored)} for {len(chain.members)} models of {format_nbytes(raw)}"
    yield f"total   {sizes}: {times(raw, stored)}"
    shared = sum(member.shared_nbytes for member in chain.members)
    if shared:
        yield f"shared  {format_nbytes(shared)} more, if tensors that are equal to the base's were stored again"


def _tree(chain: ChainIndex) -> Iterator[tuple[Member, int]]:
    """All models of a family, each after its parent, with their depth in the tree."""
    children: dict[str | None, list[Member]] = {}
    for member in chain.members:
        children.setdefault(member.parent, []).append(member)
    todo = [(member, 0) for member in reversed(children.get(None, []))]
    while todo:
        member, depth = todo.pop()
        yield member, depth
        todo += [(child, depth + 1) for child in reversed(children.get(member.content, []))]


def _member_lines(chain: ChainIndex) -> Iterator[str]:
    rows = []
    for member in chain.members:
        needed = chain.upto(member.step)
        rows.append(
            (
                str(member.step),
                member.kind,
                format_nbytes(member.stored_nbytes),
                format_nbytes(member.raw_nbytes),
                f"{member.raw_nbytes / member.stored_nbytes:.2f}",
                format_nbytes(_read(needed)),
                str(len(needed) - 1),
                accuracy(member),
                ", ".join(member.codecs),
            )
        )
    head = ("step", "kind", "stored", "raw", "ratio", "reads", "deltas", "values", "codecs")
    yield columns.table(head, rows, right=(0, 2, 3, 4, 5, 6), breaks=(7, 8))
    raw, stored = _sums(chain)
    yield ""
    yield f"stored  {sparkline([member.stored_nbytes for member in chain.members])}"
    sizes = f"{format_nbytes(stored)} for {counted(len(chain.members), 'state')} of {format_nbytes(raw)}"
    yield f"total   {sizes}: {times(raw, stored)}"
    shared = sum(member.shared_nbytes for member in chain.members)
    if shared:
        yield f"shared  {format_nbytes(shared)} more, if states that did not change were stored again with each base"
    if chain.tip is not None:
        yield f"tip     {format_nbytes(chain.tip.stored_nbytes)} more: the last state alone, which is restored from it"


def times(raw: int, stored: int) -> str:
    """The ratio of decoded and stored bytes, as text."""
    smaller = raw >= stored
    ratio = raw / max(stored, 1) if smaller else stored / max(raw, 1)
    return f"{ratio:.2f} times {'smaller' if smaller else 'larger'}"


def accuracy(member: Member) -> str:
    """`exact`, or the largest errors of a state's tensors, as text."""
    if member.exact:
        return "exact"
    keys = (("rel", "rel"), ("rel_change", "rel_change"), ("max", "max_abs"))
    measured = [(name, _largest(member, key)) for name, key in keys]
    figures = ", ".join(f"{name} {value:.2g}" for name, value in measured if value is not None)
    return f"approximate: {figures}" if figures else "approximate"


def sparkline(values: Sequence[int]) -> str:
    """Sizes as bars, on a scale from 0; if there are many, a bar is the maximum of several."""
    each = -(-len(values) // _MAX_BARS)
    shown = [max(values[i : i + each]) for i in range(0, len(values), each)]
    top = max(*shown, 1)
    return "".join(_BARS[min(len(_BARS) - 1, value * len(_BARS) // top)] for value in shown)


def _member_json(chain: ChainIndex, member: Member) -> dict[str, Any]:
    needed, parent = chain.upto(member.step), chain.parent_of(member)
    model = {} if member.name is None else {"name": member.name, "parent": None if parent is None else parent.name}
    return {
        "step": member.step,
        **model,
        "kind": member.kind,
        "folder": member.folder,
        "content": member.content,
        "time": member.time,
        "codecs": list(member.codecs),
        "raw_nbytes": member.raw_nbytes,
        "stored_nbytes": member.stored_nbytes,
        **({"shared_nbytes": member.shared_nbytes} if member.shared else {}),
        "ratio": round(member.raw_nbytes / member.stored_nbytes, 4),
        "restore": {"reads_nbytes": _read(needed), "deltas": len(needed) - 1},
        "exact": member.exact,
        "errors": {state: dict(error) for state, error in member.errors.items()},
    }


def _largest(member: Member, key: str) -> float | None:
    """The largest of a figure; None if no state has it."""
    values = (error.get(key) for error in member.errors.values())
    return max((float(value) for value in values if isinstance(value, (int, float))), default=None)


def _sums(chain: ChainIndex) -> tuple[int, int]:
    return sum(member.raw_nbytes for member in chain.members), _stored(chain.members)


def _stored(members: Sequence[Member]) -> int:
    return sum(member.stored_nbytes for member in members)


def _read(members: Sequence[Member]) -> int:
    """The bytes that are read to restore the last of some members, from the base on."""
    return sum(member.stored_nbytes + member.shared_nbytes for member in members)


def _segment_json(view: SegmentView) -> dict[str, Any]:
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
        "uncertain_steps": [
            {"first": one.first, "last": one.last, "tensors": list(one.names)} for one in segment.doubtful_steps
        ],
        "elements": segment.layout.numel,
        "stored_nbytes": segment.nbytes,
        "nbytes_per_parameter": round(steps_nbytes(segment) / max(steps * segment.layout.numel, 1), 4),
        "torn": {path.name: reason for path, reason in segment.torn.items()},
    }


def _segment_lines(views: list[SegmentView]) -> Iterator[str]:
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
            mark = "" if segment.damage is None else "DAMAGED: "
            yield f"  {path.name}: {mark}records after step {segment.last} do not count: {reason}"


def _proved(segment: "Segment") -> int | None:
    """The last step that is proved; None if there are no proofs: of lossy gradients, and in logs of version 1."""
    return segment.proved if segment.has_proofs else None


def _proof(segment: "Segment") -> Iterator[str]:
    if segment.difference is not None:
        yield f"  DIFFERS from the run: {segment.difference}"
    for one in segment.doubtful_steps:
        steps = f"at steps {one.first} to {one.last}"
        yield f"  in doubt: {list_names(one.names)} {steps}, changed in a way that torch does not count"
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
