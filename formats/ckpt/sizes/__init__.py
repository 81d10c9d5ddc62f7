"""What the states of a checkpoint take, decoded and stored; and what coding would save."""

from ckpt.sizes.state_sizes import StateSizes, rows, rows_of, table, total, written_rows

__all__ = ["StateSizes", "rows", "rows_of", "table", "total", "written_rows"]
