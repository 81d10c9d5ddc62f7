"""Write files with threads: those in step together, and each persisted while the next one is written."""

import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from ckpt.pipeline import target as life
from ckpt.pipeline.executors import run_tasks
from ckpt.pipeline.groups import Group, ranks
from ckpt.pipeline.interrupts import raise_if_interrupted
from ckpt.pipeline.planned_reads import prefetched, ranges_of, reads_from_stores
from ckpt.pipeline.resources import Resources
from ckpt.pipeline.target import Sink
from ckpt_formats.core.bands import Band
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import FilePlan, Receipt, WritableFormat
from ckpt_formats.core.identity import Identities
from ckpt_formats.core.prefetch import PlannedReads
from ckpt_formats.core.spare_workers import SpareWorkers
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.registry.plugins import blamed_on_package, returned

CountBytes = Callable[[int], None]
"""Called from any thread, with the number of bytes that were copied since the last call."""


def write_files(
    sink: Sink,
    format: WritableFormat,
    groups: Iterable[Group],
    resources: Resources,
    identities: Identities,
    listed: Container[int],
    stop: threading.Event,
    count_bytes: CountBytes,
) -> Iterable[Receipt]:
    """Write the files, with as many threads at work as there are workers; others wait for the disk or for a band.

    The receipts of a group come together, when the sink has persisted all its files. The seals of the numbers in
    `listed` are not in their evidence.
    """
    working = threading.Semaphore(resources.workers)
    in_order, whole = list(groups), resources
    if reads_from_stores(identities):
        resources = resources.with_prefetch()

    def count(nbytes: int) -> None:
        raise_if_interrupted(stop)
        count_bytes(nbytes)

    def write(part: FilePlan, share: Resources, planned: PlannedReads | None, band: Band | None = None) -> Receipt:
        with working:
            try:
                receipt = write_values(part, share, planned, band)
            finally:
                if band is not None:
                    band.leave()
            life.reached("written")
        return receipt

    def write_values(part: FilePlan, share: Resources, planned: PlannedReads | None, band: Band | None) -> Receipt:
        others = spare if band is None else None  # files in step wait for one another
        with (
            Reader(
                max_files=share.files, identities=identities, band=band, planned=planned, cache_nbytes=share.cache
            ) as reader,
            Transfer(reader, share.slab, count, others, sink.flushes(part.file)) as transfer,
        ):
            try:
                with blamed_on_package(format, OSError):
                    receipt = returned(format.write(sink.data, part, transfer), Receipt)
            except CkptError as error:
                if error.where is None:
                    error.where = f"tensor {', '.join(printable(name) for name in part.names()[:1])}"
                raise
        evidence = receipt.evidence.without_seals(listed)
        return replace(
            receipt,
            evidence=evidence,
            changes=reader.changes.seen(),
            zeros=reader.zeros.runs(),
            chunks=reader.chunks,
        )

    def write_group(group: Group, planned: PlannedReads | None) -> tuple[list[Receipt], BaseException | None]:
        """The receipts of the files that were written, and the first error of the others."""
        if len(group) == 1:
            return [write(group[0], resources, planned)], None
        share = resources.shared(len(group), ranks(group))
        with (
            Reader(max_files=share.files, identities=identities, planned=planned, cache_nbytes=share.cache) as reader,
            ThreadPoolExecutor(len(group), "ckpt") as members,
        ):
            band = Band(reader, len(group), resources.band, lambda: _released(working))
            written = [members.submit(write, part, share, planned, band) for part in group]
        errors = [one.exception() for one in written]
        receipts = [one.result() for one, error in zip(written, errors, strict=True) if error is None]
        if receipts:  # what the band has read is of all its files
            receipts[0] = replace(
                receipts[0],
                zeros=(*receipts[0].zeros, *reader.zeros.runs()),
                chunks=receipts[0].chunks + reader.chunks,
            )
        return receipts, next(filter(None, errors), None)

    def write_item(item: tuple[Group, PlannedReads | None]) -> tuple[list[Receipt], BaseException | None]:
        group, planned = item
        with planned or nullcontext():
            return write_group(group, planned)

    def written(pool: ThreadPoolExecutor, items: Iterable[tuple[Group, PlannedReads | None]]) -> Iterator[Receipt]:
        for receipts, error in run_tasks(pool, write_item, items, 2 * resources.workers):
            yield from receipts
            if error is not None:
                raise error

    with (
        prefetched([ranges_of(group) for group in in_order], identities, whole) as planned,
        ThreadPoolExecutor(resources.workers, "ckpt-spare") as helping,  # ends after those that it helps
        ThreadPoolExecutor(resources.workers, "ckpt") as pool,
    ):
        spare = None if resources.workers == 1 else SpareWorkers(working, helping)
        try:
            yield from _persist_all(sink, written(pool, zip(in_order, planned, strict=True)))
        except BaseException:
            stop.set()
            raise


@contextmanager
def _released(working: threading.Semaphore) -> Iterator[None]:
    """Within the context, another thread may work."""
    working.release()
    try:
        yield
    finally:
        working.acquire()


def _persist_all(sink: Sink, receipts: Iterable[Receipt]) -> Iterator[Receipt]:
    """The receipts of files that the sink has persisted. It does so while the workers write the next ones.

    After an error, first the receipts of all files that are complete.
    """

    with ThreadPoolExecutor(sink.parallel, "ckpt-persist") as pool:
        waiting, failure = deque[Future[Receipt]](), None
        try:
            for receipt in receipts:
                waiting.append(pool.submit(sink.persist, receipt))
                while waiting and (waiting[0].done() or len(waiting) > 2 * sink.parallel):
                    yield waiting.popleft().result()
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = error
        while waiting:
            yield waiting.popleft().result()
        if failure is not None:
            raise failure
