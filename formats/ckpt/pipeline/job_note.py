"""The note by which a job is known at its target: to runs that continue it, to its shards, and to `ckpt commit`."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ckpt.pipeline.shard import Shard
from ckpt_formats.core.errors import CorruptError, InvalidArgumentError, OutputError
from ckpt_formats.core.text import printable
from ckpt_formats.core.version import WRITTEN_BY


@dataclass(frozen=True)
class JobNote:
    """A job, as the first process that writes its target describes it to all others."""

    id: str
    written_by: str
    """The version of ckpt."""
    source: str
    target: str
    format: str
    command: tuple[str, ...]
    """The words of the command line of a shard, which `ckpt commit` repeats; empty if there is none."""
    folder: str
    """The folder in which the command was run."""
    started: str
    files: tuple[str, ...]
    """The files of the plan: what may be removed when the job is given up."""
    shards: int = 0
    """The number of shards, as the first of them knew it; 0 if it is not known."""

    @classmethod
    def of(
        cls, job_id: str, source: Path, target: Path, format_name: str, files: Sequence[str], shard: Shard | None
    ) -> "JobNote":
        """The job of this process."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        place = (str(source), str(target.absolute()), format_name)
        command, count = ((), 0) if shard is None else (shard.command, shard.count)
        return cls(job_id, WRITTEN_BY, *place, command, os.getcwd(), now, tuple(files), count)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, where: object) -> "JobNote":
        """Raises `CorruptError`."""
        try:
            fields: dict[str, Any] = json.loads(data)
            names = ("id", "written_by", "source", "target", "format", "folder", "started")
            texts = {name: fields[name] for name in names}
            words, files, shards = tuple(fields["command"]), tuple(fields["files"]), fields.get("shards", 0)
            if type(shards) is not int or not all(isinstance(text, str) for text in (*texts.values(), *words, *files)):
                raise TypeError
            if any("\0" in text for text in (*texts.values(), *words, *files)):
                raise ValueError("a name with NUL")
        except (ValueError, KeyError, TypeError, RecursionError):
            hint = "Run one of the shards again, or remove it to give up."
            raise CorruptError("is not the description of a job of shards", where=str(where), hint=hint) from None
        return cls(command=words, files=files, shards=shards, **texts)

    def check_array(self, shard: Shard) -> None:
        """Raise `InvalidArgumentError` if a shard counts the tasks of an array that is not the whole job."""
        if shard.is_counted and self.shards not in (0, shard.count):
            raise InvalidArgumentError(
                f"this array has {shard.count} tasks, but {self.shards} shards write this job",
                where=self.target,
                hint=f"If some tasks are repeated with their numbers, give --shard auto/{self.shards}; else --shard "
                f"i/{self.shards}.",
            )

    def refused(self, target: Path, how_to_give_up: str) -> OutputError:
        """The error for shards of another job, which find that this one writes their target."""
        what = " ".join(self.command) or f"{self.source} to {self.format}"
        return OutputError(
            f"shards of another job write this target: `{printable(what)}`, started {printable(self.started)} with "
            f"{printable(self.written_by)}; this is {WRITTEN_BY}",
            where=target,
            hint=f"All shards need the same source, options and version. To give up that job, {how_to_give_up}.",
        )
