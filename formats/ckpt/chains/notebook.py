"""What a chain shows in a notebook."""

from pathlib import Path

from ckpt_formats.core.notebook import panel, table
from ckpt_formats.core.text import format_nbytes
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member


def of_chain(path: Path, index: ChainIndex, steps: int, last: int | None) -> str:
    """How many steps can be restored, the bytes of all states, and a row for each state, the last ones first."""
    raw = sum(member.raw_nbytes for member in index.members)
    stored = sum(member.stored_nbytes for member in index.members)
    facts = [
        f"{steps:,} step{'s' * (steps != 1)} can be restored",
        "empty" if last is None else f"the last is {last:,}",
        f"{len(index.members):,} states of {format_nbytes(raw)} in {format_nbytes(stored)}",
    ]
    if index.segments:
        facts.append(f"{len(index.segments):,} segments of gradients")
    rows = [_row(member) for member in reversed(index.members)]
    heads = ("step", "kind", "stored", "raw", "values", "codecs")
    return panel(path.name or str(path), facts, table("States", heads, rows, (1, 4, 5)))


def _row(member: Member) -> tuple[str, ...]:
    values = "exact" if member.exact else "approximate"
    sizes = format_nbytes(member.stored_nbytes), format_nbytes(member.raw_nbytes)
    return f"{member.step:,}", member.kind, *sizes, values, ", ".join(member.codecs)
