"""From what the user typed to what the library takes."""

import gc
import json
import os
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

from ckpt import pipeline
from ckpt.edits import Edits
from ckpt.pipeline import Resources, Result
from ckpt.sizes import delta_codecs, is_coded
from ckpt_cli import notes
from ckpt_cli.options import LayoutOptions, SourceOptions
from ckpt_cli.progress import on_terminal, progress, spoken
from ckpt_cli.views import report
from ckpt_codecs.native import library
from ckpt_formats.core.checkpoint import Checkpoint, Goal, ParallelDegrees, ReadOptions, WritableFormat
from ckpt_formats.core.errors import BadRules, Unsupported
from ckpt_formats.core.files import most_workers, read_whole
from ckpt_formats.core.layout import Layout, Rule
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.rules import read_rules
from ckpt_formats.core.text import printable
from ckpt_formats.registry import open_checkpoint
from ckpt_formats.state_dicts.keys import STYLES
from ckpt_formats.universal.delta_format import Delta

_MOST_ORDER = 1 << 28
"""Bytes of a file of names."""
_AT_ONCE = 0.5
"""Seconds without a word on a terminal, where somebody waits."""


def open_source(path: str, reading: SourceOptions, accept_suspicious: bool = False) -> Checkpoint:
    """The checkpoint at a path, read as the user says. Doubts that are accepted are said, and no more."""
    with reading_headers(path):
        found = open_checkpoint(Path(path), options_of(reading))
    gc.freeze()  # the index stays as long as the process
    accepted = (Notice(doubt, weight=Weight.UNSURE) for doubt in found.suspicions)
    return replace(found, suspicions=(), notices=(*found.notices, *accepted)) if accept_suspicious else found


def reading_headers(path: str | Path) -> AbstractContextManager[None]:
    """Says what is done, on a terminal, if it takes a while."""
    return spoken(f"reading the headers of {printable(str(path))} ...", _AT_ONCE, on_terminal)


def options_of(reading: SourceOptions) -> ReadOptions:
    """What the user says that a reader may need."""
    order, orders = orders_of(reading)
    return ReadOptions(rules_of(reading), order, orders, Path(reading.shapes) if reading.shapes else None)


def rules_of(reading: SourceOptions) -> tuple[Rule, ...]:
    """The rules of the user's file, if there is one."""
    return read_rules(Path(reading.rules)) if reading.rules else ()


def layout_of(checkpoint: Checkpoint, reading: SourceOptions) -> Layout:
    """How a checkpoint's tensors are cut over ranks: as its format read them, or as its engine would cut them."""
    if checkpoint.layout.rules:
        return checkpoint.layout
    if checkpoint.origin.engine == "megatron":
        from ckpt_formats.engines.megatron.shared.rules import layout_of as megatron_layout_of

        return megatron_layout_of(checkpoint, rules_of(reading))
    return Layout(rules_of(reading))


def orders_of(reading: SourceOptions) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """The names in the user's files: of the one optimizer, and of those at the places that are named."""
    order: tuple[str, ...] = ()
    orders: dict[str, tuple[str, ...]] = {}
    for said in reading.param_order:
        place, file = _placed(said)
        if place in orders or (place is None and order):
            raise BadRules(f"--param-order names {'the optimizer' if place is None else printable(place)} twice")
        if place is None:
            order = _order_in(file)
        else:
            orders[place] = _order_in(file)
    return order, orders


def _placed(said: str) -> tuple[str | None, Path]:
    """A place and a file; a file whose own name has `=` in it stays one."""
    place, mark, file = said.partition("=")
    return (place, Path(file)) if mark and place and not Path(said).exists() else (None, Path(said))


def _order_in(path: Path) -> tuple[str, ...]:
    """The names in a file: a JSON list, or a name on each line."""
    try:
        text = read_whole(path, _MOST_ORDER).decode("utf-8")
        names = json.loads(text) if text.lstrip().startswith("[") else [name.strip() for name in text.splitlines()]
    except (ValueError, RecursionError) as error:
        raise BadRules(f"not a list of names: {error}", where=path) from None
    if not all(isinstance(name, str) for name in names):
        raise BadRules("not a list of names: it holds other things", where=path)
    names = [name for name in names if name]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise BadRules(f"names `{printable(twice)}` twice", where=path)
    return tuple(names)


def effort_of(workers: int | None, memory: int, no_lock: bool = False) -> Resources:
    """How much of the machine to use, and no more than the process may."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Resources(min(workers or min(8, cores), most_workers()), memory, not no_lock)


def choices(reading: SourceOptions, edits: Edits | None = None) -> object:
    """How the source is read and changed: another way is another piece of work, which cannot go on with this one."""
    return options_of(reading), edits


def goal_of(target: str, cut: LayoutOptions, reading: SourceOptions) -> Goal:
    """Where and how to write, as the user says."""
    pp = len(cut.stages) // (cut.vpp or 1) if cut.stages and cut.pp is None else cut.pp
    degrees = ParallelDegrees(
        dp=cut.dp, tp=cut.tp, pp=pp, zero=cut.zero, vpp=cut.vpp, ep=cut.ep, etp=cut.etp, stages=cut.stages
    )
    keys = STYLES[cut.keys] if cut.keys else None
    return Goal(Path(target), degrees, rules_of(reading), cut.vocab_rows, keys=keys)


def check_degrees(format: WritableFormat, degrees: ParallelDegrees) -> None:
    """Raises `Unsupported` for a degree that the format knows nothing of."""
    asked = [name for name, value in asdict(degrees).items() if value is not None]
    if unknown := [name for name in asked if name not in format.degrees]:
        known = ", ".join(f"--{name}" for name in format.degrees) or "none, since it is not cut over ranks"
        raise Unsupported(f"format {format.name} cannot follow --{unknown[0]}", hint=f"It can follow: {known}.")


def run(
    source: Checkpoint, format: WritableFormat, goal: Goal, choices: object, effort: Resources, what: str, as_json: bool
) -> None:
    """Write, with a bar, and say what was written."""
    outcome, seconds = write(source, format, goal, choices, effort, what)
    report.outcome(outcome, seconds, as_json)


def write(
    source: Checkpoint, format: WritableFormat, goal: Goal, choices: object, effort: Resources, what: str
) -> tuple[Result, float]:
    """Write, with a bar; what was written, and the seconds it took."""
    parts = pipeline.plan(source, format, goal)
    report.note_losses(format, source, parts)
    if goal.coding is not None or isinstance(format, Delta) or delta_codecs(source) or is_coded(source):
        load_kernels()
    notes.flush()
    began = time.monotonic()
    with progress(what, sum(part.nbytes for part in parts)) as moved:
        outcome = pipeline.copy(source, format, goal, choices, effort, moved, parts)
    return outcome, time.monotonic() - began


def load_kernels() -> None:
    """Load the compiled kernels, so that nothing begins where they are missing. Raises `LibraryError` then."""
    library.load()
    library.level()
