"""Which files are lost together: each alone, those of a folder, those of a node, or those that a table states."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.text import printable
from ckpt_formats.parity.code import MAX_BLOCKS
from ckpt_formats.parity.manifest import BLOCK_NBYTES, Domain, DomainGroup, ProtectedFile

MAX_TABLE = 1 << 20
BY = "file, folder, or node:N with the number of ranks of a node"
_RANK = re.compile(r"(?:^|.*[^a-z])(?:zero_pp_rank|dp_rank|rank|mp_rank|__)[_-]?(\d{1,7})(?:\D.*)?")
"""The number of the rank in a file's name: `zero_pp_rank_3_mp_rank_00_optim_states.pt`, `__3_0.distcp`."""
_NODE = re.compile(r"node:(\d{1,5})")


def domains_of(files: Sequence[ProtectedFile], by: str, table: Path | None) -> tuple[Domain, ...]:
    """The domains of files, in the order of their first files.

    Raises `InvalidArgumentError` for another `by`, or if a table does not name the domain of a file.
    """
    if table is not None:
        rules = _rules(table)
        return _together((_named(file.name, rules, table), file) for file in files)
    if by == "file":
        return tuple(Domain(file.name, (file,)) for file in files)
    if by == "folder":
        return _together((file.name.partition("/")[0] if "/" in file.name else ".", file) for file in files)
    match = _NODE.fullmatch(by)
    if match is None or not int(match[1]):
        raise InvalidArgumentError(f"by={by} is not {BY}", hint="A node of 8 ranks: --by node:8.")
    # What no rank has in its name, rank 0 has written.
    return _together((f"node {_rank(file.name) // int(match[1])}", file) for file in files)


def groups_of(domains: Sequence[Domain], parities: int, jump: int = 1) -> tuple[DomainGroup, ...]:
    """Groups that a code can have. Neighbours, which may be lost together, are in different groups.

    `jump`: divide into at least so many groups, so that those of a group are so far apart, in the order of ranks.

    Raises `InvalidArgumentError` if there are fewer domains.
    """
    if jump > len(domains):
        raise InvalidArgumentError(
            f"jump={jump}: there are only {len(domains)} domains",
            hint="Ranks of a host that are lost together: --by node:N.",
        )
    if jump > 1:
        domains = sorted(domains, key=lambda domain: _rank(domain.files[0].name))
    count = max(jump, -(-len(domains) // (MAX_BLOCKS - parities)))
    return tuple(DomainGroup(tuple(domains[number::count]), parities) for number in range(count))


def parts_of(file: ProtectedFile, count: int) -> tuple[Domain, ...]:
    """At most so many parts of a file, which have equally many blocks but for the last one."""
    nbytes = -(-file.block_count // min(count, file.block_count)) * BLOCK_NBYTES
    parts = (ProtectedFile(file.name, min(nbytes, file.nbytes - at), at) for at in range(0, file.nbytes, nbytes))
    return tuple(Domain(f"part {number}", (part,)) for number, part in enumerate(parts))


def _rank(name: str) -> int:
    match = _RANK.fullmatch(name.rpartition("/")[2])
    return int(match[1]) if match else 0


def _together(named: Iterable[tuple[str, ProtectedFile]]) -> tuple[Domain, ...]:
    files: dict[str, list[ProtectedFile]] = {}
    for name, file in named:
        files.setdefault(name, []).append(file)
    return tuple(Domain(name, tuple(own)) for name, own in files.items())


def _rules(table: Path) -> list[tuple[str, str]]:
    """The lines `DOMAIN PATTERN` of a table: the first pattern that a file's name matches states its domain."""
    lines = read_whole(table, MAX_TABLE).decode("utf-8", "replace").splitlines()
    words = [line.split() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if wrong := next((one for one in words if len(one) != 2), None):
        line = printable(" ".join(wrong))[:80]
        raise InvalidArgumentError(
            f"`{line}` is not DOMAIN PATTERN", where=table, hint="For example: host-0 *rank_0[0-7]*"
        )
    return [(domain, pattern) for domain, pattern in words]


def _named(name: str, rules: Sequence[tuple[str, str]], table: Path) -> str:
    for domain, pattern in rules:
        if fnmatchcase(name, pattern):
            return domain
    hint = "Add a line for it; `rest *` at the end takes all others."
    raise InvalidArgumentError(f"no line of the table matches the file {printable(name)}", where=table, hint=hint)
