"""Plans by coordinates: they say what the files that are laid out are, and lay out few of them."""

import pickle
from collections import Counter
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckpt.job import Job
from ckpt_cli.views import inspect, job
from ckpt_cli.views.file_ranges import SourceFiles
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import FilePlan, Plan
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.deepspeed import write_optimizer, write_parts
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from damage import SAMPLES

ZERO1 = next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2"))
ZERO3 = next(SAMPLES.glob("deepspeed-*-zero3-bf16-dp4-tied-frozen"))
COLUMNS = (Rule(r".*weight", axis=1), Rule(r".*bias", axis=0), Rule(".*", "replicated"))
PIPELINE = next(SAMPLES.glob("deepspeed-*-bf16opt-tp2-pp2"))
CASES = [
    *((ZERO1, "deepspeed", {"dp": 5, "zero": zero}) for zero in (0, 1, 2, 3)),
    *((ZERO3, "deepspeed", {"dp": dp, "zero": 3}) for dp in (1, 3, 64)),
    *((PIPELINE, "deepspeed", {"dp": 3, "tp": tp}) for tp in (1, 2)),
    *((ZERO3, "dcp", {"dp": dp}) for dp in (1, 5)),
    (ZERO3, "dcp", {"dp": 3, "tp": 2, "rules": COLUMNS}),
    (ZERO1, "dcp", {"dp": 2, "tp": 3, "keys": "accelerate"}),
]


def _words(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def planned(sample: Path, name: str, options: dict[str, Any], target: Path) -> Plan:
    return Job(open_checkpoint(sample), target, writable(name, **options)).plan()


def read_from(tensors: Any) -> Counter[Path]:
    """The bytes that are read from each file for these tensors."""
    nbytes_by_path: Counter[Path] = Counter()
    for tensor in tensors:
        for raw in (raw for fragment in tensor.fragments for raw in fragment.blob.sources()):
            nbytes_by_path[raw.path] += prod(raw.shape) * raw.dtype.itemsize
    return +nbytes_by_path


@pytest.mark.parametrize(("sample", "name", "options"), CASES, ids=_words)
def test_plan_describes_every_file_as_it_is_laid_out(
    sample: Path, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for file in planned(sample, name, options, tmp_path / "out").files:
        laid = file.laid_out()
        assert laid.layouts is None
        assert (file.file, file.role, dict(file.rank)) == (laid.file, laid.role, dict(laid.rank))
        assert file.nbytes == laid.nbytes
        assert list(file.names()) == [one.name for one in laid.parameters] == list(laid.names())
        files = SourceFiles()
        ranges = files.of(file)
        paths = list(files.numbers)
        nbytes: Counter[Path] = Counter()
        for number, count in zip(ranges.files, ranges.nbytes, strict=True):
            nbytes[paths[number]] += int(count)
        assert +nbytes == read_from(laid.tensors)


@pytest.mark.parametrize(("sample", "name", "options"), CASES[3::3], ids=_words)
def test_another_process_writes_the_same_file(sample: Path, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    plan = planned(sample, name, options, tmp_path / "out")
    again: tuple[FilePlan, ...] = pickle.loads(pickle.dumps(plan.files))
    written = []
    for files, folder in ((plan.files, tmp_path / "here"), (again, tmp_path / "there")):
        (folder / files[-1].file).parent.mkdir(parents=True)
        with Reader() as reader, Transfer(reader) as transfer:
            writable(name, **options).write(folder, files[-1], transfer)
        written.append((folder / files[-1].file).read_bytes())
    assert len(written[0]) == plan.files[-1].nbytes
    assert written[0] == written[1]


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of work is done that takes as long as a file has parameters."""
    counts: Counter[str] = Counter()

    def counting(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        monkeypatch.setattr(module, name, counted)

    for name in ("tree_part", "model3_file", "zero3_file", "shards_of_rank"):
        counting(write_parts, name)
    counting(write_optimizer, "flat_vector")
    return counts


def test_planning_stage_3_and_a_dry_run_take_the_same_work_for_any_number_of_ranks(
    laid_out: Counter[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, seen = open_checkpoint(ZERO3), []
    for ranks in (64, 256):
        laid_out.clear()
        work = Job(source, tmp_path / "out", writable("deepspeed", dp=ranks, zero=3))
        plan = work.plan()
        assert len(plan.files) == 2 * ranks
        job.show_plan(source, plan, tmp_path / "out", "deepspeed", False)
        inspect.print_ranks(source, plan.files, tmp_path / "out", "deepspeed", False)
        seen.append(dict(laid_out))
    assert seen[0] == seen[1]
    assert f"and {2 * 256 - 40} more files" in capsys.readouterr().out


@pytest.mark.parametrize("stage", [1, 2])
def test_planning_stages_1_and_2_lays_out_two_ranks(stage: int, laid_out: Counter[str], tmp_path: Path) -> None:
    for ranks in (64, 256):
        laid_out.clear()
        plan = planned(ZERO1, "deepspeed", {"dp": ranks, "zero": stage}, tmp_path / "out")
        assert len(plan.files) == ranks + 1
        assert laid_out["tree_part"] == 3  # the model, the first and the last rank's optimizer
        assert laid_out["shards_of_rank"] == 1
