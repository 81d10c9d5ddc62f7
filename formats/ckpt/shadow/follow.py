"""Follow a log until it has to stop, and write bases on the way."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt.job import AnyProgress, Job
from ckpt.pipeline import Result
from ckpt.pipeline.targets import check_target
from ckpt.shadow.shadow import Shadow, ShadowStatus
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError
from ckpt_formats.universal import Universal
from ckpt_formats.universal.chain.chain_file import Member

_SHORTEST, _LONGEST = 0.001, 0.25
"""Seconds between two looks at the files, while nothing appears: twice as long each time."""


@dataclass(frozen=True)
class ShadowEvent:
    """Something that happened.

    Attributes:
        kind: `steps`: some were applied; `waiting`: there are no more now; `base`: one was added to the chain;
            `failed base`: it could not be; `damaged`: records of the log are, so no further step can be applied.
        status: Where the shadow is then.
        base: The new member.
        error: Why there is no new member, or which steps cannot be applied.
    """

    kind: Literal["steps", "waiting", "base", "failed base", "damaged"]
    status: ShadowStatus
    base: Member | None = None
    error: CkptError | None = None


Report = Callable[[ShadowEvent], None]


def follow(shadow: Shadow, report: Report, stop: threading.Event, *, once: bool = False) -> None:
    """Follow the log until `stop` is set; with `once`, up to the last step that all ranks have now.

    Waits for a log whose start is not complete yet, and for one with damaged records, which may be repaired; with
    `once`, raises `IncompleteError` and `CorruptError` for them. Raises as `Shadow.poll`.
    """
    pause, waits, damage = _SHORTEST, False, None
    while not stop.is_set():
        steps = shadow.poll()
        if shadow.base_due:
            report(_add_base(shadow))
        if steps or shadow.has_more:
            pause, waits = _SHORTEST, False
            if steps:
                report(ShadowEvent("steps", shadow.status))
            continue
        if once:
            if shadow.damage is not None:
                raise shadow.damage
            if shadow.step is None:
                raise IncompleteError("the start of the log is not complete", where=shadow.path)
            return
        if not waits:
            report(ShadowEvent("waiting", shadow.status))
            waits = True
        if shadow.damage is not None and shadow.damage.what != damage:
            damage = shadow.damage.what
            report(ShadowEvent("damaged", shadow.status, error=shadow.damage))
        stop.wait(pause)
        pause = min(2 * pause, _LONGEST)


def _add_base(shadow: Shadow) -> ShadowEvent:
    try:
        member = shadow.write_base()
    except CorruptError:
        raise
    except CkptError as error:
        return ShadowEvent("failed base", shadow.status, error=error)
    return ShadowEvent("base", shadow.status, member)


def write(shadow: Shadow, target: Path, progress: AnyProgress | None = None) -> Result:
    """Write the state as a universal checkpoint. Raises `CkptError`."""
    check_target(target, shadow.path)
    with shadow.frozen() as checkpoint:
        return Job(checkpoint, target, Universal()).run(resources=shadow.resources, progress=progress)
