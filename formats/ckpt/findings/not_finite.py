"""Values that are NaN or infinite: every value of a checkpoint is read and counted, whatever its format."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.job import AnyProgress, count_to, load_kernels
from ckpt.pipeline import CountBytes, Resources
from ckpt.pipeline.executors import batches, run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.files import Reader
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.value_changes import count_kinds
from ckpt_formats.core.zero_runs import ZeroRun
from ckpt_formats.registry.encoded import uses_codecs


@dataclass(frozen=True)
class NotFinite:
    """How many values of one state of a parameter are NaN or infinite."""

    name: str
    state: str
    nans: int
    infinities: int

    def __str__(self) -> str:
        return f"{self.name} {self.state} ({self.nans:,} NaN, {self.infinities:,} infinite)"


def find_not_finite(
    source: Checkpoint,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
    note_zeros: Callable[[Iterable[ZeroRun]], None] = lambda runs: None,
) -> list[NotFinite]:
    """The states that have NaN or infinity, in the order of the checkpoint. Reads every value of every state.

    `note_zeros` is called, from any thread, with the zeros in what was read.
    """
    own = resources or Resources.of_machine()
    if uses_codecs(source):
        load_kernels()
    tensors = [(p.name, state, tensor) for p, state, tensor in source.tensors() if _can_have(tensor)]
    with interruptible(count_to(sum(tensor.nbytes for *_, tensor in tensors), progress)) as count:
        work = list(batches((tensor.nbytes, (name, state, tensor)) for name, state, tensor in tensors))
        with ThreadPoolExecutor(own.workers, "ckpt") as pool:

            def counted(batch: Sequence[tuple[str, str, Tensor]]) -> list[NotFinite]:
                return list(_counted(batch, own, count, note_zeros))

            several = run_tasks(pool, counted, work, 2 * own.workers)
            return [one for some in several for one in some]


def _can_have(tensor: Tensor) -> bool:
    return tensor.dtype.kind == "c" or is_float(tensor.dtype)


def _counted(
    batch: Sequence[tuple[str, str, Tensor]],
    resources: Resources,
    count_bytes: CountBytes,
    note_zeros: Callable[[Iterable[ZeroRun]], None],
) -> Iterator[NotFinite]:
    with (
        Reader(check=False, max_files=resources.files) as reader,
        Transfer(reader, resources.slab, count_bytes) as transfer,
    ):
        for name, state, tensor in batch:
            kinds = [count_kinds(values) for _, values in transfer.slabs(tensor)]
            nans, infinities = sum(one.nans for one in kinds), sum(one.infinities for one in kinds)
            if nans or infinities:
                yield NotFinite(name, state, nans, infinities)
        note_zeros(reader.zeros.found())


def not_finite_notice(states: Sequence[NotFinite]) -> Iterator[Notice]:
    """The notice that names these states; none if there are none."""
    if states:
        total = sum(one.nans + one.infinities for one in states)
        yield Notice(f"{total:,} values are NaN or infinite", tuple(map(str, states)), Weight.UNSURE)
