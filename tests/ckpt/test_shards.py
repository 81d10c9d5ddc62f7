"""Processes of a job array that write one target: whoever is killed, repeated, or run twice, the bytes are the same."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import obstore
import pytest

import ckpt as library
from ckpt.pipeline import lease as leases
from ckpt.pipeline.groups import deal
from ckpt.pipeline.lease import Busy, Lease, acquire
from ckpt.pipeline.shard import Shard, parse_shard
from ckpt.reading.evidence import file_rows, replaced
from ckpt_formats.core.errors import InvalidArgumentError, LockedError
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.place import Version
from ckpt_formats.stores import bucket
from ckpt_formats.universal.gradients.record import Kind
from ckpt_formats.universal.gradients.segment import open_segment
from clusters import dask_processes, environment, files
from damage import SAMPLES, ckpt
from gradient_logs import small_log
from object_stores import BUCKET, StoreServer, reached
from shard_kills import FORMATS, Campaign

ZERO1, ZERO3 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", SAMPLES / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen"
SLURM = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "5"}
ONE = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "1"}
ONE |= {"SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_MAX": "3", "SLURM_ARRAY_TASK_STEP": "1"}
GAPS = {"SLURM_ARRAY_TASK_ID": "6", "SLURM_ARRAY_TASK_COUNT": "3"}  # --array=1,3,6
GAPS |= {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "6", "SLURM_ARRAY_TASK_STEP": "1"}
SGE = {"SGE_TASK_ID": "5", "SGE_TASK_FIRST": "1", "SGE_TASK_LAST": "7", "SGE_TASK_STEPSIZE": "2"}
LSF = {"LSB_JOBINDEX": "3", "LSB_JOBINDEX_END": "8"}
COMMAND = ("convert", ZERO3, "out", "--pack-size", "1")


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """In a folder of its own, with relative paths: what a local run writes."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert ckpt(*COMMAND[:2], tmp_path / "local", *COMMAND[3:]).code == 0
    return files(tmp_path / "local")


@pytest.mark.parametrize(
    ("text", "variables", "expected"),
    [
        ("3/8", {}, (3, 8)),
        ("auto", SLURM, (2, 4)),
        ("auto", {**SLURM, "SLURM_ARRAY_TASK_STEP": "2"}, (1, 4)),
        ("auto", {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}, (7, 12)),
        ("auto", {"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, (2, 3)),
        ("auto/9", {"JOB_COMPLETION_INDEX": "8"}, (8, 9)),
        ("auto", LSF, (2, 8)),
        ("auto/8", {"LSB_JOBINDEX": "1"}, (0, 8)),
        ("auto", {**SLURM, "SLURM_ARRAY_TASK_MAX": "8"}, (2, 4)),
        ("auto/4", {**SLURM, "SLURM_ARRAY_TASK_MAX": "8"}, (2, 4)),
        ("auto/9", GAPS, (6, 9)),  # some tasks of nine are repeated
        ("auto/8", ONE, (3, 8)),
        ("auto/16", {**ONE, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (7, 16)),
        ("auto", {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (0, 1)),
        ("auto/8", {**LSF, "LSB_JOBINDEX_END": "3"}, (2, 8)),
        ("auto/8", {"PBS_ARRAY_INDEX": "7"}, (7, 8)),
        ("auto/8", {"PBS_ARRAYID": "0"}, (0, 8)),
        ("auto", SGE, (2, 4)),
        ("auto/8", {**SGE, "SGE_TASK_FIRST": "5", "SGE_TASK_LAST": "5"}, (4, 8)),
        ("auto", {"_CONDOR_PROCNO": "2", "_CONDOR_NPROCS": "4"}, (2, 4)),
    ],
)
def test_the_number_of_a_shard(text: str, variables: dict[str, str], expected: tuple[int, int]) -> None:
    shard = parse_shard(text, variables)
    assert (shard.number, shard.count) == expected


@pytest.mark.parametrize(
    ("text", "variables", "message"),
    [
        ("8/8", {}, "there is no shard 8 of 8"),
        ("0/0", {}, "there is no shard 0 of 0"),
        ("half", {}, "names no shard"),
        ("auto", {}, "no job array is found"),
        ("auto", {"LSB_JOBINDEX": "0"}, "no job array is found"),
        ("auto", {"JOB_COMPLETION_INDEX": "1"}, "but not how many there are"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "1"}, "SLURM_ARRAY_TASK_COUNT is not a number"),
        ("auto", {**SLURM, "SLURM_ARRAY_TASK_ID": "99"}, "have gaps"),
        ("auto", ONE, "this array has one task, number 3: it may be one of several"),
        ("auto", GAPS, "the numbers of this array's 3 tasks have gaps, and Slurm does not list them; this is number 6"),
        ("auto/3", GAPS, "there is no shard 6 of 3"),
        ("auto/8", {"LSB_JOBINDEX": "9"}, "there is no shard 8 of 8"),
        ("auto", {"SLURM_PROCID": "0", "SLURM_JOB_ID": "5"}, "no job array is found"),
        ("auto", {"PBS_ARRAY_INDEX": "7"}, "PBS has the number of this task, 7, but not how many there are"),
        ("auto", {"SGE_TASK_ID": "undefined"}, "no job array is found"),
        ("auto", {**SGE, "SGE_TASK_FIRST": "5", "SGE_TASK_LAST": "5"}, "this array has one task, number 5"),
        ("auto", {"_CONDOR_JOB_AD": "/nowhere"}, "no job array is found"),
    ],
)
def test_shard_refuses_texts_that_name_none(text: str, variables: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_shard(text, variables)


@pytest.mark.parametrize("task", ["1", "3", "6"])
def test_tasks_of_an_array_with_gaps_have_the_numbers_of_no_others(task: str) -> None:
    with pytest.raises(InvalidArgumentError, match="have gaps"):
        parse_shard("auto", {**GAPS, "SLURM_ARRAY_TASK_ID": task})
    assert parse_shard("auto/7", {**GAPS, "SLURM_ARRAY_TASK_ID": task}).number == int(task)


def test_htcondor_states_the_number_of_tasks_in_its_job_ad(tmp_path: Path) -> None:
    ad = tmp_path / "job.ad"
    ad.write_text('Cmd = "/bin/ckpt"\nProcId = 3\nTotalSubmitProcs = 8\n')
    shard = parse_shard("auto", {"_CONDOR_JOB_AD": str(ad)})
    assert (shard.number, shard.count) == (3, 8)
    ad.write_text("ProcId = 3\n")
    assert parse_shard("auto/5", {"_CONDOR_JOB_AD": str(ad)}).number == 3
    with pytest.raises(InvalidArgumentError, match="HTCondor has the number of this task, 3, but not how many"):
        parse_shard("auto", {"_CONDOR_JOB_AD": str(ad)})


def test_an_array_of_some_tasks_does_not_take_itself_for_the_job(
    local: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ckpt(*COMMAND, "--shard", "0/4").code == 0
    two = {"TASK_ID": "2", "TASK_COUNT": "2", "TASK_MIN": "2", "TASK_MAX": "3", "TASK_STEP": "1"}
    for name, value in two.items():
        monkeypatch.setenv(f"SLURM_ARRAY_{name}", value)
    refused = ckpt(*COMMAND, "--shard", "auto")
    assert refused.code == 2
    assert "this array has 2 tasks, but 4 shards write this job" in refused.err
    assert "--shard auto/4" in refused.err
    for task in (2, 3, 1):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
        assert ckpt(*COMMAND, "--shard", "auto/4").code == 0
    assert files(Path("out")) == local


def test_each_file_is_dealt_to_one_shard_and_the_bytes_are_even() -> None:
    plan = library.Universal(pack_nbytes=1).plan(library.open(ZERO3))
    dealt = [[one for group in deal(plan.files, Shard(i, 4)) for one in group] for i in range(4)]
    assert sorted(one.file for share in dealt for one in share) == sorted(one.file for one in plan.files)
    loads = [sum(one.nbytes for one in share) for share in dealt]
    assert max(loads) - min(loads) <= max(one.nbytes for one in plan.files)


def test_shards_say_what_is_missing_and_the_last_one_publishes(local: dict[str, bytes]) -> None:
    done = [ckpt(*COMMAND, "--shard", f"{i}/3", "--json") for i in (2, 0)]
    assert [one.code for one in done] == [0, 0]
    second = json.loads(done[1].out)
    assert second["status"] == "pending"
    assert second["pending"].endswith("files are not written yet: those of shards 1")
    committed = ckpt("commit", "out")
    assert committed.code == 20
    assert "files are not written yet" in committed.err
    job = library.Job(library.open(ZERO3), "out", library.Universal(pack_nbytes=1))
    again = job.run_shard(0, 3)
    expected = {one.file for group in deal(job.plan().files, Shard(1, 3)) for one in group}
    assert (again.status, again.missing.keys(), set(again.missing[1])) == ("pending", {1}, expected)
    repeated = ckpt(*COMMAND, "--shard", "0/3", "--json")
    assert json.loads(repeated.out)["files"] == 0
    assert not Path("out").exists()
    assert ckpt(*COMMAND, "--shard", "1/3").code == 0
    assert files(Path("out")) == local
    again = ckpt(*COMMAND, "--shard", "1/3")
    assert again.code == 0
    assert "published it already" in again.out
    for _ in range(2):
        committed = ckpt("commit", "out", "--json")
        assert committed.code == 0
    assert ckpt("convert", ZERO1, "out", "--shard", "0/3").code == 30
    assert ckpt("commit", "other").code == 10


def test_shards_of_another_job_are_refused_by_name(local: dict[str, bytes]) -> None:
    assert ckpt(*COMMAND, "--shard", "0/3").code == 0
    other = ckpt("convert", ZERO3, "out", "--shard", "1/3")
    assert other.code == 30
    assert "shards of another job write this target: `convert" in other.err
    assert "--pack-size 1 --shard 0/3`" in other.err
    assert ckpt(*COMMAND, "--shard", "2/3").code == 0, "the refused job is none of those that write the target"
    assert ckpt("convert", ZERO3, "out", "--to", "torch", "--shard", "0/2").code == 22
    assert ckpt("clean", "out").code == 0
    assert os.listdir() == []


def test_commit_repeats_the_command_from_anywhere(
    local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ckpt(*COMMAND, "--shard", "0/2").code == 0
    lease = acquire(FolderPlace(next(Path().glob(".out.*.shards.ckpt-partial"))), "lease")
    assert isinstance(lease, Lease)
    last = ckpt(*COMMAND, "--shard", "1/2")
    assert last.code == 0
    assert f"all files are written; process {os.getpid()} on" in last.out
    lease.release()
    monkeypatch.chdir(tmp_path)
    done = ckpt("commit", tmp_path / "work" / "out")
    assert done.code == 0, done.err
    assert files(tmp_path / "work" / "out") == local


ARRAYS = {
    "slurm": ("auto", {"SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "0"}, "SLURM_ARRAY_TASK_ID", 0),
    "srun": ("auto", {"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID", 0),
    "kubernetes": ("auto/2", {}, "JOB_COMPLETION_INDEX", 0),
    "lsf": ("auto", {"LSB_JOBINDEX_END": "2"}, "LSB_JOBINDEX", 1),
}


@pytest.mark.parametrize("array", ARRAYS)
def test_commit_publishes_what_an_array_wrote_in_an_environment_without_the_array(
    array: str, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, shared, index, first = ARRAYS[array]
    lease, command = None, (*COMMAND, f"--shard={text}") if array == "srun" else (*COMMAND, "--shard", text)
    for task in range(2):
        with monkeypatch.context() as here:
            for name, value in {**shared, index: str(first + task)}.items():
                here.setenv(name, value)
            done = ckpt(*command)
            assert done.code == 0, done.err
        if lease is None:  # so that the last shard cannot publish
            lease = acquire(FolderPlace(next(Path().glob(".out.*.shards.ckpt-partial"))), "lease")
    assert isinstance(lease, Lease)
    lease.release()
    assert not Path("out").exists()
    monkeypatch.chdir(tmp_path)
    if array == "slurm":  # `sbatch --wrap`: a batch step, which is no part of an array
        monkeypatch.setenv("SLURM_PROCID", "0")
    done = ckpt("commit", "work/out")
    assert done.code == 0, done.err
    assert files(tmp_path / "work" / "out") == local


def test_a_job_records_its_shard_as_numbers(local: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert ckpt(*COMMAND, "--shard", "auto/3").code == 0
    [job] = Path().glob(".out.*.shards.ckpt-partial/job")
    assert json.loads(job.read_text())["command"][-2:] == ["--shard", "1/3"]


def test_a_lease_passes_on_when_its_holder_is_dead_and_not_before(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path)
    first = acquire(place, "lease")
    assert isinstance(first, Lease)
    assert str(acquire(place, "lease")) == f"process {os.getpid()} on {os.uname().nodename}"
    fields = json.loads((tmp_path / "lease").read_text())
    (tmp_path / "lease").write_text(json.dumps({**fields, "machine": "elsewhere"}))
    assert isinstance(acquire(place, "lease"), Busy)
    hour_ago = time.time() - 3600
    os.utime(tmp_path / "lease", (hour_ago, hour_ago))
    second = acquire(place, "lease")
    assert isinstance(second, Lease)
    assert isinstance(acquire(place, "lease"), Busy)
    first.release()  # it has lost the lease, and must not remove that of the second
    assert isinstance(acquire(place, "lease"), Busy)
    second.release()
    third = acquire(place, "lease")
    assert isinstance(third, Lease)
    third.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["create", "replace_stale"])
def test_a_lease_runs_from_the_request_for_it_although_the_answer_comes_late(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others count from the time that the place has noted: they may have taken it when the answer is there."""
    late = 0.0

    class Slow(FolderPlace):
        def create(self, key: str, data: bytes) -> Version:
            nonlocal late
            version = super().create(key, data)
            late += leases.SECONDS + 1
            return version

    if how == "replace_stale":
        (tmp_path / "lease").write_bytes(b"{}")
        os.utime(tmp_path / "lease", (0, 0))
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late))
    taken = acquire(Slow(tmp_path), "lease")
    assert isinstance(taken, Lease)
    with pytest.raises(LockedError):
        taken.check()
    taken.release()
    assert os.listdir(tmp_path) == ["lease"], "another process may take it at this moment, and would lose it"


@pytest.mark.slow
def test_shards_finish_when_one_is_killed_and_one_runs_twice(local: dict[str, bytes], tmp_path: Path) -> None:
    def start(number: int) -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-m", "ckpt_cli", *map(str, COMMAND), "--shard", f"{number}/3"]
        return subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL)

    running = [start(0), start(1), start(2), start(2)]
    while running[1].poll() is None and not list(Path().glob(".out.*/journal/*")):
        time.sleep(0.002)
    running[1].send_signal(signal.SIGKILL)
    assert [one.wait() for one in running if one is not running[1]] == [0, 0, 0]
    if running[1].wait() != 0:
        assert not Path("out").exists()
        assert start(1).wait() == 0
    assert files(Path("out")) == local


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_random_kills_do_not_show_in_the_bytes(name: str, tmp_path: Path) -> None:
    campaign, generator = Campaign(tmp_path, name), random.Random(name)
    while campaign.counts["killed"] < 4:
        campaign.round(generator)


def _objects(server: StoreServer, key: str) -> dict[str, bytes]:
    metas = [meta for page in obstore.list(server.client, f"{key}/") for meta in page]
    return {m["path"][len(key) + 1 :]: bytes(obstore.get(server.client, m["path"]).bytes()) for m in metas}


@pytest.mark.slow
def test_shards_write_into_a_store(server: StoreServer, local: dict[str, bytes]) -> None:
    with reached(server):
        url = f"s3://{BUCKET}/shards/out"
        command = ("convert", ZERO3, url, "--pack-size", "1")
        first = ckpt(*command, "--shard", "0/3", "--json")
        assert first.code == 0, first.err
        assert "those of shards 1, 2" in json.loads(first.out)["pending"]
        assert ckpt("convert", ZERO3, url, "--shard", "1/3").code == 30
        assert ckpt("inspect", url).code != 0
        assert ckpt(*command, "--shard", "2/3").code == 0
        missing = ckpt("commit", url)
        assert missing.code == 20, missing.err
        # Shard 1 was killed after it had put an object, before it had put the receipt.
        key = sorted(local.keys() - _objects(server, "shards/out").keys() - {"manifest.json", "index.safetensors"})[0]
        obstore.put(server.client, f"shards/out/{key}", local[key])
        assert ckpt(*command, "--shard", "1/3").code == 0
        assert _objects(server, "shards/out") == local
        assert ckpt("commit", url).code == 0


@pytest.mark.slow
def test_shards_upload_large_files_in_parts(
    server: StoreServer, local: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever completes an upload in parts looks before whether the object is there: a request within a request."""
    monkeypatch.setattr(bucket, "_SINGLE_REQUEST", 1_000)
    assert max(map(len, local.values())) > 1_000
    with reached(server):
        command = ("convert", ZERO3, f"s3://{BUCKET}/parts/out", "--pack-size", "1")
        for number in (1, 0):
            done = ckpt(*command, "--shard", f"{number}/2")
            assert done.code == 0, done.err
        assert _objects(server, "parts/out") == local


@pytest.mark.slow
def test_a_cluster_writes_into_a_store(server: StoreServer, local: dict[str, bytes], tmp_path: Path) -> None:
    with reached(server):
        url = server.put("cluster/source", ZERO3)
        (tmp_path / "dask").mkdir()
        with dask_processes(2, tmp_path / "dask") as cluster:
            done = ckpt("convert", url, f"s3://{BUCKET}/cluster/out", "--pack-size", "1", "--executor", cluster.url)
            assert done.code == 0, done.err
            written = _objects(server, "cluster/out")
            assert written.keys() == local.keys()
            assert {k: v for k, v in written.items() if k.startswith("packs/")} == {
                k: v for k, v in local.items() if k.startswith("packs/")
            }
        assert urlsplit(url).scheme == "s3"


@pytest.mark.slow
def test_shards_of_a_step_agree_while_its_log_grows(tmp_path: Path) -> None:
    run = tmp_path / "run.chain"
    segment = open_segment(small_log(9).write(run))
    later = {segment.path(rank): segment.path(rank).read_bytes() for rank in range(2)}
    needed = [one.hash for one in segment.logs[0].records if one.kind not in (Kind.FINGERPRINT, Kind.END)]
    assert segment.hash_upto(0, 9) == needed[-1], "its last step can be read before the run closes the log"
    for rank, path in enumerate(later):
        os.truncate(path, segment.nbytes_upto(rank, 7))

    def job(step: int) -> library.Job:
        return library.Job(library.Chain(run)[step], tmp_path / "out", library.Universal(pack_nbytes=1))

    assert job(5).run_shard(0, 2).status == "pending"
    before = library.Chain(run)[5].identities
    for path, content in later.items():
        with path.open("ab") as file:
            file.write(content[path.stat().st_size :])
    assert job(6).id != job(5).id, "shards of two steps would write one target"
    pairs = [[library.Chain(run)[step] for step in (first, 7)] for first in (5, 6)]
    averages = [library.Job(library.average(pair), tmp_path / "mean", library.Universal()) for pair in pairs]
    assert averages[0].id != averages[1].id, "both read step 7, and each another step, too"
    of_step = file_rows(before.items())
    assert replaced(of_step, library.Chain(run)[5].identities) is None, "ranks open it one after another"
    assert replaced(of_step, library.Chain(run)[6].identities) in later
    assert job(5).run_shard(1, 2).status == "written"
    assert library.Chain(run).last == 9
    assert library.diff(library.open(tmp_path / "out"), library.Chain(run)[5]).same
