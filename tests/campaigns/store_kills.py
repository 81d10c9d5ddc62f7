"""Hundreds of kills of what writes into a bucket: `python tests/campaigns/store_kills.py --kills 200 --pairs 100`.

A process is killed (SIGKILL) in front of a request that changes the store, or right after it; one in three is killed
twice, and one in five gives up with `clean`. Before the work is run to its end, the target is absent or whole: ckpt
refuses it, and no object by which a format is known is there before all others are. Afterwards each object must have
the bytes of a local file, and nothing else may be there. Then pairs of processes write the same target at the same
time: one of them does, and the other says why not. The check runs a sample.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import ckpt as library
from ckpt.pipeline.targets import clean
from ckpt_formats.core.errors import IncompleteError, NotFoundError, OutputError
from ckpt_formats.core.format import WritableFormat
from ckpt_formats.registry.marks import is_mark
from ckpt_formats.stores.location import target_path
from damage import SAMPLES
from object_stores import BUCKET, StoreServer, moto, reached

SECONDS = 120
CHANGES = ("put", "delete")
REFUSED, FAILED = 97, 98


@dataclass
class Work:
    """A checkpoint that is written into the bucket."""

    source: Path
    format: WritableFormat
    name: str = "out"
    """`out`, or the name of a single file."""
    requests: int = 0
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/run/{self.name}"

    def run(self, target: Path | str) -> None:
        library.save(library.open(self.source), target, self.format, resources=library.Resources(workers=2))


def _nothing(number: int) -> None:
    pass


def works() -> dict[str, Work]:
    zero = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
    return {
        "universal": Work(zero, library.Universal(pack_nbytes=60_000)),
        "deepspeed": Work(zero, library.DeepSpeed(dp=3)),
        "dcp": Work(SAMPLES / "megatron-0.16-tp2-pp2-dist", library.DCP(dp=3)),
        "hf": Work(SAMPLES / "transformers-5.23-trainer", library.HuggingFace()),
        "one file": Work(zero, library.Universal(), "out.ucp"),
    }


def in_child(work: Callable[[], object]) -> int:
    """The exit code of a child that does the work; no client of a store may have been used before in this process."""
    return wait_for(start(work))


def start(work: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child:
        return child
    signal.alarm(SECONDS)
    try:
        work()
        os._exit(0)
    except (OutputError, IncompleteError, NotFoundError):
        os._exit(REFUSED)
    except BaseException:
        traceback.print_exc()
        os._exit(FAILED)


def wait_for(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def counting(before: Callable[[int], None], after: Callable[[int], None]) -> None:
    """In this process, call functions around each request that changes the store, with its number from 0."""
    import obstore

    from ckpt_formats.stores import bucket

    class Counted:
        count = 0

        def __getattr__(self, name: str) -> Any:
            request = getattr(obstore, name)
            if name not in CHANGES:
                return request

            def counted(*arguments: Any, **named: Any) -> Any:
                number, Counted.count = Counted.count, Counted.count + 1
                before(number)
                result = request(*arguments, **named)
                after(number)
                return result

            return counted

    vars(bucket)["obstore"] = Counted()


class Campaign:
    """Kills of one work, and what was seen."""

    def __init__(self, work: Work, server: StoreServer, folder: Path) -> None:
        self.work, self.counts = work, Counter[str]()
        self._server = server
        local = folder / work.name
        assert in_child(lambda: work.run(local)) == 0
        paths = [local] if local.is_file() else [one for one in local.rglob("*") if one.is_file()]
        work.files = {one.relative_to(folder).as_posix(): one.read_bytes() for one in paths}
        count = folder / "count"

        def counted() -> None:
            counting(_nothing, _nothing)
            work.run(work.url)
            from ckpt_formats.stores import bucket

            count.write_text(str(bucket.obstore.count))

        assert in_child(counted) == 0
        work.requests = int(count.read_text())
        self.check_whole()
        self.empty()

    def kill(self, generator: random.Random) -> None:
        """Kill the work once or twice, and run it to its end."""
        for _ in range(generator.choice((1, 1, 2))):
            at, before = generator.randrange(self.work.requests), generator.random() < 0.5
            code = in_child(lambda at=at, before=before: self._killed(at, before))  # type: ignore[misc]
            assert code in (0, REFUSED, -signal.SIGKILL), code
            self.counts["killed"] += code == -signal.SIGKILL
            self._check_absent_or_whole()
        if generator.random() < 0.2:
            assert in_child(lambda: clean(target_path(self.work.url))) == 0
            self.counts["given up"] += 1
            left = self.objects()
            assert left in ({}, self.work.files), sorted(left)
        if self.objects() != self.work.files:
            code = in_child(lambda: self.work.run(self.work.url))
            # One that was killed at its very end is complete already, and only its notes are removed.
            assert code in (0, REFUSED), code
            self.counts["continued"] += 1
        self.check_whole()
        self.empty()

    def _killed(self, at: int, before: bool) -> None:
        def kill(number: int) -> None:
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)

        counting(*((kill, _nothing) if before else (_nothing, kill)))
        self.work.run(self.work.url)

    def _check_absent_or_whole(self) -> None:
        objects = self.objects()
        data = {key: value for key, value in objects.items() if key in self.work.files}
        if any(is_mark(key) for key in data) and self.work.name == "out":
            missing = {key for key in self.work.files if not is_mark(key)} - data.keys()
            assert not missing, f"a mark is there, and not {sorted(missing)}"
        code = in_child(lambda: library.open(self.work.url))
        assert code == REFUSED or data == self.work.files, "an unfinished target can be opened"
        self.counts["whole" if code == 0 else "absent"] += 1

    def pair(self, generator: random.Random) -> None:
        """Two processes write the same target at the same time."""
        later = generator.choice((0.0, 0.0, generator.random() * 0.5))

        def second() -> None:
            time.sleep(later)
            self.work.run(self.work.url)

        children = [start(lambda: self.work.run(self.work.url)), start(second)]
        codes = sorted(wait_for(child) for child in children)
        assert codes == [0, REFUSED], codes
        self.counts["pairs"] += 1
        self.check_whole()
        self.empty()

    def check_whole(self) -> None:
        objects = self.objects()
        assert objects.keys() == self.work.files.keys(), sorted(objects.keys() ^ self.work.files.keys())
        assert objects == self.work.files

    def objects(self) -> dict[str, bytes]:
        """What is in the bucket, read by another library: that of ckpt cannot be used before a fork."""
        client = _boto3(self._server)
        keys = [one["Key"] for one in client.list_objects_v2(Bucket=BUCKET, Prefix="run/").get("Contents", ())]
        return {key[4:]: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}

    def empty(self) -> None:
        client = _boto3(self._server)
        for key in self.objects():
            client.delete_object(Bucket=BUCKET, Key=f"run/{key}")


def _boto3(server: StoreServer) -> Any:
    import boto3

    return boto3.client("s3", region_name="us-east-1")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with moto() as server, reached(server), tempfile.TemporaryDirectory() as folder:
        tables = works()
        for name, work in tables.items():
            generator = random.Random(f"{arguments.seed} {name}")
            (place := Path(folder) / name).mkdir()
            campaign = Campaign(work, server, place)
            while campaign.counts["killed"] < arguments.kills / len(tables):
                campaign.kill(generator)
            while campaign.counts["pairs"] < arguments.pairs / len(tables):
                campaign.pair(generator)
            counts = ", ".join(f"{count} {what}" for what, count in sorted(campaign.counts.items()))
            print(f"{name}: {work.requests} changes of the store; {counts}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
