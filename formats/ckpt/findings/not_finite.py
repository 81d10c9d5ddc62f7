"""Values that are NaN or infinite: every value of a checkpoint is read and counted, whatever its format."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ckpt.job import AnyProgress, count_to, load_kernels
from ckpt.pipeline import CountBytes, Resources
from ckpt.pipeline.executors import batches, run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt_codecs.native.lossless import count_masked
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.dtypes import NAMES, DType
from ckpt_formats.core.files import Reader
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Array, Tensor
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.zero_runs import ZeroRun


@dataclass(frozen=True)
class Pattern:
    """The bits by which the values of a type that are NaN or infinite are known: those of `value` under `mask`."""

    width: int
    """Bytes of a word. A complex number is two words."""
    mask: int
    value: int
    infinity: int | None
    """The bits of infinity without its sign; None if the type has none."""

    @property
    def words(self) -> DType:
        return np.dtype(f"<u{self.width}")


def _ieee(width: int, infinity: int) -> Pattern:
    return Pattern(width, infinity, infinity, infinity)


_PATTERNS = {
    "float16": _ieee(2, 0x7C00),
    "bfloat16": _ieee(2, 0x7F80),
    "float32": _ieee(4, 0x7F80 << 16),
    "float64": _ieee(8, 0x7FF << 52),
    "complex64": _ieee(4, 0x7F80 << 16),
    "complex128": _ieee(8, 0x7FF << 52),
    "float8_e5m2": _ieee(1, 0x7C),
    "float8_e4m3fn": Pattern(1, 0x7F, 0x7F, None),
    "float8_e4m3fnuz": Pattern(1, 0xFF, 0x80, None),
    "float8_e5m2fnuz": Pattern(1, 0xFF, 0x80, None),
    "float8_e8m0fnu": Pattern(1, 0xFF, 0xFF, None),
}


def can_have(dtype: DType) -> bool:
    """Whether values of a type can be NaN or infinite."""
    return NAMES.get(dtype) in _PATTERNS


def pattern_of(dtype: DType) -> Pattern:
    """The pattern of a type of which `can_have` is true."""
    return _PATTERNS[NAMES[dtype]]


def count_not_finite(values: Array) -> tuple[int, int]:
    """How many values are NaN, and how many infinite. Of a complex number, both parts count.

    values: any shape, C-contiguous, of a dtype of which `can_have` is true.
    """
    pattern = pattern_of(values.dtype)
    words = values.reshape(-1).view(pattern.words)
    total = count_masked(words, pattern.mask, pattern.value)
    if not total or pattern.infinity is None:
        return total, 0
    without_sign = (1 << 8 * pattern.width - 1) - 1
    infinities = count_masked(words, without_sign, pattern.infinity)
    return total - infinities, infinities


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
    only: Container[str] | None = None,
) -> list[NotFinite]:
    """The states that have NaN or infinity, in the order of the checkpoint.

    Reads every value of every state: of `only` these parameters, if they are given. `note_zeros` is called, from any
    thread, with the zeros in what was read.
    """
    own = resources or Resources.of_machine()
    load_kernels()
    every = source.tensors() if only is None else _of_parameters(source, only)
    tensors = [(p.name, state, tensor) for p, state, tensor in every if can_have(tensor.dtype)]
    with interruptible(count_to(sum(tensor.nbytes for *_, tensor in tensors), progress)) as count:
        work = list(batches((tensor.nbytes, (name, state, tensor)) for name, state, tensor in tensors))
        with ThreadPoolExecutor(own.workers, "ckpt") as pool:

            def counted(batch: Sequence[tuple[str, str, Tensor]]) -> list[NotFinite]:
                return list(_counted(batch, own, count, note_zeros))

            several = run_tasks(pool, counted, work, 2 * own.workers)
            return [one for some in several for one in some]


def _of_parameters(source: Checkpoint, only: Container[str]) -> Iterator[tuple[Parameter, str, Tensor]]:
    for name in source.parameters:
        if name in only:
            parameter = source.parameters[name]
            yield from ((parameter, state, tensor) for state, tensor in parameter.states.items())


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
            nans = infinities = 0
            for _, values in transfer.slabs(tensor):
                counts = count_not_finite(np.ascontiguousarray(values))
                nans, infinities = nans + counts[0], infinities + counts[1]
            if nans or infinities:
                yield NotFinite(name, state, nans, infinities)
        note_zeros(reader.zeros.runs())


def not_finite_notice(states: Sequence[NotFinite]) -> Iterator[Notice]:
    """The notice that names these states; none if there are none."""
    if states:
        total = sum(one.nans + one.infinities for one in states)
        yield Notice(f"{total:,} values are NaN or infinite", tuple(map(str, states)), Weight.UNSURE)
