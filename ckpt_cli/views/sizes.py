"""The table of the bytes of states."""

from collections.abc import Iterator

from ckpt.sizes import StateSizes, total
from ckpt_formats.core.text import format_nbytes


def table(parts: list[StateSizes], sizes: str = "stored") -> Iterator[str]:
    """The rows and their total, as lines of text."""
    lines = [("state", "type", "elements", "raw", sizes, "ratio", "bits", "codec")]
    for row in (*parts, total(parts)):
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        codecs = "" if row.state == "total" and not row.dtype else ", ".join(row.codecs)
        lines.append(
            (
                row.state,
                row.dtype,
                f"{row.elements:,}",
                format_nbytes(row.raw),
                format_nbytes(row.stored),
                ratio,
                f"{row.bits:.2f}",
                codecs,
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(8)]
    for line in lines:
        cells = (
            cell.ljust(width) if i in (0, 1, 7) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
