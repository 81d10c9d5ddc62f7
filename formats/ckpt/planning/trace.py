"""Times of failures from a file.

One time a line: seconds since any moment, or ISO 8601 with date and time (without a zone: UTC). Empty lines and lines
that start with `#` do not count. Or CSV with a header, of which one column has the times. The times need no order.
"""

import csv
import math
from collections.abc import Iterator
from datetime import datetime, timezone
from io import StringIO
from itertools import pairwise
from pathlib import Path

from ckpt.planning.simulate import MAX_FAILURES
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.text import printable

_MAX_NBYTES = 1 << 25
_MAX_LENGTH = 64
"""Characters of a time."""
_HINT = (
    "One time a line: seconds, or ISO times such as 2026-11-23T09:30:00Z. For CSV, name the column with --trace-column."
)


def read_gaps(path: Path, column: str | None = None) -> list[float]:
    """The seconds between the failures of a trace, in order of time.

    Args:
        path: The file, at most 32 MiB of UTF-8.
        column: The name of a column of a CSV file with a header; None: one time a line.

    Raises:
        NotFoundError: There is no such file.
        CorruptError: A line has no time, the times are of both kinds, or there are fewer than three.
        UnsafeError: The file is too large.
    """
    try:
        text = read_whole(path, _MAX_NBYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise CorruptError("a trace of failures must be text in UTF-8", where=path, hint=_HINT) from None
    times: list[float] = []
    dated: bool | None = None
    for line, cell in _cells(text, column, path):
        is_dated, value = _time(cell, line, path)
        if dated is not None and is_dated != dated:
            raise CorruptError(f"line {line} has another kind of time than those before it", where=path, hint=_HINT)
        dated = is_dated
        times.append(value)
        if len(times) > MAX_FAILURES:
            raise CorruptError(f"it has more than {MAX_FAILURES:,} failures", where=path)
    if len(times) < 3:
        raise CorruptError(f"it has {len(times)} times of failures; a trace needs at least 3", where=path, hint=_HINT)
    times.sort()
    if times[-1] == times[0]:
        raise CorruptError("all its failures have the same time", where=path, hint=_HINT)
    return [after - before for before, after in pairwise(times)]


def _cells(text: str, column: str | None, path: Path) -> Iterator[tuple[int, str]]:
    """The numbers of lines, and the text of the time in each."""
    if column is None:
        for number, line in enumerate(StringIO(text, newline=None), 1):  # no list: a file may be all line ends
            if line.strip() and not line.lstrip().startswith("#"):
                yield number, line.strip()
        return
    rows = csv.reader(StringIO(text, newline=None), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        if header.count(column) != 1:
            known = ", ".join(printable(name)[:_MAX_LENGTH] for name in header[:20])
            raise CorruptError(
                f"its header does not have one column `{printable(column)}`: {known}", where=path, hint=_HINT
            )
        index = header.index(column)
        for row in rows:
            if not row:
                continue
            if index >= len(row):
                raise CorruptError(f"line {rows.line_num} has no column `{printable(column)}`", where=path, hint=_HINT)
            yield rows.line_num, row[index].strip()
    except csv.Error as error:
        raise CorruptError(f"line {rows.line_num} is not CSV: {error}", where=path, hint=_HINT) from None


def _time(cell: str, line: int, path: Path) -> tuple[bool, float]:
    """Is the time a date? And its seconds."""
    if len(cell) <= _MAX_LENGTH:
        try:
            value = float(cell)
        except ValueError:
            pass
        else:
            if math.isfinite(value) and abs(value) <= 1e12:
                return False, value
            raise CorruptError(f"line {line}: {printable(cell)} is not a number of seconds", where=path, hint=_HINT)
        try:
            moment = datetime.fromisoformat(cell[:-1] + "+00:00" if cell.endswith(("Z", "z")) else cell)
            moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
            return True, (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)).total_seconds()
        except (ValueError, OverflowError):
            pass
    shown = printable(cell[:_MAX_LENGTH]) + "…" * (len(cell) > _MAX_LENGTH)
    raise CorruptError(f"line {line}: `{shown}` is not a time", where=path, hint=_HINT)
