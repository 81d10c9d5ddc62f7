"""Cores, memory and limits of this machine, or of the container that is all that this process has of it."""

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Machine:
    """What this process may use. None: the system does not say, or there is no limit."""

    system: str
    """The name of the system and its release, and the processor."""
    cores: int
    """Cores that this process may run on."""
    core_limit: float | None
    """How many cores a container may use on average."""
    memory_nbytes: int | None
    available_nbytes: int | None
    """What processes can get now: the machine's, or the rest of the container's."""
    memory_limit_nbytes: int | None
    """What the container may use."""
    open_files: int | None
    """How many files a process may have open."""
    shared_nbytes: int | None
    """The size of /dev/shm."""


def describe_machine() -> Machine:
    """Ask the system."""
    memory = _memory()
    available, limit = memory.get("MemAvailable"), _number(_CGROUP / "memory.max")
    used = _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        rest = max(0, limit - used)
        available = rest if available is None else min(available, rest)
    return Machine(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cores=_cores(),
        core_limit=_core_limit(),
        memory_nbytes=memory.get("MemTotal"),
        available_nbytes=available,
        memory_limit_nbytes=limit,
        open_files=_open_files(),
        shared_nbytes=_shared(),
    )


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _core_limit() -> float | None:
    """The quota of version 2 of cgroups, `MAX PERIOD`, in cores."""
    with suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max" and int(period) > 0:
            return int(quota) / int(period)
    return None


def _memory() -> dict[str, int]:
    """The lines of /proc/meminfo, in bytes."""
    with suppress(OSError, ValueError, IndexError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1}
    with suppress(OSError, ValueError, AttributeError):
        return {"MemTotal": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    return {}


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None  # also for `max`


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _shared() -> int | None:
    with suppress(OSError, AttributeError):
        status = os.statvfs(_SHARED)
        return status.f_blocks * status.f_frsize
    return None
