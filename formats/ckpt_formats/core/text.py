"""Text: file names for untrusted names, and names and sizes for people."""

import re
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import TypeVar

PARTIAL = ".ckpt-partial"
"""The suffix of a folder in which a checkpoint is being written."""

REMOVED = ".ckpt-removed"
"""The suffix of a checkpoint that is being removed."""

REPLACED = ".ckpt-replaced"
"""The suffix of a second name of a file that is being replaced."""

NEW = ".ckpt-new."
"""The beginning of the name of a checkpoint that will replace another one."""

STAGED = ".ckpt"
"""The folder, in a target that is in a store, for what is known of the job that writes it."""

MAX_LISTED = 3
"""The names that a message lists, unless it has room for more."""

_MAX_SLUG = 80

T = TypeVar("T")


def file_stem(name: str) -> str:
    """A file name for any text: a readable part, and a hash, so that different texts have different names.

    Lower case, ASCII, no separators, at most 101 characters: safe on every file
    system, also on those that ignore case. The true name belongs in a manifest.

    >>> file_stem("layers.0.Attn/qkv")
    'layers.0.attn_qkv-b8b1a6beab0342a4ea39'
    """
    from hashlib import blake2b  # it loads OpenSSL, which readers do not need

    slug = re.sub(r"[^a-z0-9._-]+", "_", name.lower())[:_MAX_SLUG].strip("._-") or "tensor"
    return f"{slug}-{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=10).hexdigest()}"


def format_nbytes(nbytes: float) -> str:
    """A number of bytes for people.

    >>> format_nbytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def format_count(count: int) -> str:
    """A number of parameters for people: three digits from a million on, all digits below.

    >>> format_count(65_536), format_count(4_053_264), format_count(999_999_999), format_count(7_241_732_096)
    ('65,536', '4.05 M', '1.00 B', '7.24 B')
    """
    if count < 1_000_000:
        return f"{count:,}"
    scaled = float(count)
    for unit in ("", "M", "B", "T"):
        scaled = count / 1e6 if unit == "M" else scaled / 1e3 if unit else scaled
        if unit and scaled < 999.5:
            break
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:,.{digits}f} {unit}"


def format_share(part: float, whole: float) -> str:
    """A share in percent for people; it says 0 % and 100 % only of none and all, and `-` of nothing.

    >>> format_share(1, 3), format_share(9_999, 10_000), format_share(1, 10**9), format_share(7, 7), format_share(0, 0)
    ('33.3 %', '>99.9 %', '<0.001 %', '100 %', '-')
    """
    if not whole:
        return "-"
    percent = 100 * part / whole
    if percent and abs(percent) < 1e-3:
        return "<0.001 %"
    text = f"{percent:.3g}"
    return ">99.9 %" if text == "100" and part < whole else f"{text} %"


def printable(name: str) -> str:
    """A name for people: control and bidirectional characters are escaped, so that no terminal executes them.

    >>> print(printable("\\x1b[2Jlayers\\n"))
    \\x1b[2Jlayers\\n
    >>> printable("größe\\n") == "größe" + r"\\n"
    True
    """
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def quoted(name: str) -> str:
    """A name for people, in quotes: see `printable`."""
    return f"`{printable(name)}`"


def list_names(
    names: Collection[T],
    form: Callable[[T], str] = quoted,  # type: ignore[assignment]
    max_count: int = MAX_LISTED,
    separator: str = ", ",
) -> str:
    """The first names, and how many more there are; empty if there are none. `form` returns the text for one of them.

    >>> list_names(["a", "b", "c", "d", "e"])
    '`a`, `b`, `c` and 2 more'
    >>> list_names([1, 2], str, 2)
    '1, 2'
    """
    more = f" and {len(names) - max_count:,} more" if len(names) > max_count else ""
    return separator.join(map(form, islice(names, max_count))) + more


def counted(count: int, noun: str) -> str:
    """How many of something, in words.

    >>> counted(1, "tensor"), counted(2000, "tensor")
    ('1 tensor', '2,000 tensors')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def folded(line: str, room: int) -> Iterator[str]:
    """A line as lines of at most `room` characters, broken at spaces only; what follows is indented further.

    >>> list(folded("  weight  [4, 4] float32", 20))
    ['  weight  [4, 4]', '        float32']
    """
    indent = " " * min(len(line) - len(line.lstrip(" ")) + 6, room // 2)
    while len(line) > room:
        end = line.rfind(" ", len(indent) + 1, room + 1)
        end = line.find(" ", room) if end < 0 or not line[:end].strip() else end
        if end < 0:
            break
        yield line[:end].rstrip()
        line = indent + line[end:].lstrip()
    yield line
