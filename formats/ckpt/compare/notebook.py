"""What a difference shows in a notebook."""

from ckpt.compare.groups import grouped
from ckpt.compare.pairs import COMPARED, Diff
from ckpt.compare.sums import DiffSums
from ckpt_formats.core.notebook import folded, panel, table

_HEADS = ("changed", "largest", "relative", "cosine")


def of_diff(diff: Diff) -> str:
    """The verdict, a row for each kind of state, and the tensors that changed most, as HTML."""
    compared = diff.compared
    differing = sorted(
        (pair for pair in compared if pair.kind != "equal"),
        key=lambda pair: (not pair.sums.not_finite, -(pair.sums.relative or 0)),
    )
    unpaired = [(pair.name, pair.state, pair.kind, pair.what) for pair in diff.pairs if pair.kind not in COMPARED]
    total = sum((pair.sums for pair in compared), DiffSums())
    facts = [f"{total.changed:,} of {total.elements:,} elements changed", f"{len(diff.values):,} other values differ"]
    if not diff.same_step:
        facts.append("of other steps")
    groups = [(key, *_figures(sums)) for (key,), sums in grouped(compared, ["state"])]
    parts = [table("By state", ("state", *_HEADS), groups)]
    if differing:
        rows = [(pair.name, pair.state, *_figures(pair.sums)) for pair in differing]
        most = table("", ("tensor", "state", *_HEADS), rows, (0, 1))
        parts.append(folded("Tensors that changed, the most changed first", most))
    if unpaired:
        heads = ("tensor", "state", "kind", "what")
        parts.append(folded("Tensors that cannot be compared", table("", heads, unpaired, (0, 1, 2, 3))))
    if diff.values:
        parts.append(folded("Other values", table("", ("value",), [(value,) for value in diff.values])))
    if diff.same:
        return panel("The same, bit for bit", facts, *parts)
    return panel(f"{len(differing):,} of {len(compared):,} tensors differ", facts, *parts)


def _figures(sums: DiffSums) -> tuple[str, str, str, str]:
    share = f"{100 * sums.changed / sums.elements:.4g} %" if sums.elements else "-"
    if not sums.is_measured:
        return share, f"{sums.not_finite:,} not finite" if sums.not_finite else "codes", "-", "-"
    relative = "-" if sums.relative is None else f"{sums.relative:.3g}"
    cosine = "-" if sums.cosine is None else f"{sums.cosine:.7f}"
    return share, f"{sums.largest:.3g}", relative, cosine
