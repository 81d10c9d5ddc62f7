"""Renamings under which the names of a checkpoint become those of a model.

Each is a pattern and its replacement, as `--rename` takes them. Modules around a model put a prefix before all names:
DDP `module.`, a compiled module `_orig_mod.`, a head over a base model `model.`; and checkpoints of only the base model
lack it.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

Renaming = tuple[str, str]
"""A regular expression, searched anywhere in a name, and what stands in its place."""

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
_MAX_STEPS = 3
_MAX_PREFIXES = 4
_MAX_SAMPLES = 20_000
"""Names from which prefixes are guessed."""
_MAX_PATTERN = 200
_MAX_HEADS = 12
"""First words of names that a pattern lists."""


def find_renamings(names: Sequence[str], expected: Collection[str]) -> tuple[Renaming, ...]:
    """Return renamings, in this order, after which more of the names are expected ones; none if there are none."""
    wanted, current = set(expected), list(names)
    steps: list[Renaming] = []
    while len(steps) < _MAX_STEPS:
        count = len(wanted.intersection(current))
        tried = [(_score(renamed, wanted), one, renamed) for one, renamed in _tried(current, wanted)]
        best = max(tried, key=lambda trial: trial[0], default=None)
        if best is None or best[0] <= count:
            break
        steps.append(best[1])
        current = best[2]
    return tuple(steps)


def renamed(names: Sequence[str], renaming: Renaming) -> list[str]:
    """Return the names after one renaming."""
    pattern, replacement = re.compile(renaming[0]), renaming[1]
    return [pattern.sub(replacement, name) for name in names]


def _score(names: list[str], wanted: set[str]) -> int:
    """How many names are expected; -1 if two have become one."""
    return len(wanted.intersection(names)) if len(set(names)) == len(names) else -1


def _tried(names: list[str], wanted: set[str]) -> Iterator[tuple[Renaming, list[str]]]:
    for renaming in dict.fromkeys(_candidates(names, wanted)):
        if len(renaming[0]) <= _MAX_PATTERN and "=" not in renaming[1]:  # or `--rename` would not take it
            yield renaming, renamed(names, renaming)


def _candidates(names: list[str], wanted: set[str]) -> Iterator[Renaming]:
    for wrapper in _WRAPPERS:
        if any(name.startswith(f"{wrapper}.") for name in names):
            yield rf"^{wrapper}\.", ""
        if wrapper != "module" and any(f".{wrapper}." in name for name in names):
            yield rf"{wrapper}\.", ""
    lacking, missing = [name for name in names if name not in wanted], sorted(wanted.difference(names))
    for old, new in _swaps(lacking[:_MAX_SAMPLES], missing[:_MAX_SAMPLES]):
        replacement = new.replace("\\", r"\\")
        yield f"^{re.escape(old)}", replacement
        heads = dict.fromkeys(
            name[len(old) :].partition(".")[0]
            for name in lacking
            if name.startswith(old) and new + name[len(old) :] in wanted
        )
        if 0 < len(heads) <= _MAX_HEADS:
            yield rf"^{re.escape(old)}({'|'.join(map(re.escape, heads))})\.", replacement + r"\1."


def _swaps(names: Sequence[str], missing: Sequence[str]) -> list[tuple[str, str]]:
    """The most usual prefixes of names, and those of missing names that end alike. A prefix ends in a point."""
    ends: dict[str, list[str]] = {}
    for name in missing:
        for start in _starts(name):
            ends.setdefault(name[start:], []).append(name[:start])
    counts = Counter[tuple[str, str]]()
    for name in names:
        for start in _starts(name):
            prefixes = ends.get(name[start:], [])
            counts.update((name[:start], prefix) for prefix in prefixes[:_MAX_PREFIXES])
            if prefixes:
                break  # the longest end counts
    return [swap for swap, _ in counts.most_common(_MAX_PREFIXES)]


def _starts(name: str) -> Iterator[int]:
    """Where a name and the parts of it after each point begin; the last part, such as `weight`, alone says nothing."""
    yield 0
    yield from (point.end() for point in re.finditer(r"\.", name[: name.rfind(".")]))
