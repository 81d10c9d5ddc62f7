"""Jobs on a real cluster of Dask: the same bytes, whoever dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import ckpt as library
from ckpt.pipeline.cluster import connect, distribute
from ckpt.pipeline.cluster.worker import WorkerJob, write_task
from ckpt.pipeline.shared_plan import SharedPlan
from ckpt.pipeline.target import SharedTarget
from ckpt_formats.containers.torchfile import write_file
from ckpt_formats.core.errors import CorruptError, OutputError, UnsupportedError
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.format import FilePlan
from ckpt_formats.core.identity import Identity
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from clusters import At, DaskProcesses, dask_processes, environment, files
from damage import SAMPLES, ckpt

pytestmark = pytest.mark.skipif(find_spec("distributed") is None, reason="distributed is not installed")
WORKERS = 3
ZERO1, ZERO3 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", SAMPLES / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen"
JOBS = (
    ("convert", ZERO3, ("--pack-size", "1")),
    ("convert", ZERO1, ("--to", "dcp", "--dp", "4")),
    ("reshard", ZERO3, ("--dp", "16")),
    ("reshard", SAMPLES / "megatron-0.16-tp2-pp2-dist", ("--tp", "4")),
    ("reshard", SAMPLES / "megatron-0.16-tp2-pp2-legacy", ("--tp", "4")),
    ("compress", ZERO1, ()),
)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskProcesses]:
    with dask_processes(WORKERS, tmp_path_factory.mktemp("dask")) as running:
        yield running


@pytest.fixture
def cluster(processes: DaskProcesses) -> DaskProcesses:
    processes.restore(WORKERS)
    return processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 tensors of 64 kB, each with a checksum."""
    rng, path = np.random.default_rng(1), tmp_path_factory.mktemp("source") / "model.pt"
    tensors = {f"w{i}": Tensor.of(ArrayBlob(rng.standard_normal(16_000).astype(np.float32))) for i in range(200)}
    write_file(path, {"model": tensors}, lambda tensor: [memoryview(tensor.fragments[0].blob.array.tobytes())])
    return path


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("local") / "out"
    job(model, target).run()
    return files(target)


def job(source: Path, target: Path) -> library.Job:
    return library.Job(library.open(source), target, library.Universal(pack_nbytes=1))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "source", "options"), JOBS, ids=lambda value: getattr(value, "name", str(value)))
def test_a_cluster_writes_the_same_bytes(
    command: str, source: Path, options: tuple[str, ...], cluster: DaskProcesses, tmp_path: Path
) -> None:
    assert ckpt(command, source, tmp_path / "local", *options).code == 0
    done = ckpt(command, source, tmp_path / "out", *options, "--executor", cluster.url)
    assert done.code == 0, done.err
    assert files(tmp_path / "out") == files(tmp_path / "local")
    assert sorted(os.listdir(tmp_path)) == ["local", "out"]


@pytest.mark.slow
def test_a_worker_that_is_killed_does_not_show_in_the_bytes(
    cluster: DaskProcesses, model: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    kill = At(0.25, cluster.workers[1].kill)
    result = job(model, tmp_path / "out").run(executor=cluster.url, progress=kill)
    assert kill.happened
    assert result.checksums == 200
    assert files(tmp_path / "out") == expected
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.slow
def test_a_worker_that_hangs_does_not_hold_up_the_others(
    cluster: DaskProcesses,
    model: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distribute, "_MIN_SLOW", 1.0)
    stop = At(0.25, lambda: cluster.workers[0].send_signal(signal.SIGSTOP))
    job(model, tmp_path / "out").run(executor=cluster.url, progress=stop)
    assert stop.happened
    assert files(tmp_path / "out") == expected
    cluster.workers[0].send_signal(signal.SIGCONT)
    time.sleep(1)  # it goes on with a task that nobody waits for
    assert files(tmp_path / "out") == expected
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.slow
def test_an_error_on_a_worker_is_that_of_a_local_run(cluster: DaskProcesses, model: Path, tmp_path: Path) -> None:
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    (damaged := tmp_path / "model.pt").write_bytes(data)
    with pytest.raises(CorruptError) as local:
        job(damaged, tmp_path / "out").run()
    with pytest.raises(CorruptError) as remote:
        job(damaged, tmp_path / "out").run(executor=cluster.url)
    assert vars(remote.value) == vars(local.value)
    damaged.rename(tmp_path / "elsewhere.pt")
    source = library.open(model)
    broken = library.Job(source, tmp_path / "out", library.Universal(pack_nbytes=1))
    broken.plan()
    os.utime(model)  # workers notice that it is not the file that was opened
    try:
        with pytest.raises(CorruptError, match="was changed or replaced while it was read"):
            broken.run(executor=cluster.url)
    finally:
        assert sorted(os.listdir(tmp_path)) == ["elsewhere.pt"]


@pytest.mark.slow
def test_another_version_is_refused_by_name(cluster: DaskProcesses, model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import ckpt_formats.core.version as v\nv.VERSION = '0.0.1'\n")
    (tmp_path / "out").mkdir()
    cluster.workers.append(cluster.start_worker(FIRST=str(tmp_path)))
    cluster.wait_for(WORKERS + 1)
    with pytest.raises(UnsupportedError, match=r"a worker has ckpt 0\.0\.1, and this machine ckpt"):
        job(model, tmp_path / "out" / "new").run(executor=cluster.url)
    assert os.listdir(tmp_path / "out") == []
    cluster.workers[-1].kill()
    cluster.workers.pop().wait()


@pytest.mark.slow
def test_worker_without_ckpt_is_named(cluster: DaskProcesses, model: Path, tmp_path: Path) -> None:
    """Only a worker of its own can lack the package: it needs a process."""
    hiding = "import sys\nsys.modules.update(dict.fromkeys(('ckpt', 'ckpt_formats', 'ckpt_codecs')))\n"
    (tmp_path / "sitecustomize.py").write_text(hiding)
    cluster.workers.append(cluster.start_worker(FIRST=str(tmp_path)))
    cluster.wait_for(WORKERS + 1)
    with pytest.raises(UnsupportedError, match="a worker cannot import ckpt") as refused:
        job(model, tmp_path / "new").run(executor=cluster.url)
    assert "on all workers" in str(refused.value.hint)
    cluster.workers[-1].kill()
    cluster.workers.pop().wait()


def test_dask_worker_names_a_path_that_it_cannot_see(model: Path, tmp_path: Path) -> None:
    source = library.open(model)
    format = library.Universal(pack_nbytes=1)
    shared = SharedPlan.of(format.plan(source), source, format)
    away = SharedTarget(FolderPlace(tmp_path / "away/data"), FolderPlace(tmp_path / "away"), "token")
    outcome = write_task(WorkerJob(shared, source.identities, 1 << 20, away), ((0,),))
    assert outcome.failure is not None
    assert "does not see the folder in which the target is written" in str(outcome.failure.error)
    elsewhere = {tmp_path / "gone.pt": next(iter(source.identities.values()))}
    outcome = write_task(WorkerJob(shared, elsewhere, 1 << 20, away), ((0,),))
    assert outcome.failure is not None
    assert isinstance(outcome.failure.error, OutputError)
    assert "does not see the source" in str(outcome.failure.error)
    late = write_task(WorkerJob(shared, {}, 1 << 20, away, "0.0.1"), ((0,),))
    assert late.failure is not None
    assert "the job is of ckpt 0.0.1" in str(late.failure.error)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_takes_a_log_that_has_grown_for_the_same_file_and_no_other_file(model: Path, tmp_path: Path) -> None:
    """The machine that plans and the one that writes number devices and inodes apart, and a run appends meanwhile."""
    source = library.open(model)
    format = library.Universal()
    shared, paths = SharedPlan.of(format.plan(source), source, format), [tmp_path / "rank.ckg", tmp_path / "rank.pt"]
    for path in paths:
        path.write_bytes(b"as planned")
    there = {path: replace(Identity.of(path.stat()), device=-1, inode=-1) for path in paths}
    for path in paths:
        path.write_bytes(b"as planned, and more")
    target = SharedTarget(FolderPlace(tmp_path / "data"), FolderPlace(tmp_path), "token")
    seen = WorkerJob(shared, there, 1 << 20, target).local_identities
    assert seen[paths[0]] == Identity.of(paths[0].stat())
    assert seen[paths[1]] == there[paths[1]] != Identity.of(paths[1].stat())
    paths[0].write_bytes(b"shorter")
    assert WorkerJob(shared, there, 1 << 20, target).local_identities[paths[0]] == there[paths[0]]


@pytest.mark.slow
def test_dask_states_what_runs_where_and_its_tasks_are_small(
    cluster: DaskProcesses, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed.protocol import pickle

    statuses: list[distribute.ClusterStatus] = []

    class Shown(At):
        def show_status(self, status: distribute.ClusterStatus) -> None:
            statuses.append(status)

    monkeypatch.setattr(distribute, "_STATUS_EVERY", 0.0)
    job(model, tmp_path / "out").run(executor=cluster.url, progress=Shown(2, lambda: None))
    running = [status for status in statuses if status.running]
    assert running
    assert all(status.workers == WORKERS and status.files == 200 for status in running)
    assert all(status.slowest.startswith("packs/") and "process" in status.where for status in running)
    assert "of 200 files written" in str(running[0])
    groups = distribute.groups_for(library.Universal(pack_nbytes=1).plan(library.open(model)).files, 3, 64)
    many = tuple((number,) for number in range(1 << 20, (1 << 20) + 64))
    assert len(pickle.dumps(("0" * 32, len(groups), many))) < 1000


def test_small_files_are_joined_to_tasks_and_all_workers_have_some() -> None:
    def groups(count: int, nbytes: int) -> list[tuple[FilePlan, ...]]:
        return [(FilePlan(str(number), size=nbytes),) for number in range(count)]

    small = distribute.batches(groups(1000, 100_000), slots=2)
    assert [group for batch in small for group in batch] == groups(1000, 100_000)
    assert max(map(len, small)) == 64
    assert [len(batch) for batch in distribute.batches(groups(100, 30 << 20), slots=2)] == [2] * 50
    assert [len(batch) for batch in distribute.batches(groups(16, 1000), slots=4)] == [1] * 16
    assert [len(batch) for batch in distribute.batches(groups(3, 1 << 30), slots=1)] == [1, 1, 1]
    assert distribute.batches([], slots=1) == []


@pytest.mark.slow
def test_ctrl_c_cancels_and_the_same_command_goes_on_without_the_cluster(
    cluster: DaskProcesses, model: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "ckpt_cli", "convert", str(model), str(tmp_path / "out"), "--pack-size", "1"]
    running = subprocess.Popen([*command, "--executor", cluster.url], env=environment())
    journal = tmp_path / ".out.ckpt-partial" / "journal"
    lines = _wait_for_lines(journal, 20, running)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == (130 if lines else 0)
    assert not list(journal.parent.glob("run-*"))
    done = ckpt("convert", model, tmp_path / "out", "--pack-size", "1")
    assert done.code == 0
    assert "of it by an earlier run" in done.out
    assert files(tmp_path / "out") == expected
    time.sleep(1)  # tasks that ran have ended
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.slow
def test_a_scheduler_that_is_lost_ends_the_command_which_can_go_on(
    model: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt.pipeline.cluster import dask_cluster

    (place := tmp_path / "dask").mkdir()
    (folder := tmp_path / "made").mkdir()
    with dask_processes(1, place) as cluster:
        kill = At(0.25, cluster.scheduler.kill)
        with pytest.raises(OutputError, match="the cluster was lost") as lost:
            job(model, folder / "out").run(executor=cluster.url, progress=kill)
        assert "with a cluster or without" in str(lost.value.hint)
        monkeypatch.setattr(dask_cluster, "_CONNECT", 1)
        with pytest.raises(OutputError, match="does not answer"):
            connect(cluster.url.rpartition(":")[0] + ":1")
    result = job(model, folder / "out").run()
    assert result.resumed >= 40
    assert files(folder / "out") == expected
    assert os.listdir(folder) == ["out"]


def test_dask_refuses_commands_that_do_not_scale_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = ckpt("convert", ZERO1, tmp_path / "out", "--to", "torch", "--executor", "dask://127.0.0.1:1")
    assert done.code == 22
    assert "the target is one file (torch), which one process writes" in done.err
    done = ckpt("convert", ZERO1, tmp_path / "out", "--executor", "slurm://queue")
    assert done.code == 2
    assert "dask://HOST:PORT" in done.err
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "ckpt.pipeline.cluster.dask_cluster", raising=False)
    done = ckpt("convert", ZERO1, tmp_path / "out", "--executor", "dask://127.0.0.1:1")
    assert done.code == 22
    assert "ckpt-suite[dask]" in done.err
    done = ckpt("convert", ZERO1, tmp_path / "out", "--executor", "ray://", "--shard", "0/2")
    assert done.code == 2
    assert list(tmp_path.iterdir()) == []


def _wait_for_lines(journal: Path, count: int, running: "subprocess.Popen[bytes]") -> bool:
    until = time.monotonic() + 60
    while running.poll() is None and time.monotonic() < until:
        if journal.exists() and sum(path.read_bytes().count(b"\n") for path in journal.iterdir()) > count:
            return True
        time.sleep(0.005)
    return False
