"""The examples of docs/scale.md are executed: with the variables of Slurm and Kubernetes, and with Dask."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import boto3
import pytest
import yaml

import ckpt as library
from clusters import dask_processes, environment, files
from damage import SAMPLES, ckpt
from object_stores import BUCKET, StoreServer, moto, reached

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text("utf-8")
SOURCE = SAMPLES / "transformers-5.23-trainer"
SHARDS = 8


def block(kind: str, word: str) -> str:
    """The block of the page that has a word."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return next(text for text in blocks if word in text)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `run/step-1000` is a checkpoint, and `ckpt` a command."""
    (tmp_path / "work" / "run").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "work" / "run" / "step-1000").symlink_to(SOURCE)
    command = tmp_path / "bin" / "ckpt"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ckpt_cli "$@"\n')
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture
def expected(place: Path) -> dict[str, bytes]:
    assert ckpt("convert", "run/step-1000", place / "local", "--to", "hf").code == 0
    return files(place / "local")


@pytest.mark.slow
def test_page_has_a_script_for_slurm_that_runs(place: Path, expected: dict[str, bytes]) -> None:
    script = block("bash", "#SBATCH")
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", script).groups())  # type: ignore[union-attr]
    submit = shlex.split(block("console", "--wrap").splitlines()[1])
    shared = {"SLURM_ARRAY_TASK_MIN": str(first), "SLURM_ARRAY_TASK_COUNT": str(last - first + 1)}
    shared["PATH"] = f"{place / 'bin'}:{os.environ['PATH']}"
    for task in range(first, last + 1):
        here = environment(SLURM_ARRAY_TASK_ID=str(task), **shared)
        subprocess.run(["bash", "-e"], input=script.encode(), env=here, check=True, stderr=subprocess.DEVNULL)
    wrapped = submit[submit.index("--wrap") + 1]
    subprocess.run(["bash", "-e", "-c", wrapped], env=environment(**shared), check=True, stderr=subprocess.DEVNULL)
    assert files(Path("step-1000-hf")) == expected


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with moto() as running:
        yield running


@pytest.mark.slow
def test_page_has_a_manifest_for_kubernetes_that_runs(
    place: Path, expected: dict[str, bytes], server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = yaml.safe_load(block("yaml", "kind: Job"))
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    [container] = job["spec"]["template"]["spec"]["containers"]
    command, *words = [*container["command"], *container["args"]]
    assert command == "ckpt"
    assert words[words.index("--shard") + 1] == f"auto/{job['spec']['completions']}" == f"auto/{SHARDS}"
    with reached(server):
        server.put("run/step-1000", SOURCE)
        for index in range(SHARDS):
            monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
            done = ckpt(*words)
            assert done.code == 0, done.err
        commit = shlex.split(block("console", "kubectl").splitlines()[2].removeprefix("$ "))
        assert ckpt(*commit[1:]).code == 0
        with closing(boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")) as store:
            names = {one["Key"] for one in store.list_objects_v2(Bucket=BUCKET, Prefix="step-1000-hf/")["Contents"]}
        assert names == {f"step-1000-hf/{name}" for name in expected}
        assert ckpt("diff", f"s3://{BUCKET}/step-1000-hf", place / "local").code == 0


@pytest.mark.slow
def test_page_has_commands_for_dask_and_python_that_run(
    place: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    line = block("console", "--executor dask://").removeprefix("$ ")
    (tmp_path / "dask").mkdir()
    with dask_processes(2, tmp_path / "dask") as cluster:
        words = shlex.split(line.replace("dask://HOST:8786", cluster.url))
        done = ckpt(*words[1:])
        assert done.code == 0, done.err
        assert files(Path("step-1000-hf")) == expected
        (Path("step-1000-hf")).rename(tmp_path / "first")
        first, second, *_ = block("python", "executor=").splitlines()
        names = {"ckpt": library}
        first = first.replace("/shared/run/step-1000", str(Path("run/step-1000").absolute()))
        exec(first + "\n" + second.replace("dask://HOST:8786", cluster.url), names)
        assert files(Path("step-1000-hf")) == expected
        Path("step-1000-hf").rename(tmp_path / "second")
        assert names["job"].run_shard(0, 2).status == "pending"
        assert names["job"].run_shard(1, 2).status == "written"
        assert names["job"].commit().status == "already complete"
        assert files(Path("step-1000-hf")) == expected
