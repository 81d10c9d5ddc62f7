"""What `diff` prints."""

import re
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any

import click

from ckpt_cli.differences import Differences, Pair, Sums
from ckpt_cli.report import data, say
from ckpt_formats.base import Checkpoint
from ckpt_formats.naming import show

SORTS: dict[str, Callable[[Pair], Any]] = {
    "relative": lambda pair: -(pair.sums.relative or 0.0),
    "max": lambda pair: -pair.sums.largest,
    "rms": lambda pair: -pair.sums.rms,
    "changed": lambda pair: -pair.sums.changed,
    "name": lambda pair: (pair.name, pair.state),
}
GROUPINGS: dict[str, Callable[[Pair], str]] = {
    "state": lambda pair: pair.state,
    "layer": lambda pair: layer_of(pair.name),
    "kind": lambda pair: pair.kind,
}
_HEAD = f"{'changed':>9} {'max':>9} {'rms':>9} {'relative':>9} {'cosine':>10}"
_MOST_VALUES = 20


def layer_of(name: str) -> str:
    """A name up to its first number, which counts the layers in nearly every model.

    >>> layer_of("model.layers.11.mlp.up.weight")
    'model.layers.11'
    """
    found = re.match(r"(.*?(?:^|\.)\d{1,9})(?:\.|$)", name)
    return found[1] if found else name.rpartition(".")[0] or name


def as_text(first: Checkpoint, second: Checkpoint, found: Differences, sort: str, by: str | None, top: int) -> None:
    """For people: what is not there on both sides, the most changed, and all of it in one line."""
    unpaired = [pair for pair in found.pairs if pair.kind in ("missing", "added", "reshaped")]
    for pair in unpaired[:top] if top else unpaired:
        click.echo(f"{pair.kind:>9}  {show(pair.name)} {pair.state}  {show(pair.what)}")
    if top and len(unpaired) > top:
        click.echo(f"{'':>9}  and {len(unpaired) - top} more that are not on both sides")
    compared = [pair for pair in found.pairs if pair.kind in ("equal", "changed", "retyped")]
    differing = sorted((pair for pair in compared if pair.kind != "equal"), key=SORTS[sort])
    if differing:
        click.echo(_HEAD)
    for pair in differing[:top] if top else differing:
        retyped = f"  ({show(pair.what)})" if pair.what else ""
        click.echo(f"{_row(pair.sums)}  {show(pair.name)} {show(pair.state)}{retyped}")
    if top and len(differing) > top:
        click.echo(f"{'':>9} and {len(differing) - top} more (--top 0 shows all)")
    if by and differing:
        click.echo(f"\nby {by}\n{_HEAD}")
        for group, total in sorted(grouped(compared, by), key=lambda row: -(row[1].relative or 0.0)):
            click.echo(f"{_row(total)}  {show(group)}")
    for value in found.values[:_MOST_VALUES]:
        click.echo(show(value))
    if len(found.values) > _MOST_VALUES:
        click.echo(f"and {len(found.values) - _MOST_VALUES} more values")
    say(_summary(first, second, found, compared, unpaired))


def as_json(first: Checkpoint, second: Checkpoint, found: Differences, by: str | None) -> None:
    """For programs: everything, in the first checkpoint's order."""
    rows = [{"name": p.name, "state": p.state, "kind": p.kind, "what": p.what, **_numbers(p.sums)} for p in found.pairs]
    said: dict[str, Any] = {
        "first": str(first.path),
        "second": str(second.path),
        "same": found.same,
        "steps": [first.origin.step, second.origin.step],
        "tensors": rows,
        "values": list(found.values),
    }
    if by:
        compared = [pair for pair in found.pairs if pair.kind in ("equal", "changed", "retyped")]
        said["groups"] = [{by: group, **_numbers(total)} for group, total in grouped(compared, by)]
    data(said)


def grouped(pairs: Iterable[Pair], by: str) -> list[tuple[str, Sums]]:
    """Pairs added up: norms and cosines are those of all tensors of a group as one."""
    totals: dict[str, Sums] = {}
    for pair in pairs:
        key = GROUPINGS[by](pair)
        totals[key] = totals.get(key, Sums()) + pair.sums
    return list(totals.items())


def _summary(
    first: Checkpoint, second: Checkpoint, found: Differences, compared: Sequence[Pair], unpaired: Sequence[Pair]
) -> str:
    total = sum((pair.sums for pair in compared), Sums())
    unequal = sum(pair.kind != "equal" for pair in compared)
    steps = "" if found.same_step else f", step {first.origin.step} -> {second.origin.step}"
    if found.same:
        return f"the same: {len(compared)} tensors, {total.elements:,} elements, every bit{steps}"
    lacking = f", {len(unpaired)} not comparable" if unpaired else ""
    values = f", {len(found.values)} other values" if found.values else ""
    return (
        f"different: {unequal} of {len(compared)} tensors{lacking}, {total.changed:,} of {total.elements:,} elements"
        f"{values}{steps}"
    )


def _row(sums: Sums) -> str:
    share = f"{100 * sums.changed / sums.elements:.4g} %" if sums.elements else "-"
    cosine = "-" if sums.cosine is None else f"{sums.cosine:.7f}"
    relative = "-" if sums.relative is None else f"{sums.relative:.3g}"
    strange = f"  ({sums.not_finite:,} not finite)" if sums.not_finite else ""
    return f"{share:>9} {sums.largest:>9.3g} {sums.rms:>9.3g} {relative:>9} {cosine:>10}{strange}"


def _numbers(sums: Sums) -> dict[str, Any]:
    def plain(value: float | None) -> float | None:
        return value if value is None or isfinite(value) else None

    return {
        "elements": sums.elements,
        "changed": sums.changed,
        "max": plain(sums.largest),
        "rms": plain(sums.rms),
        "relative": plain(sums.relative),
        "cosine": plain(sums.cosine),
        "not_finite": sums.not_finite,
    }
