"""Copy a checkpoint or a chain as it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ckpt import pipeline
from ckpt.copying.compare import compare_objects
from ckpt.copying.sealing import remove_seal_file, write_seal_file
from ckpt.copying.selection import ChosenFile, ChosenFiles, select
from ckpt.copying.verbatim import Verbatim
from ckpt.job import AnyProgress, count_to
from ckpt.pipeline import Execution, Resources, Result
from ckpt.pipeline.checks import check_nothing_beside
from ckpt.pipeline.targets import check_target
from ckpt_formats.core.arguments import Checked, StrPath, checked
from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.format import Plan, Receipt
from ckpt_formats.core.store_path import StorePath, is_remote
from ckpt_formats.core.zero_values import zero_notices
from ckpt_formats.registry.seal_file import SealedFile, seal_of_file, to_bytes
from ckpt_formats.registry.seal_places import place_of_file
from ckpt_formats.stores.location import place_at, source_path, target_path


@dataclass(frozen=True)
class Copy(Checked):
    """A copy of a checkpoint or a chain: `plan` returns what will be written, `run` writes it.

    `source` and `target` are in the file system or in stores. An equal copy continues where this one stopped.
    """

    source: StrPath
    target: StrPath
    everything: bool = False
    """Copy also files that are not part of the checkpoint."""

    def plan(self) -> Plan:
        """The files that will be written, with notes. Raises `CkptError` if the copy cannot succeed."""
        return self._plan

    @checked
    def run(
        self,
        *,
        resources: Resources | None = None,
        locks: bool = True,
        read_back: bool = False,
        progress: AnyProgress | None = None,
    ) -> Result:
        """Write the target, which appears when it is complete. `checksums` of the result are those of the source.

        `locks` and `read_back`: as in `Job.run`. Raises `CkptError`: `CorruptError` if the source is damaged, or if the
        target is found to have other bytes.
        """
        execution = Execution.of(resources, locks=locks, read_back=read_back)
        plan, selection, format = self._plan, self._selection, replace(self._format, unseen=[], zeros=[])
        count_bytes = count_to(selection.nbytes, progress)
        chunks = selection.check_logs()
        with self._sealed() as seal_files:
            result = pipeline.write(plan, selection.source, self._target, format, execution, count_bytes)
        if is_remote(self._target):
            compare_objects(self._target, _in_store(self._target, format.unseen))
        checksums = sum(map(len, selection.seals.values()))
        zeros = () if selection.opened is None else tuple(zero_notices(selection.opened, format.zeros))
        files = len(self.files) + seal_files
        return replace(result, files=files, nbytes=selection.nbytes, checksums=checksums, chunks=chunks, zeros=zeros)

    @property
    def files(self) -> tuple[ChosenFile, ...]:
        """The files that are copied, the last ones last."""
        return (*self._selection.files, *self._selection.last)

    @property
    def format_name(self) -> str:
        """The name of the source's format."""
        return self._selection.source.origin.engine

    @contextmanager
    def _sealed(self) -> Iterator[int]:
        """Write the seal file of a single file beside its copy first, so that no copy lacks it; how many there are.

        It is removed again if there is no copy. That of a folder is one of its files.
        """
        if self._seal is None:
            yield 0
            return
        place, files = place_of_file(self._target), {self._target.name: self._seal}
        is_new = not (place.is_file() and read_whole(place, MAX_LIST) == to_bytes(files))
        if is_new:
            write_seal_file(place, files)
        try:
            yield 1
        except BaseException:
            if is_new and not self._target.exists():  # an error may come after the copy has appeared
                remove_seal_file(place)
            raise

    @cached_property
    def _seal(self) -> SealedFile | None:
        """The checksums of a single file that is sealed."""
        return seal_of_file(self._selection.files[0].path) if self._selection.is_file else None

    @cached_property
    def _target(self) -> Path:
        return target_path(self.target)

    @cached_property
    def _selection(self) -> ChosenFiles:
        return select(source_path(self.source), self.everything)

    @cached_property
    def _format(self) -> Verbatim:
        return Verbatim(selection=self._selection, target=self._target)

    @cached_property
    def _plan(self) -> Plan:
        check_target(self._target, self._selection.source.path)
        check_nothing_beside(self._target, is_sealed=self._seal is not None)
        self._selection.check_parents(self._target)
        return self._format.plan(self._selection.source)


@checked
def copy(
    source: StrPath,
    target: StrPath,
    *,
    everything: bool = False,
    resources: Resources | None = None,
    locks: bool = True,
    read_back: bool = False,
    progress: AnyProgress | None = None,
) -> Result:
    """Copy a checkpoint or a chain as it is: equal files with equal names, between folders and stores.

    `everything`: also files of the folder that are not part of it. Raises as `Copy`, which can also return the plan.
    """
    return Copy(source, target, everything).run(
        resources=resources, locks=locks, read_back=read_back, progress=progress
    )


def _in_store(target: StorePath, receipts: list[Receipt]) -> list[Receipt]:
    """The receipts with the e_tags that their objects have now; empty for one that is not there."""
    there = place_at(target).list()
    if not there and (alone := place_at(target.parent).head(target.name)) is not None:
        return [replace(one, e_tag=alone.e_tag) for one in receipts]
    stored = ((one, there.get(one.file)) for one in receipts)
    return [replace(one, e_tag="" if entry is None else entry.e_tag) for one, entry in stored]
