"""One checkpoint from the shadows that hold the parts of a state, all frozen at the same step."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from ckpt.shadow.client import ShadowConnection
from ckpt.shadow.described import PartOfState
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.errors import CorruptError, IncompleteError, InvalidArgumentError, UnsupportedError
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.http_client import NO_CREDENTIALS, Credentials

AGREE_SECONDS = 60.0
"""For how long shadows get requests until all are at one step of one segment."""


class JoinedShadows:
    """Connections to the shadows of all parts, or to the one of the whole state, which freeze it until this is closed.

    checkpoint: The frozen state.
    """

    def __init__(self, addresses: Sequence[NetworkAddress], credentials: Credentials = NO_CREDENTIALS) -> None:
        """Connect to all, and let those that are behind go on to the step of the one that is ahead.

        Raises `IncompleteError` if parts are missing or a shadow does not reach the step in time, `UnsupportedError`
        if they are not the parts of one state, `InvalidArgumentError` if one is named twice, and as `ShadowConnection`.
        """
        self._open = ExitStack()
        deadline = time.monotonic() + AGREE_SECONDS
        while True:
            with ExitStack() as stack:
                shadows = [stack.enter_context(ShadowConnection(one, credentials)) for one in addresses]
                _check_parts(shadows, addresses)
                if _agree(shadows):
                    self.checkpoint: Checkpoint = _joined(shadows, addresses)
                    self._open = stack.pop_all()
                    return
            if time.monotonic() > deadline:  # one has gone on to the next segment, and another one has not yet
                raise IncompleteError("the shadows follow different segments of the log", hint="Try again later.")
            time.sleep(0.1)

    def __enter__(self) -> "JoinedShadows":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all connections: the shadows go on. The checkpoint must not be read any more."""
        self._open.close()


def _agree(shadows: Sequence[ShadowConnection]) -> bool:
    """Bring all shadows to the same step. Returns False if they follow different segments now."""
    if len({one.part and one.part.segment for one in shadows}) > 1:
        return False
    last = max(one.checkpoint.step or 0 for one in shadows)
    for one in shadows:
        if (one.checkpoint.step or 0) < last:
            one.advance(last)
            if one.checkpoint.step != last:
                raise CorruptError(f"the shadow is at step {one.checkpoint.step} instead of {last}")
    return len({one.part and one.part.segment for one in shadows}) == 1


def _check_parts(shadows: Sequence[ShadowConnection], addresses: Sequence[NetworkAddress]) -> None:
    parts = [one.part for one in shadows]
    if len(parts) == 1 and parts[0] is None:
        return
    for part, address in zip(parts, addresses, strict=True):
        if part is None:
            raise UnsupportedError("this shadow holds the whole state: name it alone", where=f"tcp://{address}")
    known = [part for part in parts if part is not None]
    if len({(part.run, part.count) for part in known}) > 1:
        raise UnsupportedError("the shadows hold parts of different runs, or another number of parts")
    numbers, count = [part.number for part in known], known[0].count
    missing = sorted(set(range(1, count + 1)).difference(numbers))
    if missing:
        raise IncompleteError(
            f"part {missing[0]} of {count} is missing",
            hint="Name the shadows of all parts: tcp://HOST:PORT,tcp://HOST:PORT",
        )
    if len(numbers) != count:
        raise InvalidArgumentError("a part is named twice")


def _joined(shadows: Sequence[ShadowConnection], addresses: Sequence[NetworkAddress]) -> Checkpoint:
    """The state of which these are the parts. What is no parameter is that of part 1."""
    parts = [(one.part, one.checkpoint) for one in shadows if one.part is not None]
    if not parts:
        return shadows[0].checkpoint
    first: tuple[PartOfState, Checkpoint] = next(one for one in parts if one[0].number == 1)
    by_place: dict[int, Parameter] = {}
    for part, checkpoint in parts:
        for place, parameter in zip(part.places, checkpoint.parameters.values(), strict=True):
            if place in by_place:
                raise CorruptError(f"`{parameter.name}` is in two parts")
            by_place[place] = parameter
    names = [by_place[place].name for place in sorted(by_place)]
    if len(by_place) != first[0].total or len(set(names)) != len(names):
        raise CorruptError("the parts are not those of one state: they do not have each parameter once")
    errors = {key: figures for _, one in parts for key, figures in one.errors.items()}
    history = tuple(edit for _, one in parts for edit in one.history)
    parameters = {by_place[place].name: by_place[place] for place in sorted(by_place)}
    return replace(first[1], parameters=parameters, errors=errors, history=history)
