"""Bases that a shadow starts from, and adds to its chain: written beside other work, checked, and then named."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.chains.append import folder_name
from ckpt.chains.change import change
from ckpt.chains.write import DeltaPolicy, write_base
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.stores.location import place_at
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chain import folder
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member

_WAIT_SECONDS = 60.0
"""How long to wait for another process that changes the chain."""


def add_base(
    run: Path, source: Checkpoint, step: int, segment: str, check: Callable[[Checkpoint], None], resources: Execution
) -> Member:
    """Write the state of a step of a segment as a base, and add it to the chain. Returns the new member.

    The chain is locked only while its list is replaced, so that a run can begin a segment meanwhile. `check` gets the
    state as it was written, and raises if that has other values. If anything fails, the chain is unchanged: raises
    `UnsupportedError` if it has later members now or has dropped the step, `LockedError`, `NoSpaceError` or another
    `CkptError`.
    """
    path = run / folder_name(step)
    with change(run, resources, wait=_WAIT_SECONDS) as changed:
        _check_place(run, changed.chain or ChainIndex(()), step, segment)
        changed.remove_leftovers(path.name)
    written = write_base(source, path, step, DeltaPolicy(), resources)
    try:
        with _in_use(path / manifest.NAME):
            check(Universal().read(path, ReadOptions()))
            with change(run, resources, wait=_WAIT_SECONDS) as changed:
                chain = changed.chain or ChainIndex(())
                _check_place(run, chain, step, segment)
                changed.replace(ChainIndex((*chain.members, written.member), chain.segments))
                if chain.tip is not None:
                    changed.remove([run / chain.tip.folder])
    except BaseException:
        if not _is_named(run, path.name):
            place_at(run).remove([path.name], first=folder.MANIFEST)
        raise
    return written.member


def _check_place(run: Path, chain: ChainIndex, step: int, segment: str) -> None:
    """Raise `UnsupportedError` unless the chain still has the step, and no member after it."""
    logged = next((one for one in chain.segments if one.folder == segment), None)
    if logged is None or (logged.step is not None and logged.step < step):
        raise UnsupportedError(f"the chain has dropped step {step}", where=run)
    if chain.members and chain.members[-1].step >= step:
        raise UnsupportedError(f"the chain has a state of step {chain.members[-1].step} already", where=run)


def _is_named(run: Path, name: str) -> bool:
    chain = folder.peek(run)
    return chain is not None and any(member.folder == name for member in chain.members)


@contextmanager
def _in_use(path: Path) -> Iterator[None]:
    """Within, others see that a process uses the folder of this file, and do not remove it as a leftover."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
