"""Each line of the tables of families is left out or changed, which must be noticed.

A change is noticed if the table is refused, or if what it says of some random model differs: names, shapes, order,
hyperparameters, arguments of Megatron, every value there and back. That the tables themselves are right is what the
tests with transformers and Megatron core show.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_formats.names import tables
from family_facts import FOLDER, Facts, configurations, facts, facts_of_megatron, forget_tables, sample, variants
from run import Round


def rounds(folder: Path, seed: int) -> Generator[Round, None, None]:
    further = variants()
    truths = {
        name: [(one, facts(one)) for one in (*configs, *further[name])] for name, configs in configurations().items()
    }
    megatron = facts_of_megatron()
    for file, line, text in sample(random.Random(seed)):
        own = Path(file).stem
        order = sorted(truths, key=lambda name, own=own: name != own)
        known = [truth for name in order for truth in truths[name]]
        yield Round(f"{file}:{line + 1}", partial(check_noticed, file, line, text, known, megatron))


def check_noticed(
    file: str, line: int, text: str, known: Iterable[tuple[Mapping[str, Any], Facts]], megatron: Facts
) -> dict[str, int]:
    """Raise `AssertionError` if a table with a changed line says the same of all known models."""
    original = tables._text
    forget_tables()
    tables._text = lambda name: text if name == file else original(name)
    try:
        noticed = _is_noticed(known, megatron)
    finally:
        tables._text = original
        forget_tables()
    old, new = (FOLDER / file).read_text("utf-8").splitlines()[line], text.splitlines()[line]
    assert noticed, f"{file}:{line + 1}: {old!r} may become {new!r}"
    return {"noticed": 1}


def _is_noticed(known: Iterable[tuple[Mapping[str, Any], Facts]], megatron: Facts) -> bool:
    try:
        tables.families()
        return facts_of_megatron() != megatron or any(facts(config) != truth for config, truth in known)
    except Exception:  # whatever it raises, nobody would take the table for a good one
        return True
