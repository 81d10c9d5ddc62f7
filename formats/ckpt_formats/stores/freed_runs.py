"""Free a run in the memory of its holders."""

from contextlib import closing
from dataclasses import dataclass

from ckpt_formats.core.errors import CkptError, InvalidArgumentError, NotFoundError
from ckpt_formats.stores import piece_requests
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.wire import parse_addresses

_SECONDS = 20.0
"""How long a holder may take for an answer."""
_ALWAYS = (1 << 62) - 1
"""Nanoseconds since 1970, after all times at which pieces can begin."""


@dataclass(frozen=True)
class FreedRun:
    """What a holder had of a run, or why it does not answer."""

    address: NetworkAddress
    nbytes: int = 0
    error: CkptError | None = None


def free_run(url: str, credentials: Credentials) -> list[FreedRun]:
    """Let the holders in `peers://HOST:PORT,HOST:PORT/RUN` free all that they have of the run, one after another.

    Raises `InvalidArgumentError`, and `NotFoundError` if all answer and none has the run.
    """
    scheme, _, place = url.partition("://")
    hosts, _, run = place.partition("/")
    if scheme != "peers" or piece_requests.NAME.fullmatch(run) is None:
        raise InvalidArgumentError(
            "names no run of holders", where=url, hint="Write peers://HOST:PORT,HOST:PORT/RUN, all of a run."
        )
    freed = [_freed(address, run, credentials) for address in parse_addresses(hosts)]
    if not any(one.nbytes or one.error for one in freed):
        raise NotFoundError(f"no holder has a run {run}", where=url, hint="`ckpt hold --status` shows what each has.")
    return freed


def _freed(address: NetworkAddress, run: str, credentials: Credentials) -> FreedRun:
    try:
        with closing(Connection(address, credentials, "holder", _SECONDS)) as connection:
            status = piece_requests.holder_status(connection)
            before = sum(one.nbytes + one.parity_nbytes for one in status.runs if one.run == run)
            piece_requests.drop(connection, run, _ALWAYS)
            return FreedRun(address, before)
    except CkptError as error:
        return FreedRun(address, error=error)
