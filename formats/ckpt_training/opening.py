"""Open the same checkpoint on all ranks: rank 0 decides which one, and the ranks compare what they have opened."""

import json
import os
from dataclasses import dataclass, field

import xxhash

import ckpt
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CorruptError, NotFoundError
from ckpt_formats.core.seals import digest_of_seals
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.registry.newest import newest_whole
from ckpt_formats.stores.location import source_path
from ckpt_training import ranks


@dataclass(frozen=True, eq=False)
class OpenedSource:
    """A checkpoint that all ranks have opened."""

    checkpoint: Checkpoint
    address: str
    """What `ckpt.open` opens again, with the step of a chain."""
    passed_over: dict[str, str] = field(default_factory=dict)
    """Newer ones of the same folder, each with the reason why it is not this one."""


def open_together(source: str | os.PathLike[str] | Checkpoint) -> OpenedSource:
    """Open a checkpoint on all ranks. Raises `CkptError` on all of them if one fails, or has opened another one."""
    with ranks.together():
        own = _open_first(source) if ranks.rank_and_world()[0] == 0 else None
    address, passed_over = json.loads(
        ranks.broadcast_bytes(json.dumps([own.address, own.passed_over]).encode() if own is not None else b"")
    )
    with ranks.together():
        if own is None:
            own = OpenedSource(source if isinstance(source, Checkpoint) else ckpt.open(address), address, passed_over)
    digest = digest_of(own.checkpoint)
    first = ranks.broadcast_bytes(digest)
    with ranks.together():
        if digest != first:
            raise CorruptError(
                "rank 0 has opened another checkpoint at this path",
                where=address,
                hint="Load from storage that all ranks share, and from a checkpoint that nobody writes.",
            )
    return own


def _open_first(source: str | os.PathLike[str] | Checkpoint) -> OpenedSource:
    """What rank 0 opens."""
    if isinstance(source, Checkpoint):
        return OpenedSource(source, str(source.path))
    text = os.fspath(source)
    try:
        checkpoint = ckpt.open(text)
    except NotFoundError as error:
        try:
            newest = newest_whole(text)
        except NotFoundError:
            raise error from None
        assert newest.checkpoint is not None
        passed_over = {path.name: str(why) for path, why in newest.passed_over.items()}
        return OpenedSource(newest.checkpoint, str(newest.path), passed_over)
    # A store was listed to open it: a chain there has the path that its text names, unless that also names a step.
    is_listed = is_remote(checkpoint.path) and checkpoint.path.name == text.rstrip("/").rpartition("/")[2]
    path = checkpoint.path if is_listed else source_path(text)
    is_last_of_chain = checkpoint.step is not None and (path / "chain.json").is_file()
    return OpenedSource(checkpoint, f"{text.rstrip('/')}@{checkpoint.step}" if is_last_of_chain else text)


def digest_of(checkpoint: Checkpoint) -> bytes:
    """A hash of what a checkpoint has: the step, all names, shapes and dtypes, and the checksums that are known."""
    digest = xxhash.xxh3_128(f"{checkpoint.format} {checkpoint.step}".encode())
    for parameter, state, tensor in checkpoint.tensors():
        digest.update(f"{parameter.name}\0{state}\0{tensor.dtype.name}{tensor.shape}".encode("utf-8", "surrogatepass"))
    digest.update(digest_of_seals(checkpoint.seals))
    return digest.digest()
