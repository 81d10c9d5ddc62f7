"""Who holds a lease: a process, and whether it is known to have ended."""

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

_MAX_SECONDS = 24 * 3600.0
"""A lease may be a file from strangers: it lasts no longer, whatever it says."""


@dataclass(frozen=True)
class LeaseOwner:
    """A process that holds a lease."""

    id: str
    host: str
    machine: str
    """The start of the machine and the namespace in which the process has its number."""
    pid: int
    started: str
    """When the process started, as the system counts it: numbers of processes are used again."""
    seconds: float
    """After how long it is taken for dead."""

    @classmethod
    def of_this_process(cls, seconds: float) -> "LeaseOwner":
        return cls(uuid4().hex, socket.gethostname(), this_machine(), os.getpid(), _start_of(os.getpid()), seconds)

    @property
    def is_dead(self) -> bool:
        """Whether it ran here and has ended. Of processes elsewhere, and where that cannot be known: False."""
        return bool(self.machine) and self.machine == this_machine() and _start_of(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def to_json(self, **more: str) -> bytes:
        """The owner as the content of a lease, with further fields."""
        return json.dumps({**vars(self), **more}).encode()


def owner_in(data: bytes) -> LeaseOwner | None:
    """The owner that the content of a lease names; None if it names none."""
    try:
        fields: dict[str, Any] = json.loads(data)
        return LeaseOwner(
            str(fields["id"]),
            str(fields["host"]),
            str(fields["machine"]),
            int(fields["pid"]),
            str(fields["started"]),
            min(_MAX_SECONDS, float(fields["seconds"])),  # in this order, NaN gives the limit
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def this_machine() -> str:
    """As in `LeaseOwner.machine`; empty if the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """When a process started; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]  # field 22 of proc(5): the name before it may have spaces
