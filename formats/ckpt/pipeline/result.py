"""What a job wrote."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from ckpt_formats.core.arguments import Checked, Count, Range
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.value_changes import ChangedTensor, notices
from ckpt_formats.stores.location import listed_again


@dataclass(frozen=True)
class Result(Checked):
    """What a job wrote."""

    target: Path
    files: Count
    nbytes: Count
    resumed: Count
    """Files, or parts of a single one, that an earlier, interrupted run wrote."""
    checksums: Count
    """Checksums of the source that were verified while it was read."""
    seconds: Annotated[float, Range(0)]
    status: Literal["written", "pending", "already complete"] = "written"
    """`pending`: the target is not there yet, since other shards write the rest of it, or another process publishes it.
    `already complete`: other processes had published it, and nothing was written."""
    missing: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """While it is pending: the files that are not written yet, by the number of the shard that writes them."""
    publisher: str = ""
    """While it is pending and no file is missing: the process that publishes the target, as text."""
    changed: tuple[ChangedTensor, ...] = ()
    """The tensors with values that were changed other than by rounding: infinite, NaN or zero in a smaller type. While
    the result is pending, those of this shard."""

    left: tuple[Notice, ...] = ()
    """What could not be removed when the target was complete."""
    resumed_nbytes: Count = 0
    """The bytes of the files, or parts, that an earlier run wrote."""
    chunks: Count = 0
    """Chunks of the source's encoded values whose checksums matched as they were decoded. One that was read for two
    files counts twice."""
    zeros: tuple[Notice, ...] = ()
    """Zeros in what was read that look like values that were never written."""

    @property
    def notes(self) -> tuple[Notice, ...]:
        """What the user should know of the values that were written, and of what is left beside them."""
        return (*notices(self.changed), *self.zeros, *self.left)


def complete_before(target: Path) -> Result:
    """The result of a job whose target other processes have published."""
    return Result(listed_again(target), 0, 0, 0, 0, 0.0, "already complete")
