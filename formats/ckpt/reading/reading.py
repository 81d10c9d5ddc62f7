"""Fill memory of the caller with blocks of a checkpoint, and know what was read of it."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from math import prod
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import numpy as np

from ckpt.pipeline import Resources
from ckpt.pipeline.executors import run_tasks
from ckpt.pipeline.planned_reads import prefetched
from ckpt.reading.blocks import checked_blocks, read_block
from ckpt.reading.evidence import COVERED, ReadEvidence, file_rows
from ckpt.reading.order import ReadingOrder, Work
from ckpt.reading.verification import JoinedEvidence, Verification
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.coming_reads import object_ranges
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import at_tensor
from ckpt_formats.core.evidence import joined, seal_number
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.identity import Identities, check_unchanged
from ckpt_formats.core.interchange import MappedFiles
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import Array, Tensor, mapped_array
from ckpt_formats.core.text import printable
from ckpt_formats.core.value_changes import check_allowed, totals

_HUGE_PAGE = 2 << 20
_LARGE = 4 << 20


class Reading:
    """Reads blocks of a checkpoint into memory, and verifies what was read: alone, or with other processes.

    It is a context manager. One thread may call its methods; `fill` uses further ones.
    """

    @checked
    def __init__(self, checkpoint: Checkpoint, *, resources: Resources | None = None, check: bool = True) -> None:
        """`resources`: `workers` threads read at once; half of `memory` is for what is requested ahead from stores.

        None: those of `Resources.of_machine()`. `check` False: no checksums are computed, and none are compared.
        """
        self._checkpoint = checkpoint
        self._resources = resources or Resources.of_machine()
        identities = checkpoint.identities
        files = max(1, self._resources.files)
        cache = self._resources.cache
        self._readers = [_CountingReader(check, files, identities, cache) for _ in range(self._resources.workers)]

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. What was read can still be verified."""
        for reader in self._readers:
            reader.close()

    @property
    def nbytes(self) -> int:
        """How many bytes were read from files, or requested from stores, until now. Headers are not counted."""
        return sum(reader.nbytes for reader in self._readers)

    def fill(self, blocks: Iterable[tuple[Tensor, Array]]) -> None:
        """Read each tensor into its array.

        Each tensor is a state of a parameter of this checkpoint, or a part of one: `tensor.block[...]`,
        `tensor.flat[...]`. Each array is writable and has this shape, with any strides. If both have one dtype,
        values go from the file into this memory. Floats are rounded to other floats, to nearest and ties to even, with
        at most 1 MiB of each worker in between. All blocks are best given at once, in any order: they are read in the
        order of files, and states that are replayed together are replayed once.

        Raises before it writes anything: `InvalidArgumentError` for an array that does not fit, `IncompleteError` if
        no file has a part of a tensor. Raises while it writes: `CorruptError` if a file contradicts its checksum or
        was replaced, `UnsupportedError` if a value is too large for the array's type, and as any reading of files.
        Then arrays may have values of the checkpoint and others. Checksums of ranges are compared by `verify`.
        """
        self._run(ReadingOrder.of(checked_blocks(blocks), len(self._readers)))
        check_allowed(totals(change for reader in self._readers for change in reader.changes.seen()))

    @checked
    def weights(self, *, mmap: bool = False) -> dict[str, Array]:
        """All weights and buffers of the model by name: writable arrays of any shape and dtype, read at once.

        Tied parameters have all their names, and share one array. With `mmap` True, an array that lies in one piece of
        a local file is mapped, not read: what you write into it stays in this process; the file must stay as it is. Of
        mapped values, no checksum is computed.

        Raises as `fill`.
        """
        files = MappedFiles(self._checkpoint.identities) if mmap else None
        arrays, unread = dict[str, Array](), list[tuple[Tensor, Array]]()
        for name, parameter in self._checkpoint.items():
            weight = parameter.weight
            with at_tensor(printable(name)):
                mapped = None if files is None else mapped_array(weight, files)
            arrays[name] = _new_array(weight.shape, weight.dtype) if mapped is None else mapped
            if mapped is None:
                unread.append((weight, arrays[name]))
        self.fill(unread)
        aliases = self._checkpoint.aliases.items()
        return arrays | {alias: arrays[name] for alias, name in aliases if name in arrays}

    def evidence(self, others: Iterable[bytes] = ()) -> bytes:
        """Return what this process has read, for `verify` in another process that has opened the same checkpoint.

        It has checksums of ranges and no values: about 60 bytes for a range of which this process read a part, 8 for
        one that it read whole, and 16 for a file; then they are compressed. `others`: evidence of other processes,
        which then is in it, too; neighbours are combined. So thousands of processes join theirs step by step.

        Raises as `verify`, but not for damage: whoever verifies the result finds it.
        """
        arriving = iter(others)
        first = next(arriving, None)
        return (self._evidence() if first is None else self._joined(chain([first], arriving)).evidence()).to_bytes()

    @checked
    def verify(self, others: Iterable[bytes] = (), *, rest: bool = False) -> Verification:
        """Compare what this process and others have read with the checksums that the files promise.

        `others`: what `evidence` returned in each other process. A checksum of a whole range is put together from
        parts that several processes read. Of a range of which no process needed a part, that part is not read, unless
        it is small, and the range is in `unverified`; with `rest` True, it is read. Values that are stored encoded were
        compared when they were decoded.

        Raises `CorruptError`, which names the tensors and the file, also if a file was replaced since the checkpoint
        was opened; `IncompleteError` if it was removed; and `InvalidArgumentError` for bytes that are no evidence, or
        that are about another checkpoint.
        """
        check_unchanged(self._read_files())
        evidence = self._joined(others)
        changed = totals(change for reader in self._readers for change in reader.changes.seen())
        with Reader(check=False, identities=self._checkpoint.identities) as reader:
            return evidence.verified(reader, rest, changed)

    def _joined(self, others: Iterable[bytes]) -> JoinedEvidence:
        evidence = JoinedEvidence(self._checkpoint, self._covered())
        for one in chain([self._evidence()], map(ReadEvidence.from_bytes, others)):  # as they arrive
            evidence.add(one, self._checkpoint.identities)
        return evidence

    def _run(self, order: ReadingOrder) -> None:
        free = SimpleQueue[_CountingReader]()
        for reader in self._readers:
            free.put(reader)

        def read(one: Work) -> None:
            reader = free.get()
            try:
                for block in one:
                    read_block(block, reader)
            finally:
                free.put(reader)

        with ExitStack() as stack:
            ranges = [object_ranges(order.tensors)]
            (planned,) = stack.enter_context(prefetched(ranges, self._checkpoint.identities, self._resources))
            for reader in self._readers:
                stack.enter_context(reader.ahead(planned))
            if len(self._readers) == 1:
                for one in order.work():
                    read(one)
                return
            pool = stack.enter_context(ThreadPoolExecutor(len(self._readers), "ckpt"))
            for _ in run_tasks(pool, read, order.work(), 2 * len(self._readers)):
                pass

    def _evidence(self) -> ReadEvidence:
        checksums = joined(reader.evidence() for reader in self._readers)
        open_numbers = set(checksums.table["seal"].tolist())
        rows = [
            (number, start, stop)
            for seal, ranges in self._covered().items()
            if (number := seal_number(seal)) in open_numbers
            for start, stop in ranges
        ]
        return ReadEvidence(checksums, np.array(rows, COVERED), file_rows(self._read_files().items()))

    def _covered(self) -> dict[Seal, list[tuple[int, int]]]:
        covered: dict[Seal, list[tuple[int, int]]] = {}
        for reader in self._readers:
            for seal, ranges in reader.covered.items():
                covered.setdefault(seal, []).extend((start, stop) for start, stop in ranges)
        return covered

    def _read_files(self) -> Identities:
        """The identities of the files that were read, of those that are known."""
        known = self._checkpoint.identities
        paths = dict.fromkeys(path for reader in self._readers for path in reader.files)
        return {path: known[path] for path in paths if path in known}


def _new_array(shape: Shape, dtype: DType) -> Array:
    """Return an array without values. A large one begins where a huge page does: the first use of its pages, which
    costs more than to read into them, then takes a fifth less time."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < _LARGE:
        return np.empty(shape, dtype)
    memory = np.empty(nbytes + _HUGE_PAGE, np.uint8)  # NumPy has the system use huge pages for it
    start = -memory.ctypes.data % _HUGE_PAGE
    return memory[start : start + nbytes].view(dtype).reshape(shape)


class _CountingReader(Reader):
    """A reader that notes how much it reads, of which files, and which parts of sealed ranges."""

    def __init__(self, check: bool, max_files: int, identities: Identities, cache_nbytes: int) -> None:
        super().__init__(check=check, max_files=max_files, identities=identities, cache_nbytes=cache_nbytes)
        self._is_checked = check
        self.nbytes = 0
        self.files: dict[Path, None] = {}
        self.covered: dict[Seal, list[list[int]]] = {}
        """Of each seal, the ranges that were read in their order; one that follows the last extends it."""

    def read_into(self, path: Path, offset: int, out: memoryview, seal: Seal | None = None) -> None:
        self.files[path] = None
        super().read_into(path, offset, out, seal)
        self.nbytes += len(out)

    def note_sealed(self, seal: Seal, start: int, data: memoryview) -> None:
        super().note_sealed(seal, start, data)
        if not self._is_checked:
            return
        ranges = self.covered.setdefault(seal, [])
        if ranges and ranges[-1][1] == start:
            ranges[-1][1] += len(data)
        else:
            ranges.append([start, start + len(data)])
