"""The newest whole checkpoint of a run."""

from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.arguments import StrPath, checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.registry.newest import newest_whole


@dataclass(frozen=True)
class PassedOver:
    """A newer checkpoint that is not whole."""

    path: Path
    reason: str


@dataclass(frozen=True, eq=False)
class Latest:
    """The newest whole checkpoint of a run."""

    path: Path
    """Where it is; of a chain, `run.chain@1234`."""
    step: int | None
    """As it states, or as its name says."""
    checkpoint: Checkpoint
    passed_over: tuple[PassedOver, ...] = ()
    """Newer ones, the newest first, each with what is wrong with it."""

    __repr__ = short_repr


@checked
def latest(
    run: StrPath, *, verify: bool = False, options: ReadOptions | None = None, anonymous: bool = False
) -> Latest:
    """The newest whole checkpoint in the folder of a run, or the last state of a chain.

    Newer means a larger number in the name. A checkpoint without a number, such as `last.ckpt`, is the newest if it
    states a later step. Only the headers of the newest ones are read; those that are incomplete are passed over.

    Args:
        run: The folder or the URL in which checkpoints are saved.
        verify: Read the checkpoint, too, and pass over one that is damaged.
        options: How checkpoints are opened.
        anonymous: Ask a store without credentials, for what is public.

    Raises:
        NotFoundError: There is no checkpoint.
        IncompleteError: None is whole.
    """

    def check(checkpoint: Checkpoint) -> None:
        if not verify:
            return
        from ckpt.findings.checks import verify as find_damage  # it imports all that reads values

        if damage := find_damage(checkpoint):
            raise CorruptError(f"{damage[0].kind}: {damage[0].what}", where=damage[0].where)

    newest = newest_whole(run, options, anonymous, check)
    assert newest.checkpoint is not None
    assert newest.path is not None
    passed_over = tuple(PassedOver(path, str(error)) for path, error in newest.passed_over.items())
    return Latest(newest.path, newest.step, newest.checkpoint, passed_over)
