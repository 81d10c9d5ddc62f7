"""Run `check`, and print which tensors do not fit, and the renaming that helps."""

import shlex
from collections.abc import Iterator
from typing import Any

import click

from ckpt.compare.fitting import Fit, check
from ckpt_cli import notes
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.text import counted, printable


def show(checkpoint: Checkpoint, like: str, model: Any, top: int, as_json: bool) -> bool:
    """Compare with the model at `like`, and show what does not fit. Returns whether everything fits."""
    fit = check(checkpoint, model)
    if as_json:
        data(_facts(checkpoint, like, fit))
        return fit.ok
    lines = list(_lines(fit))
    for line in lines[:top] if top else lines:
        click.echo(line)
    if top and len(lines) > top:
        click.echo(f"{'':>10}  and {len(lines) - top:,} more (--top 0 shows all)")
    if fit.renamings:
        notes.flush()
        after = (
            "everything fits" if not fit.mismatches_after else f"{counted(fit.mismatches_after, 'name')} would not fit"
        )
        click.echo(f"with these options of `ckpt convert`, {after}: {_options(fit)}")
    conclude(_verdict(fit))
    return fit.ok


def _lines(fit: Fit) -> Iterator[str]:
    """A line for each difference, the most serious kinds first."""
    for one in fit.reshaped:
        yield f"{'reshaped':>10}  {printable(one.name)}  {_shape(one.shape)}, the model has {_shape(one.expected)}"
    for kind, names in (("missing", fit.missing), ("unexpected", fit.unexpected), ("tied", fit.tied)):
        for name in names:
            yield f"{kind:>10}  {printable(name)}"
    for typed in fit.retyped:
        yield f"{'retyped':>10}  {printable(typed.name)}  {typed.dtype}, the model has {typed.expected}"


def _verdict(fit: Fit) -> str:
    typed = f", {counted(len(fit.retyped), 'tensor')} of another type" if fit.retyped else ""
    tied = f", {counted(len(fit.tied), 'tied name')} left out" if fit.tied else ""
    if fit.ok:
        return f"fits: {counted(fit.fitting, 'tensor')}{tied}{typed}"
    kinds = {"missing": fit.missing, "unexpected": fit.unexpected, "of other shapes": fit.reshaped}
    counts = ", ".join(f"{len(names):,} {kind}" for kind, names in kinds.items() if names)
    return f"does not fit: {counts}; {counted(fit.fitting, 'tensor')} would fit{typed}"


def _shape(shape: Shape) -> str:
    return str(list(shape))


def _options(fit: Fit) -> str:
    return " ".join(f"--rename {shlex.quote(f'{pattern}={new}')}" for pattern, new in fit.renamings)


def _facts(checkpoint: Checkpoint, like: str, fit: Fit) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "like": like,
        "fits": fit.ok,
        "fitting": fit.fitting,
        "missing": list(fit.missing),
        "unexpected": list(fit.unexpected),
        "reshaped": [
            {"name": one.name, "shape": list(one.shape), "expected": list(one.expected)} for one in fit.reshaped
        ],
        "retyped": [{"name": one.name, "dtype": one.dtype, "expected": one.expected} for one in fit.retyped],
        "tied": list(fit.tied),
        "renamings": [f"{pattern}={new}" for pattern, new in fit.renamings],
        "mismatches_after": fit.mismatches_after,
    }
