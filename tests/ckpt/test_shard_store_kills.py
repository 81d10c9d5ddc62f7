"""Shards in a store that are killed or wait at a request; `run.py shard_store_kills` in tests/campaigns kills many."""

import random
import time
from dataclasses import replace
from pathlib import Path

import obstore
import pytest

from ckpt.pipeline import Execution
from ckpt.pipeline.bucket_target import open_target
from ckpt.pipeline.job_note import JobNote
from ckpt.pipeline.lease_owner import LeaseOwner
from ckpt_formats.core.errors import LockedError
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal import Universal
from damage import SAMPLES, ckpt
from object_stores import BUCKET, StoreServer
from shard_store_kills import campaigns

ZERO1, ZERO3 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", SAMPLES / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen"
URL = f"s3://{BUCKET}/end/out"
COMMAND = ("convert", ZERO1, URL, "--pack-size", "60000")
DEAD = replace(LeaseOwner.of_this_process(60.0), started="before this process").to_json()
"""The lease of a process that has ended on this machine."""


def _keys(server: StoreServer) -> list[str]:
    return sorted(meta["path"] for page in obstore.list(server.client, "end/") for meta in page)


def _publish() -> None:
    for number in (0, 1):
        done = ckpt(*COMMAND, "--shard", f"{number}/2")
        assert done.code == 0, done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "again"),
    [
        (("published", "lease"), ("commit", URL)),
        (("journal/0", "lease"), (*COMMAND, "--shard", "0/2")),
        (("probe-0",), ("commit", URL)),
        (("published", "job"), (*COMMAND, "--shard", "0/2")),
    ],
    ids=["published", "journal", "probe", "job"],
)
def test_leftovers_of_a_shard_killed_at_its_end_are_removed(
    left: tuple[str, ...], again: tuple[object, ...], user: StoreServer
) -> None:
    assert ckpt(*COMMAND, "--shard", "0/2").code == 0
    job = bytes(obstore.get(user.client, "end/out/.ckpt/job").bytes())
    assert ckpt(*COMMAND, "--shard", "1/2").code == 0
    whole = _keys(user)
    contents = {"lease": DEAD, "job": job}
    for name in left:
        obstore.put(user.client, f"end/out/.ckpt/{name}", contents.get(name, b""))
    done = ckpt(*again)
    assert done.code == 0, done.err
    assert f"{URL} is complete" in done.out
    assert _keys(user) == whole


@pytest.mark.slow
def test_a_job_that_was_put_after_the_end_is_withdrawn(user: StoreServer) -> None:
    """By a shard that had seen nothing there, and waited: alive, or killed just then."""
    assert ckpt(*COMMAND, "--shard", "0/2").code == 0
    job = bytes(obstore.get(user.client, "end/out/.ckpt/job").bytes())
    assert ckpt(*COMMAND, "--shard", "1/2").code == 0
    whole = _keys(user)
    time.sleep(3)
    mark = next(key for key in whole if ".shards." in key)
    for is_marked in (True, False):  # without a mark: another job has written the target
        obstore.put(user.client, "end/out/.ckpt/job", job)
        assert ckpt("inspect", URL).code == 0  # it is whole, whatever else lies there
        if not is_marked:
            obstore.delete(user.client, mark)
        done = ckpt("commit" if is_marked else COMMAND[0], *((URL,) if is_marked else (*COMMAND[1:], "--shard", "0/2")))
        assert done.code == (0 if is_marked else 30), done.err
        assert _keys(user) == [key for key in whole if is_marked or key != mark]
        assert ckpt("inspect", URL).code == 0


@pytest.mark.slow
def test_notes_without_data_are_no_target(user: StoreServer, tmp_path: Path) -> None:
    """As `ckpt clean` leaves them, killed between its last requests: the target was there once, and is not any more."""
    _publish()
    whole = _keys(user)
    obstore.delete(user.client, [key for key in whole if key.startswith("end/out/")])
    obstore.put(user.client, "end/out/.ckpt/lease", DEAD)
    assert ckpt("commit", URL).code == 10
    _publish()
    assert _keys(user) == whole


@pytest.mark.slow
def test_the_mark_of_a_job_is_not_that_of_another_target(user: StoreServer) -> None:
    _publish()
    obstore.delete(user.client, [key for key in _keys(user) if key.startswith("end/out/")])
    time.sleep(2)  # the clock of the store has whole seconds
    assert ckpt("convert", ZERO3, URL).code == 0
    repeated = ckpt(*COMMAND, "--shard", "0/2")
    assert repeated.code == 30, repeated.out
    assert "the target exists already" in repeated.err


@pytest.mark.slow
def test_shard_that_was_taken_for_dead_deletes_nothing(user: StoreServer) -> None:
    """Its own clock may not show it: the machine was stopped."""
    target = target_path(URL)
    assert isinstance(target, StorePath)
    with open_target(target, Execution(), None) as stage:
        stage.begin(JobNote.of("id", Path("source"), target, "universal", ["data"], None))
        # Another process takes the lease, and publishes.
        obstore.put(user.client, "end/out/.ckpt/lease", DEAD)
        obstore.put(user.client, "end/out/data", b"data")
        with pytest.raises(LockedError):
            stage.receipts(Universal())
        with pytest.raises(LockedError):
            stage.discard()
    assert "end/out/data" in _keys(user)


@pytest.mark.slow
def test_killed_or_late_at_any_request_the_target_is_absent_or_whole(tmp_path: Path) -> None:
    generator = random.Random(3)
    with campaigns(tmp_path, ["universal"], ["last"]) as (one,):
        published = [request.endswith("/.ckpt/published") for request in one.requests["last"]]
        one.kill("last", published.index(True), generator)
        one.hold("last", 4, generator, late=0.0)
        assert one.counts["killed"] + one.counts["ended before"] == 1
        assert one.counts["held"] == 1
