"""Who writes the files of a job: threads of this process, or the workers of a cluster."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.pipeline.groups import Group, deal, in_step
from ckpt.pipeline.resources import Execution
from ckpt.pipeline.target import StagedTarget
from ckpt.pipeline.write_files import CountBytes, write_files
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.format import Plan, Receipt, WritableFormat
from ckpt_formats.core.identity import Identities
from ckpt_formats.core.seal_checks import ListedSeals

if TYPE_CHECKING:
    from ckpt.pipeline.cluster import Cluster
    from ckpt.pipeline.cluster.distribute import ClusterStatus


@contextmanager
def connected(resources: Execution) -> Iterator["Cluster | None"]:
    """The cluster that the resources name, which is left at the end; None if threads write. Raises `CkptError`."""
    if resources.executor is None:
        yield None
        return
    from ckpt.pipeline.cluster import connect

    with closing(connect(resources.executor)) as cluster:
        yield cluster


def check_scales_out(plan: Plan, format: WritableFormat) -> None:
    """Refuse what one process writes from beginning to end. Raises `UnsupportedError`."""
    if plan.single_file is not None:
        raise UnsupportedError(
            f"the target is one file ({format.name}), which one process writes: more machines do not make it faster",
            hint="Leave out --executor and --shard, or choose a format of several files (--to).",
        )


def check_absolute(files: Iterable[Path]) -> None:
    """Refuse files of the source with relative paths: workers run in other folders. Raises
    `InvalidArgumentError`."""
    for path in files:
        if not path.is_absolute():
            raise InvalidArgumentError(
                "workers of a cluster cannot read a relative path",
                where=path,
                hint="Open the source by its absolute path, or by a URL.",
            )


@dataclass(frozen=True)
class FileWork:
    """The files of a plan, and what all who write them need."""

    source: Checkpoint
    format: WritableFormat
    plan: Plan
    resources: Execution
    identities: Identities
    """Of all files that are read."""
    listed: ListedSeals
    """The checksums that all processes know."""


def write_missing(
    cluster: "Cluster | None",
    stage: StagedTarget,
    work: FileWork,
    written: Collection[str],
    stop: threading.Event,
    count_bytes: CountBytes,
    show_status: "Callable[[ClusterStatus], None] | None" = None,
) -> Iterator[Receipt]:
    """Write this process's share of the files that are not `written` yet. Yields receipts as files are complete."""
    if cluster is not None:
        yield from _write_on(cluster, stage, work, set(written), stop, count_bytes, show_status)
        return
    files, shard, resources = work.plan.files, work.resources.shard, work.resources
    groups = _without(written, in_step(files, resources.group) if shard is None else deal(files, shard))
    if groups:
        with stage.attempt() as sink:
            yield from write_files(
                sink, work.format, groups, resources, work.identities, work.listed, stop, count_bytes
            )


def _write_on(
    cluster: "Cluster",
    stage: StagedTarget,
    work: FileWork,
    written: Collection[str],
    stop: threading.Event,
    count_bytes: CountBytes,
    show_status: "Callable[[ClusterStatus], None] | None",
) -> Iterator[Receipt]:
    from ckpt.pipeline.cluster.distribute import groups_for, write_on_cluster
    from ckpt.pipeline.cluster.worker import WorkerJob
    from ckpt.pipeline.shared_plan import SharedPlan

    files, resources = work.plan.files, work.resources
    groups = _without(written, groups_for(files, cluster.slots(), resources.group))
    nbytes = {part.file: part.nbytes for group in groups for part in group}
    with stage.shared() as target:
        shared = SharedPlan.of(work.plan, work.source, work.format)
        job = WorkerJob(shared, work.identities, resources.memory, target)
        for receipt in write_on_cluster(cluster, job, groups, stop, show_status or (lambda status: None)):
            count_bytes(nbytes[receipt.file])
            yield receipt


def _without(written: Collection[str], groups: Iterable[Group]) -> list[Group]:
    """The groups without the files that are written, and without groups that are then empty."""
    remaining = (tuple(part for part in group if part.file not in written) for group in groups)
    return [group for group in remaining if group]
