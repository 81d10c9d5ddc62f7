"""Write the `.metadata` for the files of torch's distributed checkpoints that each rank saved on its own."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.job import AnyProgress, count_to
from ckpt.pipeline import Resources
from ckpt.pipeline.executors import run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt_formats.core.arguments import StrPath, checked
from ckpt_formats.core.errors import OutputError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.identity import check_unchanged
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.dcp.index import JoinedRanks, join_ranks
from ckpt_formats.engines.dcp.read import DIFFERING
from ckpt_formats.registry.location import locate
from ckpt_formats.stores.location import place_at, source_path, target_path


@dataclass(frozen=True)
class IndexedRanks:
    """A `.metadata`, with which torch loads the files of all ranks."""

    path: Path
    ranks: int
    """How many saved metadata of their own; 1 if all ranks saved theirs together."""
    tensors: int
    nbytes: int
    """The bytes of the files with data."""
    compared_nbytes: int
    """The bytes of copies that several ranks saved, which were compared."""
    differing: tuple[str, ...]
    """Objects that ranks saved otherwise than the first one, whose value has the name."""
    written: bool
    """False if it was there before, or was only planned."""


@dataclass(frozen=True)
class IndexPlan:
    """What `index` will write: one `.metadata`, or one for each of Accelerate's two folders."""

    path: Path
    joined: tuple[JoinedRanks, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes that are read to compare copies."""
        return sum(_nbytes_of_copies(one) for one in self.joined)

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What a user should know of the files, and of values that torch will not load."""
        return tuple(notice for one in self.joined for notice in _notices(one))


def plan_index(folder: StrPath, *, rules: Sequence[Rule] = ()) -> IndexPlan:
    """What `index` would do: all metadata and the headers of all items are read. Raises as `index`."""
    target_path(folder)  # raises for a store that is only read
    place = source_path(folder)
    format = locate(place).format.name
    if format != "dcp":
        raise UnsupportedError(
            f"is a checkpoint of the format {format}: only what torch.distributed.checkpoint saved can be indexed",
            where=place,
            hint=f"Write one: ckpt convert {printable(str(place))} TARGET --to dcp",
        )
    return IndexPlan(place, tuple(join_ranks(place, rules)))


@checked
def index(
    folder: StrPath,
    *,
    rules: Sequence[Rule] = (),
    dry_run: bool = False,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> tuple[IndexedRanks, ...]:
    """Write the `.metadata` for files that each rank saved without collectives, so that torch loads and reshards them.

    These are what `dcp.save` and `dcp.async_save` write with `use_collectives=False` (`__0.metadata` beside
    `__0_0.distcp`), and with `no_dist=True` if each rank has a folder of its own (`rank_0`, `rank_1`). No tensor is
    copied: torch's `FileSystemReader` reads the files as they are. Copies that several ranks saved are compared.

    Args:
        folder: The folder of one step, or a URL.
        rules: `Rule(pattern, "first")` names the first of copies that differ.
        dry_run: Check everything, and write nothing.
        resources: Threads and memory.
        progress: Is called with the bytes that were compared, and their number.

    Returns:
        One for each `.metadata`: Accelerate's checkpoints have two.

    Raises:
        NotFoundError: There is no checkpoint.
        IncompleteError: Ranks, files or blocks are missing, or blocks overlap.
        CorruptError: Copies or headers differ.
        UnsupportedError: The files are not those of DCP.
        OutputError: The file cannot be written, or another process has written one.
    """
    return run_index(plan_index(folder, rules=rules), dry_run=dry_run, resources=resources, progress=progress)


def run_index(
    plan: IndexPlan,
    *,
    dry_run: bool = False,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> tuple[IndexedRanks, ...]:
    """Compare copies, and write what was planned. Raises as `index`."""
    resources = resources or Resources.of_machine()
    count_bytes = count_to(plan.nbytes, progress)
    with interruptible(count_bytes) as count, ThreadPoolExecutor(resources.workers, "ckpt") as pool:
        for joined in plan.joined:

            def compare(tensor: Tensor, one: JoinedRanks = joined) -> None:
                with Reader(identities=one.identities) as reader, Transfer(reader, count_bytes=count) as transfer:
                    for _ in transfer.slabs(tensor):
                        pass

            copied = [] if joined.data is None else [tensor for _, tensor in joined.copied]
            for _ in run_tasks(pool, compare, copied, 2 * resources.workers):
                pass
    for joined in plan.joined:
        check_unchanged(joined.identities)
    return tuple(_write(joined, dry_run) for joined in plan.joined)


def _write(joined: JoinedRanks, dry_run: bool) -> IndexedRanks:
    writes = joined.data is not None and not dry_run
    if joined.data is not None and writes:
        try:
            place = place_at(joined.folder)
            place.replace(joined.file.name, joined.data, None)
            place.remove_drafts(joined.file.name)
        except FileExistsError as error:
            raise OutputError("another process has written it", where=joined.file) from error
        except OSError as error:
            raise unwritable(error, joined.file) from error
    content = joined.content
    return IndexedRanks(
        joined.file,
        len(content.by_rank),
        len(content.tensors),
        sum(file.nbytes for file in content.shards if file.role == "data"),
        _nbytes_of_copies(joined),
        tuple(joined.differing),
        writes,
    )


def _nbytes_of_copies(joined: JoinedRanks) -> int:
    if joined.data is None:
        return 0
    return sum(tensor.nbytes * (1 + len(tensor.replicas)) for _, tensor in joined.copied)


def _notices(joined: JoinedRanks) -> Iterator[Notice]:
    if joined.differing:
        key = joined.content.key_of_differing
        text = f"torch loads the first rank's value on all ranks; those of other ranks are at `{key}.RANK.NAME`"
        yield Notice(text, tuple(joined.differing), Weight.UNSURE)
    yield from (one for one in joined.content.notices if one != DIFFERING)
