"""A comparison as plain data, which `--json` prints and the HTML page shows."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from ckpt.compare.result import Diff, TensorDiff, ValueDiff, grouped, layer_of, role_of
from ckpt.compare.sums import DiffSums
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.values import brief
from ckpt_formats.registry.location import detect


def facts(first: Checkpoint, second: Checkpoint, diff: Diff, by: Sequence[str] = ()) -> dict[str, Any]:
    """All fields, in the order of the first checkpoint. `docs/diff.md` describes them."""
    both = (first, second)
    fields: dict[str, Any] = {
        "first": str(first.path),
        "second": str(second.path),
        "same": diff.same,
        "steps": [c.origin.step for c in both],
        "formats": [detect(c.path).name for c in both],
        "engines": [c.origin.engine for c in both],
        "versions": [c.origin.version for c in both],
        "layouts": [_layout(c) for c in both],
        "approximate": [len(c.errors) for c in both],
        "total": numbers(sum((pair.sums for pair in diff.compared), DiffSums())),
        "tensors": [_row(pair) for pair in diff.pairs],
        "tensors_only": diff.tensors_only,
        "values": list(map(value_facts, diff.values)),
    }
    if by:
        fields["groups"] = totals(diff, by)
    return fields


def value_facts(value: ValueDiff) -> dict[str, Any]:
    """A difference beside tensors."""
    return {
        "kind": value.kind,
        "name": value.name,
        "first": value.first,
        "second": value.second,
        "only_in": value.only_in,
        "parameters": list(value.parameters),
        "text": str(value),
    }


def totals(diff: Diff, by: Sequence[str]) -> list[dict[str, Any]]:
    """The sums over groups of the tensors that were compared."""
    groups = grouped(diff.compared, by)
    return [{**dict(zip(by, key, strict=True)), **numbers(total)} for key, total in groups]


def numbers(sums: DiffSums) -> dict[str, Any]:
    """The figures of one pair or of several; null if a figure does not exist."""
    return {
        "elements": sums.elements,
        "changed": sums.changed,
        "max": _plain(sums.largest, sums),
        "rms": _plain(sums.rms, sums),
        "relative": _plain(sums.relative, sums),
        "cosine": _plain(sums.cosine, sums),
        "not_finite": sums.not_finite,
        "first_not_finite": sums.first_not_finite,
        "second_not_finite": sums.second_not_finite,
        "codes": sums.codes,
        "histogram": {"lowest": sums.histogram.lowest, "counts": list(sums.histogram.counts)},
    }


def _row(pair: TensorDiff) -> dict[str, Any]:
    place = {"layer": layer_of(pair.name), "role": role_of(pair.name)}
    return {"name": pair.name, "state": pair.state, **place, "kind": pair.kind, "what": pair.what, **numbers(pair.sums)}


def _layout(source: Checkpoint) -> str:
    layout = {key: value for key, value in source.origin.layout.items() if isinstance(value, (int, str))}
    return ", ".join(f"{key} {brief(value)}" for key, value in layout.items())


def _plain(figure: float | None, sums: DiffSums) -> float | None:
    return figure if figure is not None and isfinite(figure) and sums.is_measured else None
