"""What objects show in a notebook: small pieces of HTML, in which every text is escaped, and a progress bar.

Only elements and inline styles are used that notebooks leave in HTML which they do not trust: no script, no style
sheet, no picture. Colours are those of the notebook, whether it is light or dark.
"""

import time
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_formats.core.arguments import checked
from ckpt_formats.core.distinct import distinct
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.core.values import brief

if TYPE_CHECKING:
    from ckpt_formats.core.checkpoint import Checkpoint, Parameter

_MAX_TEXT = 120
"""Characters of a name that are shown."""
_MAX_ROWS = 20
_LEFT, _RIGHT = ' style="text-align: left"', ' style="text-align: right"'
_MIN_SECONDS = 0.1
"""Between two updates of a progress bar."""


def text(value: object) -> str:
    """A text from a file as HTML: control characters spelled out, cut in the middle if it is long, escaped.

    >>> text("<b>a</b>")
    '&lt;b&gt;a&lt;/b&gt;'
    """
    shown = printable(str(value))
    if len(shown) > _MAX_TEXT:
        shown = f"{shown[: _MAX_TEXT // 2]}…{shown[-_MAX_TEXT // 2 :]}"
    return escape(shown)


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[object]], texts: Sequence[int] = (0,)) -> str:
    """A table. The columns `texts` are aligned to the left, all others are numbers; the first one names the rows.

    One without a caption belongs into `folded`, whose title names it.
    """
    sides = [_LEFT if i in texts else _RIGHT for i in range(len(heads))]
    head = "".join(f'<th scope="col"{side}>{escape(one)}</th>' for one, side in zip(heads, sides, strict=True))
    lines = []
    for row in rows[:_MAX_ROWS]:
        first, *others = (text(value) for value in row)
        cells = "".join(f"<td{side}>{value}</td>" for value, side in zip(others, sides[1:], strict=True))
        lines.append(f'<tr><th scope="row"{sides[0]}>{first}</th>{cells}</tr>')
    more = f"<p>and {len(rows) - _MAX_ROWS:,} more</p>" if len(rows) > _MAX_ROWS else ""
    name = f"<caption{_LEFT}>{escape(caption)}</caption>" if caption else ""
    return f"<table>{name}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{more}"


def folded(title: str, content: str) -> str:
    """HTML that is shown when the title is chosen."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def panel(title: str, facts: Sequence[object], *parts: str) -> str:
    """A title, facts about an object in one line, and pieces of HTML."""
    line = " · ".join(text(fact) for fact in facts)
    return f"<div><p><strong>{text(title)}</strong><br>{line}</p>{''.join(parts)}</div>"


def of_checkpoint(checkpoint: "Checkpoint") -> str:
    """What a checkpoint is, the bytes of its states, and its modules. Reads no tensor data."""
    from ckpt_formats.core.state_table import ROLES, TabulatedParameters, table_of

    parameters = checkpoint.parameters
    if isinstance(parameters, TabulatedParameters):
        states = parameters.table
    else:
        states = table_of(parameters.values(), lambda: False, lambda tensor: (0, ()))
    origin, model = checkpoint.origin, states.role != ROLES.index("extra")
    elements, nbytes = states.elements[states.weight], states.of_parameters(states.nbytes)
    layout = [f"{key} {brief(value)}" for key, value in origin.layout.items() if value is not None]
    approximate = [f"{len(checkpoint.errors):,} states are approximate"] if checkpoint.errors else []
    facts = [
        f"{origin.engine} {origin.version or ''}".strip(),
        f"format {checkpoint.format}",
        "step not stated" if origin.step is None else f"step {origin.step}",
        *(layout or ["not sharded"]),
        f"{int(model.sum()):,} tensors, {int(elements[model].sum()):,} elements",
        f"{format_nbytes(int(nbytes.sum()))} with all states",
        *approximate,
    ]
    return panel(
        checkpoint.path.name or str(checkpoint.path),
        facts,
        table("States", ("state", "type", "elements", "bytes"), _state_rows(states), (0, 1)),
        folded("Modules", table("", ("module", "tensors", "bytes"), _modules(states.names, model, nbytes))),
    )


def of_parameter(parameter: "Parameter") -> str:
    """A parameter, and a row for each of its states. Reads no tensor data."""
    values = [f"{key} {brief(value)}" for key, value in parameter.values.items()]
    heads = ("state", "type", "shape", "bytes", "blocks")
    rows = [
        (state, one.dtype.name, list(one.shape), format_nbytes(one.nbytes), len(one.fragments))
        for state, one in parameter.states.items()
    ]
    return panel(parameter.name, [parameter.role, *values], table("States", heads, rows, (0, 1)))


def _state_rows(states: Any) -> list[tuple[object, ...]]:
    """The elements and bytes of each kind of state, the largest first."""
    kinds = states.state.astype(np.int64) * max(len(states.dtypes), 1) + states.dtype
    rows = []
    for kind in distinct(kinds).tolist():
        members = kinds == kind
        state, dtype = divmod(kind, max(len(states.dtypes), 1))
        elements, nbytes = int(states.elements[members].sum()), int(states.nbytes[members].sum())
        rows.append((nbytes, (states.states[state], states.dtypes[dtype].name, f"{elements:,}", format_nbytes(nbytes))))
    return [row for _, row in sorted(rows, key=lambda one: -one[0])]


def _modules(names: Sequence[str], model: Any, nbytes: Any) -> list[tuple[object, ...]]:
    """The tensors and bytes of each module at the top: below a prefix that all names share."""
    chosen = np.flatnonzero(model).tolist()
    shared = 0
    parts = {number: names[number].split(".", 12) for number in chosen}
    first = parts[chosen[0]] if chosen else []
    while shared < len(first) - 1 and all(
        len(own) > shared + 1 and own[shared] == first[shared] for own in parts.values()
    ):
        shared += 1
    counts: dict[str, list[int]] = {}
    for number, own in parts.items():
        sums = counts.setdefault(".".join(own[: shared + 1]), [0, 0])
        sums[0], sums[1] = sums[0] + 1, sums[1] + int(nbytes[number])
    largest = sorted(counts.items(), key=lambda item: -item[1][1])
    return [(name, f"{count:,}", format_nbytes(total)) for name, (count, total) in largest]


class NotebookProgress:
    """Progress as a bar below the cell of a notebook, with the rate and the time left: for `progress=`.

    Make a new one for each call that it shows. It needs IPython, which every notebook has, and no extension.

    >>> import ckpt
    >>> ckpt.save(run, "copy", ckpt.Universal(), progress=ckpt.NotebookProgress("saving"))  # doctest: +SKIP
    """

    @checked
    def __init__(self, label: str = "") -> None:
        """Show an empty bar. Raises `UnsupportedError` outside of a notebook."""
        self._label = label
        self._begin, self._shown = time.monotonic(), 0.0
        self._counts, self._status = (0, 0), ""
        try:
            from IPython.core.getipython import get_ipython
            from IPython.display import display
        except ImportError as error:
            raise UnsupportedError(
                "there is no IPython here", hint="Only a notebook shows this progress bar."
            ) from error
        if get_ipython() is None:
            raise UnsupportedError("this is not a notebook", hint="Pass a function of your own as `progress=`.")
        self._handle = display(_Html(self._html(0, 0)), display_id=True)

    def __call__(self, done: int, total: int) -> None:
        """Show how many bytes are done, of how many: at most ten times a second, and the last ones always."""
        now = time.monotonic()
        if done < total and now - self._shown < _MIN_SECONDS:
            return
        self._shown, self._counts = now, (done, total)
        self._handle.update(_Html(self._html(done, total)))

    def show_status(self, status: object) -> None:
        """Show how far a cluster is, below the bar."""
        self._status = str(status)
        self._handle.update(_Html(self._html(*self._counts)))

    def _html(self, done: int, total: int) -> str:
        seconds = time.monotonic() - self._begin
        rate = done / seconds if seconds > 0 else 0.0
        label, parts = escape(printable(self._label)), [f"{format_nbytes(done)} of {format_nbytes(total)}"]
        if not total:
            parts = []
        elif done >= total:
            parts.append(f"{seconds:.1f} s")
        elif rate:
            parts += [f"{format_nbytes(rate)}/s", f"{(total - done) / rate:.0f} s left"]
        bar = f'<progress value="{done}" max="{max(total, 1)}" aria-label="{label or "progress"}"></progress>'
        status = f"<br>{escape(printable(self._status))}" if self._status else ""
        return f"<div>{label} {bar} {', '.join(parts)}{status}</div>"


class _Html:
    """HTML as a notebook shows it; elsewhere, nothing of it but its name."""

    def __init__(self, content: str) -> None:
        self._content = content

    def _repr_html_(self) -> str:
        return self._content

    def __repr__(self) -> str:
        return "<progress>"
