"""The table of the bytes of states."""

from ckpt.sizes import StateSizes, total
from ckpt_cli.views import columns
from ckpt_formats.core.text import format_nbytes


def table(parts: list[StateSizes], sizes: str = "stored", indent: int = 0) -> str:
    """The rows and their total, as text."""
    rows = []
    for row in (*parts, total(parts)):
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        codecs = "" if row.state == "total" and not row.dtype else ", ".join(row.codecs)
        nbytes = (format_nbytes(row.raw), format_nbytes(row.stored))
        rows.append((row.state, row.dtype, f"{row.elements:,}", *nbytes, ratio, f"{row.bits:.2f}", codecs))
    head = ("state", "type", "elements", "raw", sizes, "ratio", "bits", "codec")
    return columns.table(head, rows, right=range(2, 7), breaks=(7,), indent=indent)
