"""Publish each checkpoint of a run once it is complete, without code in the trainer."""

import threading
from collections.abc import Iterator
from typing import Annotated

from ckpt.job import AnyProgress
from ckpt.pipeline import Resources
from ckpt.publishing.publication import last_step
from ckpt.publishing.publish import PublishedCheckpoint, publish
from ckpt.publishing.retention import KeepSteps
from ckpt.publishing.source import Names
from ckpt.runs.new import NewCheckpoints, SkippedCheckpoint
from ckpt_formats.core.arguments import Range, StrPath, checked
from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.registry.newest import step_of
from ckpt_formats.stores.location import target_path

Seconds = Annotated[float, Range(0, above=True)]


@checked
def publish_each(
    run: StrPath,
    chain: StrPath,
    *,
    names: Names = "hf",
    dtype: str | None = None,
    config: StrPath | None = None,
    keep: KeepSteps | None = None,
    signing_key: bytes | None = None,
    every: Seconds = 5.0,
    options: ReadOptions | None = None,
    resources: Resources | None = None,
    locks: bool = True,
    stop: threading.Event | None = None,
    progress: AnyProgress | None = None,
) -> Iterator[PublishedCheckpoint | SkippedCheckpoint]:
    """Publish each checkpoint that becomes complete in the folder of a run, in the order of their steps, until `stop`.

    A checkpoint is complete when all its parts are there, and none of its files changed for `every` seconds. Those that
    are not after the chain's last step when this begins are taken as published; one that appears later begins a new
    epoch if its step is not after the last one. If a checkpoint does not state its step, the last number in the name of
    its folder is the step.

    Args:
        run: The folder or the URL in which checkpoints appear.
        chain: As in `publish`, and so are `names`, `dtype`, `config`, `keep`, `signing_key`, `resources`, `locks` and
            `progress`.
        every: Seconds between two looks.
        options: How checkpoints are opened.
        stop: Ends the iteration when it is set.

    Yields:
        What was published; or a checkpoint that is damaged, once, which is then tried again if it changes.

    Raises:
        CkptError: As `publish`, but not for a checkpoint that is damaged.
    """
    last = last_step(target_path(chain), signing_key)
    least = None if last is None else last.head.record.name.step
    new, before = NewCheckpoints(run, every, options, stop or threading.Event()), None
    for checkpoint in new:
        if isinstance(checkpoint, SkippedCheckpoint):
            yield checkpoint
            continue
        step = step_of(checkpoint)
        if least is not None and step is not None and step <= least and new.was_there(checkpoint.path):
            continue
        try:
            result = publish(
                checkpoint,
                chain,
                step=step,
                names=names,
                dtype=dtype,
                config=config,
                before=before,
                keep=keep,
                signing_key=signing_key,
                resources=resources,
                locks=locks,
                progress=progress,
            )
        except (CorruptError, IncompleteError, NotFoundError) as error:
            if not new.is_of_run(error):
                raise
            yield SkippedCheckpoint(checkpoint.path, error)
            continue
        before = checkpoint
        yield result
