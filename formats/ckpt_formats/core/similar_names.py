"""Names like one that does not exist, for errors."""

from collections.abc import Collection
from itertools import islice

from ckpt_formats.core.text import printable

_MAX_NAMES = 5_000
"""Names that are compared letter by letter, which is slow."""
_MAX_LENGTH = 300


def similar_names(name: str, names: Collection[str], count: int = 3) -> list[str]:
    """Return the names that end like `name`, or that `name` ends like; else those with similar letters."""
    ends = (one for one in names if one.endswith(f".{name}") or name.endswith(f".{one}") or one == f"{name}.weight")
    if alike := list(islice(ends, count)):
        return alike
    if len(name) > _MAX_LENGTH:
        return []
    from difflib import get_close_matches  # most names are right

    return get_close_matches(name, [one for one in islice(names, _MAX_NAMES) if len(one) <= _MAX_LENGTH], n=count)


class UnknownNameError(KeyError):
    """A name that a checkpoint does not have. Its message suggests others, which are looked for when it is shown."""

    def __init__(self, name: object, names: Collection[str]) -> None:
        super().__init__(name)
        self._names = names

    def __str__(self) -> str:
        name = self.args[0]
        if not isinstance(name, str):
            return repr(name)
        similar = similar_names(name, self._names)
        meant = f"; did you mean {' or '.join(f'`{printable(one)}`' for one in similar)}?" if similar else ""
        return f"no parameter is called `{printable(name)}`{meant}"
