"""What is checked before a target is written, and what names its job; and the errors of a job that fails."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ckpt.pipeline.targets import check_target
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint
from ckpt_formats.core.errors import CorruptError, IncompleteError, OutputError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.fingerprint import fingerprint
from ckpt_formats.core.folders import parity_of_file, replaced_file
from ckpt_formats.core.format import FilePlan, Plan, WritableFormat
from ckpt_formats.core.header_problems import missing_blocks
from ckpt_formats.core.identity import Identities, Identity, joined
from ckpt_formats.core.seal_checks import ListedSeals, SealChecks
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.version import WRITTEN_BY
from ckpt_formats.registry.plugins import blamed_on_package, returned
from ckpt_formats.registry.seal_places import place_of_file


def plan(source: Checkpoint, target: Path, format: WritableFormat) -> Plan:
    """The files to write, before any tensor is read. Raises `CkptError` if the job cannot succeed."""
    check_complete(source)
    check_not_suspicious(source)
    inputs = (path for edit in source.history for path in edit.inputs())
    for path in (source.path, *(one.path for one in format.inputs()), *inputs):
        check_target(target, path)
    check_nothing_beside(target)
    roles = {parameter.role for parameter in source.parameters.values()}
    if format.needs_model and roles == {"extra"}:
        raise UnsupportedError(
            f"the checkpoint has no weights of a model, and the format {format.name} holds nothing else",
            where=source.path,
            hint="The formats universal and torch hold everything (--to universal).",
        )
    with blamed_on_package(format):
        return returned(format.plan(source), Plan)


def check_nothing_beside(target: Path, is_sealed: bool = False) -> None:
    """Raise `OutputError` if a seal file or parity of a file that is gone lies beside a target in a file system.

    The new file would be called damaged, and `repair` would set it back, block by block. With a second name of that
    file, what is written beside the new one later would not count. `is_sealed`: the job itself writes the seal file
    first.
    """
    own = [parity_of_file(target), replaced_file(target)] + ([] if is_sealed else [place_of_file(target)])
    for place in () if is_remote(target) else own:
        if os.path.lexists(place):
            raise OutputError(
                f"belongs to {printable(target.name)}, which is gone, and does not fit a new file of that name",
                where=place,
                hint="Remove it, or choose another target.",
            )


def identities_of(source: Checkpoint, format: WritableFormat) -> Identities:
    """The identities of all files that the result depends on."""
    identities = joined(source.identities, *(other.identities for other in format.inputs()))
    for path in format.input_files():
        for file in _files_of(path):
            identities.setdefault(file, Identity.of(file.stat()))
    return identities


def _files_of(path: Path) -> list[Path]:
    """A file, or those in a folder."""
    if not path.exists():
        return []
    return [file for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.is_file()]


def check_complete(source: Checkpoint) -> None:
    """Raise `IncompleteError` if tensors have missing or overlapping parts. The error names the first of them."""
    problems = list(missing_blocks(source))
    for problem in problems:
        if problem.kind == "header":
            raise IncompleteError(problem.what, where=problem.where, hint="Copy the file again, or take another step.")
    if problems:
        message = list_names(
            problems, lambda one: f"`{printable(one.tensors[0])}` {printable(one.what)}", separator="; "
        )
        raise IncompleteError(message, where=source.path, hint="Are files of some ranks missing?")


def check_not_suspicious(source: Checkpoint) -> None:
    """Raise `CorruptError` if the checkpoint has suspicions, such as optimizer states that belong to other weights."""
    if source.suspicions:
        raise CorruptError(
            source.suspicions[0],
            where=source.path,
            hint="Take another checkpoint of the run, or only its weights: `weights_only()`, or --model-only. "
            "--accept-suspicious writes everything as it is.",
        )


def space_needed(parts: Iterable[FilePlan]) -> int:
    """A lower bound of the bytes of the files: a model's copy takes none if it is its master, rounded."""
    return sum(_min_nbytes(part) if part.size is None else part.size for part in parts)


def _min_nbytes(part: FilePlan) -> int:
    copies = (p.states[MODEL].nbytes for p in part.parameters if {MODEL, MASTER} <= p.states.keys())
    return part.nbytes - sum(copies)


def listed_seals(source: Checkpoint, format: WritableFormat) -> ListedSeals:
    """The checksums of all checkpoints that are read, as far as they are known without reading."""
    return ListedSeals(one.seals for one in (source, *format.inputs()))


def raise_if_damaged(checks: SealChecks, identities: Identities) -> None:
    """Compare what was read with every checksum of the source. Raises `CorruptError`."""
    broken = list(checks.damaged(Reader(check=False, identities=identities)))
    if broken:
        raise seals_error(broken)


def seals_error(broken: list[Seal]) -> CorruptError:
    """The error for byte ranges that do not match their checksums. It names the file and the first range."""
    seal = broken[0]
    more = f" (and {len(broken) - 1} more damaged ranges)" if len(broken) > 1 else ""
    return CorruptError(
        f"{printable(seal.label)}: its {seal.nbytes:,} bytes do not fit their {seal.kind} checksum{more}",
        where=seal.path,
        hint="The file was damaged after it was written: restore it from a copy. `ckpt verify` lists all damage.",
    )


def job_id(source: Checkpoint, identities: Identities, format: WritableFormat) -> str:
    """A digest of the source's history, of the files that are read, and of the format with all its options.

    An interrupted run is continued only by a job with the same id. Of a log, only the records that are read count: a
    run may append others meanwhile.
    """
    files = {path.absolute(): _lasting(identity) for path, identity in identities.items()}
    return fingerprint((WRITTEN_BY, source.path, source.history, files, format.name, format.identity()))


def _lasting(identity: Identity) -> Identity:
    """What stays of an identity: the number of a device may change when the machine restarts, and a log grows."""
    if identity.records is None:
        return replace(identity, device=0)
    return replace(identity, device=0, nbytes=0, mtime_ns=0)
