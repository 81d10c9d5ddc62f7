"""A process that gets a job and numbers writes the same files as the one that planned them."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ckpt
from ckpt.job import Job, shared_plan
from ckpt.pipeline.shared_plan import SharedPlan
from ckpt_formats import registry
from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import FilePlan
from ckpt_formats.core.transfer import Transfer

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"
KB = 1000


def samples() -> list[Path]:
    return sorted(path for path in SAMPLES.iterdir() if path.is_dir() and path.name not in ("damaged", "__pycache__"))


def jobs(sample: Path, target: Path) -> Iterator[Job]:
    """One for each format that can hold the sample."""
    source = ckpt.open(sample)
    for name in sorted(registry.FORMATS.keys() - registry.ONLY_READ):
        job = Job(source, target / name, registry.format_named(name))
        try:
            job.plan()
        except CkptError:
            continue
        yield job


def written(shared: SharedPlan, number: int, folder: Path) -> bytes:
    """What a worker writes for a task."""
    (file,) = shared.files((number,))
    (folder / file.file).parent.mkdir(parents=True, exist_ok=True)
    with Reader(identities=shared.source.identities) as reader, Transfer(reader, 1 << 20, lambda _: None) as transfer:
        shared.format.write(folder, file, transfer)
    return (folder / file.file).read_bytes()


def main(folder: Path) -> None:
    """What the other process does: write the last file of each plan."""
    for path in sorted(folder.glob("*.pickle")):
        shared = pickle.loads(path.read_bytes())
        path.with_suffix(".bin").write_bytes(written(shared, -1, folder / path.stem))


@pytest.mark.slow  # it plans every sample for every format, in two processes
def test_another_process_with_the_job_writes_the_same_files(tmp_path: Path) -> None:
    """Also if it hashes texts otherwise. What it gets for a file is small, whatever the format."""
    expected: dict[str, bytes] = {}
    for sample in samples():
        for job in jobs(sample, tmp_path):
            shared, name = shared_plan(job), f"{sample.name} {job.format.name}"
            (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps(shared, 5))
            expected[name] = written(shared, -1, tmp_path / "own" / name)
            planned = [file for file in job.plan().files if file.layouts is not None]
            assert all(_sent(file) <= KB for file in planned if job.format.name in ("deepspeed", "dcp")), name
    command = [sys.executable, __file__, str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": _path()})
    assert len(expected) > 80
    assert {name for name, data in expected.items() if (tmp_path / f"{name}.bin").read_bytes() != data} == set()


def test_a_process_that_plans_otherwise_is_refused(tmp_path: Path) -> None:
    (job, *_) = jobs(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", tmp_path)
    shared = shared_plan(job)
    other = replace(shared, digest="of another version")
    assert shared.files((0,))
    with pytest.raises(UnsupportedError, match="plans other files"):
        other.files((0,))
    with pytest.raises(TypeError, match="protocol 5"):
        pickle.dumps(shared, 4)


def _sent(file: FilePlan) -> int:
    return len(pickle.dumps(replace(file, layouts=None)))


def _path() -> str:
    return os.pathsep.join(sys.path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
