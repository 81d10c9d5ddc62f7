"""The names of a parameter's states: those of the library, and those under which they are stored.

The library calls the weight that the model computes with `model`, and the one that the optimizer updates `master`.
Files, logs and codecs call them `param` and `fp32`, in every version. `to_stored` and `from_stored` translate: what
writes or reads a name uses them, and everything else uses the names of the library.

All other states have the optimizer's name. An optimizer's own `model` or `master` is `optimizer.model` or
`optimizer.master` in the library, so that two states never share a name.
"""

from typing import Any, TypeVar

MASTER = "master"
"""The state that the optimizer updates. It is float32 in nearly all runs."""
MODEL = "model"
"""The state that the model computes with."""
STORED_MASTER = "fp32"
STORED_MODEL = "param"

_STORED = {MASTER: STORED_MASTER, MODEL: STORED_MODEL}
_STATES = {stored: state for state, stored in _STORED.items()}
_OWN = "optimizer."
_T = TypeVar("_T")


def to_stored(state: str) -> str:
    """Return the name under which a state is stored."""
    stored = _STORED.get(state)
    if stored is not None:
        return stored
    return state[len(_OWN) :] if _is_own(state) else state


def from_stored(name: str) -> str:
    """Return the library's name of a state that is stored under `name`. `to_stored` is the inverse."""
    state = _STATES.get(name)
    if state is not None:
        return state
    return _OWN + name if _is_own(name) else name


def is_reserved(name: str) -> bool:
    """Return whether a stored state of this name is a weight. An optimizer's own state cannot be stored under it."""
    return name in _STATES


def renamed(name: str) -> str | None:
    """Return why `name` names no state, if it is that of files; else None."""
    state = _STATES.get(name)
    return None if state is None else f"the state `{name}` of files is named `{state}` in the library"


def _is_own(name: str) -> bool:
    """Whether it is `master` or `model` of an optimizer: after any number of prefixes, so that each has one name."""
    if not name.endswith((MASTER, MODEL)):
        return False
    while name.startswith(_OWN):
        name = name[len(_OWN) :]
    return name in _STORED


class States(dict[str, _T]):
    """The states of a parameter by the library's names.

    For a name of files, a look-up raises a `KeyError` that states the library's name. So does `get`, which would find
    no master for `fp32` where there is one.
    """

    def __missing__(self, name: object) -> _T:
        raise KeyError((renamed(name) if isinstance(name, str) else None) or name)

    def get(self, name: str, default: Any = None) -> Any:
        """The state of this name, else `default`. Raises `KeyError` for a name of files."""
        if name in _STATES:
            raise KeyError(renamed(name))
        return super().get(name, default)
