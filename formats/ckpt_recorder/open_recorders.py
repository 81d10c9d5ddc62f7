"""The recorders of this process that are not closed: a new one replaces them, and a forked process lets go of them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import torch


class OpenRecorder(Protocol):
    """What is needed of a recorder here."""

    chain: Path
    is_in_block: bool
    """Is it in a `with` block, which closes it?"""

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]: ...

    def release(self, reason: str) -> None:
        """Record nothing more. `reason`: why."""


_OPEN: "WeakSet[Any]" = WeakSet()


def add(recorder: OpenRecorder) -> None:
    """A recorder has begun."""
    _OPEN.add(recorder)


def remove(recorder: OpenRecorder) -> None:
    """A recorder was closed."""
    _OPEN.discard(recorder)


def replaced_by(chain: Path, optimizers: tuple[torch.optim.Optimizer, ...]) -> Iterator[OpenRecorder]:
    """The open recorders of the same chain or the same optimizer that nothing will close."""
    own = set(map(id, optimizers))
    path = os.path.realpath(chain)
    for one in list(_OPEN):
        is_same = own & set(map(id, one.optimizers)) or os.path.realpath(one.chain) == path
        if is_same and not one.is_in_block:
            yield one


def _release_in_fork() -> None:
    for one in list(_OPEN):
        one.release("this process was forked from that of the run, which goes on recording")
    _OPEN.clear()


os.register_at_fork(after_in_child=_release_in_fork)
