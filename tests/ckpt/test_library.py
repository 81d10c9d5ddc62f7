"""The library as users have it: the page docs/library.md is true, and checkpoints are lazy mappings of arrays."""

import ast
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckpt
from ckpt.job import Job, load_kernels, save
from ckpt.pipeline import Execution
from ckpt_cli.options.target import FORMAT_OPTIONS
from ckpt_codecs.native import library
from ckpt_formats import registry
from ckpt_formats.core import files
from ckpt_formats.core.tensor import ArrayBlob, Tensor, read
from damage import SAMPLES
from damage import ckpt as command
from held import checkpoint
from held import parameter as held_parameter
from public_names import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text("utf-8")
ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
DESIGNED = "e4bb0129e7d95defdcf75af524a17e2b35984e449eb43acdfb468eb471fda9f1"
"""SHA-256 of the example as it was designed. Whoever changes the example changes what users rely on."""
CHECKPOINTS = sorted(
    path for path in SAMPLES.iterdir() if path.is_dir() and path.name not in ("damaged", "recorded-1", "__pycache__")
)
FORMATS: dict[str, type[ckpt.WritableFormat]] = {
    name: format for name, format in PUBLIC.items() if name != "WritableFormat" and hasattr(format, "summary")
}
WEIGHTS = ("float32", "bfloat16", "float16")
every_sample = pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)


def blocks_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def table_after(mark: str) -> list[list[str]]:
    """The cells of the first table after a mark of the page, without its head."""
    _, _, rest = PAGE.partition(f"<!-- {mark} -->\n")
    lines = rest.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def write_adapter(folder: Path, arrays: dict[str, np.ndarray], **config: object) -> None:
    """An adapter folder as PEFT writes it, of float32 arrays by name."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    header, data = {}, b""
    for name, array in arrays.items():
        end = len(data) + array.nbytes
        header[f"base_model.model.{name}"] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the checkpoints that the page names."""
    for name in ("run/global_step1000", "a", "b", "c", "base"):
        shutil.copytree(ZERO1, tmp_path / name)
        (tmp_path / name / "config.json").write_text('{"model_type": "tiny"}')  # `HuggingFace` writes it too
    random = np.random.default_rng(0)
    low, high = (random.normal(size=shape).astype(np.float32) for shape in ((2, 32), (256, 2)))
    arrays = {"head.lora_A.weight": low, "head.lora_B.weight": high}
    write_adapter(tmp_path / "adapter", arrays, lora_alpha=4, r=2)
    shapes = {"lora_A": (6, 8), "lora_B": (16, 6)}
    experts = {f"0.mlp.experts.{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    write_adapter(tmp_path / "experts-adapter", experts, lora_alpha=4, r=2, target_parameters=["experts.gate_up_proj"])
    shutil.copytree(SAMPLES / "recorded-1" / "run.chain", tmp_path / "recorded.chain")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def bytes_read() -> Iterator[Callable[[], int]]:
    """Within, the bytes that all readers have read so far. Files that are opened for other purposes are refused."""
    total, lock, original = 0, threading.Lock(), files.Reader.read_into

    def counted(self: files.Reader, path: Path, offset: int, out: memoryview, seal: Any = None) -> None:
        nonlocal total
        with lock:
            total += len(out)
        original(self, path, offset, out, seal)

    def refused(*arguments: Any) -> None:
        raise AssertionError(f"a file is opened: {arguments}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.Reader, "read_into", counted)
        for name in ("open_regular", "read_whole"):
            patch.setattr(files, name, refused)
        yield lambda: total


# The page


def test_the_blocks_of_the_page_run_in_their_order(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    example, *others = blocks_of(PAGE)
    exec(compile(example, "docs/library.md, example", "exec"), names)
    assert names["diff"].same
    assert names["problems"] == []
    assert names["tuned"]["head.weight"].shape == (256, 32)
    written = {"model.safetensors", "for-8-gpus", "hf", "run.chain", "restored", "out"}
    assert written <= {path.name for path in desk.iterdir()}
    run = names["run"]
    saved = ckpt.open("model.safetensors")
    assert not np.asarray(saved["head.weight"]).any()
    assert not any(name.endswith(".bias") for name in saved)
    for target in ("for-8-gpus", "hf", "restored", "out"):
        written_back = ckpt.open(target)
        assert all(np.array_equal(bits(written_back[name]), bits(run[name])) for name in run), target
    for number, block in enumerate(others, 2):
        exec(compile(block, f"docs/library.md, block {number}", "exec"), names)
    assert capsys.readouterr().err == ""


def test_page_has_the_designed_example() -> None:
    example = blocks_of(PAGE)[0]
    assert hashlib.sha256(example.encode()).hexdigest() == DESIGNED


def test_the_page_lists_all_names_and_no_others() -> None:
    listed = [name for row in table_after("names") for name in re.findall(r"`([\w.]+)`", row[0])]
    assert sorted(listed) == sorted(PUBLIC)
    assert sorted(ckpt.__all__) == sorted(set(ckpt.__all__))
    for name in ckpt.__all__:
        assert getattr(ckpt, name) is not None
    assert dir(ckpt) == sorted(ckpt.__all__)
    with pytest.raises(AttributeError):
        getattr(ckpt, "no_such_name")  # noqa: B009


def test_the_page_lists_the_options_of_all_formats() -> None:
    expected = {}
    for name, format in FORMATS.items():
        options = [
            f"`{one.name}`" if one.default is None else f"`{one.name}={one.default!r}`" for one in fields(format)
        ]
        expected[f"`{name}`"] = [f"`{format.name}`", ", ".join(options)]
    table = {row[0]: row[1:] for row in table_after("formats")}
    assert table == expected
    meanings = PAGE.partition("| option | meaning |")[2].partition("\n\n")[0]
    rows = [line.split(" | ")[0] for line in meanings.splitlines()[2:]]
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert explained == {one.name for format in FORMATS.values() for one in fields(format)}


def test_every_writable_format_is_in_the_library() -> None:
    writable = {name for name in registry.FORMATS if name not in registry.ONLY_READ}
    assert writable == {format.name for format in FORMATS.values()}
    assert FORMAT_OPTIONS.keys() <= {one.name for format in FORMATS.values() for one in fields(format)}


def test_library_imports_nothing_heavy() -> None:
    code = "import sys, ckpt; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "click", "rich", "numba", "numpy"} & set(done.stdout.split())
    code = f"import ckpt, sys; ckpt.open({str(ZERO1)!r}).weights_only(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "click", "rich", "numba"} & set(done.stdout.split())
    assert done.stderr == ""


def test_a_format_knows_only_its_own_options() -> None:
    with pytest.raises(TypeError):
        ckpt.Torch(dp=2)  # type: ignore[call-arg]


# Reading


def bits(values: Any) -> np.ndarray:
    """The bytes of an array, in C order: NaNs are equal if their bits are."""
    array = np.asarray(values)
    return np.frombuffer(array.tobytes(), np.uint8)


@pytest.mark.parametrize("path", [*CHECKPOINTS, SAMPLES / "recorded-1" / "run.chain"], ids=lambda path: path.name)
def test_every_sample_is_a_mapping_of_arrays(path: Path) -> None:
    run = ckpt.open(path)
    assert len(list(run)) == len(run) > 0
    for name, parameter in run.items():
        assert parameter is run[name]
        assert parameter.role != "extra"
        everything = read(parameter.weight)
        assert everything.shape == parameter.shape
        assert everything.dtype == parameter.dtype
        assert np.array_equal(bits(parameter), bits(everything))
        for tensor in parameter.states.values():
            whole = read(tensor)
            assert np.array_equal(bits(tensor[...]), bits(whole))
            if tensor.shape and tensor.shape[0]:
                assert np.array_equal(bits(tensor[-1]), bits(whole[-1]))
                assert np.array_equal(bits(tensor[1::2]), bits(whole[1::2]))
    for alias, name in run.aliases.items():
        assert run[alias] is run[name]
    with pytest.raises(KeyError):
        run["no such parameter"]


KEYS: list[Any] = [
    ...,
    (),
    0,
    -1,
    np.int64(3),
    slice(None),
    slice(2, 5),
    slice(-4, -1),
    slice(1, None, 3),
    slice(7, 2),
    slice(0, 99),
    slice(None, None, 100),
    (1, 2),
    (-1, -7),
    (slice(None), -2),
    (slice(1, -1, 3), ...),
    (..., 0),
    (..., slice(None, None, 2)),
    (slice(2, 9, 2), slice(1, 6, 4)),
    (4, ..., slice(2, 3)),
    (slice(3, 3), 1),
    (0, 0, 0),
    (..., 0, 0, 0),
    (2, slice(1, 4), slice(None, None, 2)),
]
WRONG_KEYS: list[Any] = [
    10,
    -11,
    (0, 7),
    (0, 0, 3),
    (0, 0, 0, 0),
    (..., ...),
    "name",
    1.0,
    None,
    True,
    [0, 1],
    np.array([True, False]),
    slice(None, None, -1),
]


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_parameter_gives_the_blocks_of_numpy(key: Any) -> None:
    array = np.arange(210, dtype=np.int32).reshape(10, 7, 3)
    tensor = Tensor.of(ArrayBlob(array))
    expected = array[key]
    assert np.shape(tensor[key]) == np.shape(expected)
    np.testing.assert_array_equal(tensor[key], expected)


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_parameter_of_a_file_gives_the_blocks_of_numpy(key: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = ckpt.open(ZERO1)
    tensor = run["blocks.0.attention.qkv.weight"].states["master"]  # of two ranks' partitions
    whole = read(tensor)
    try:
        expected = whole[key]
    except IndexError:
        with pytest.raises(IndexError):
            tensor[key]
    else:
        np.testing.assert_array_equal(tensor[key], expected)


@pytest.mark.parametrize("key", WRONG_KEYS, ids=repr)
def test_parameter_refuses_indices_that_are_not_basic(key: Any) -> None:
    tensor = Tensor.of(ArrayBlob(np.zeros((10, 7, 3))))
    with pytest.raises(IndexError):
        tensor[key]


def test_scalars_and_empty_tensors_are_indexed() -> None:
    scalar = Tensor.of(ArrayBlob(np.array(2.5)))
    assert scalar[()] == scalar[...] == 2.5
    with pytest.raises(IndexError):
        scalar[0]
    empty = Tensor.of(ArrayBlob(np.zeros((0, 3))))
    assert empty[:, 1].shape == (0,)
    with pytest.raises(IndexError):
        empty[0]


def test_arrays_have_the_dtype_that_is_asked_for() -> None:
    weight = ckpt.open(ZERO1)["head.weight"]
    assert weight.dtype == ml_dtypes.bfloat16
    assert np.asarray(weight).dtype == ml_dtypes.bfloat16
    assert np.asarray(weight, np.float32).dtype == np.float32
    assert np.zeros_like(weight).shape == weight.shape
    with pytest.raises(ValueError, match="copy"):
        weight.__array__(copy=False)


def test_a_slice_of_a_truncated_file_is_an_error_and_a_replaced_file_is_noticed_at_the_end(tmp_path: Path) -> None:
    ckpt.save(ckpt.open(ZERO1).weights_only(), tmp_path / "a.safetensors", ckpt.Safetensors())
    run, data = ckpt.open(tmp_path / "a.safetensors"), (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "a.safetensors").write_bytes(data)
    assert [finding.kind for finding in ckpt.verify(run)] == ["changed"]
    with pytest.raises(ckpt.CorruptError, match="changed"):
        ckpt.save(run, tmp_path / "b.safetensors", ckpt.Safetensors())
    with pytest.raises(ckpt.CorruptError, match="changed"):
        ckpt.diff(run, ckpt.open(ZERO1).weights_only())
    (tmp_path / "a.safetensors").write_bytes(data[:3000])
    with pytest.raises(ckpt.CorruptError, match="ends at byte"):
        run["head.weight"][...]


# Laziness


def edits_of(run: ckpt.Checkpoint, adapter: Path | None) -> Iterator[tuple[str, Callable[[], ckpt.Checkpoint]]]:
    name = next(name for name, parameter in run.items() if parameter.weight.dtype.kind in "fV")
    other = np.zeros(run[name].shape, np.float32)
    yield "select", lambda: run.select(only=[re.escape(name)])
    if len(run) > 1:
        yield "skip", lambda: run.select(skip=[re.escape(next(reversed(list(run))))])
    yield "weights_only", run.weights_only
    yield "cast", lambda: run.cast("fp16")
    yield "rename", lambda: run.rename(lambda name: f"model.{name}")
    yield "replace", lambda: run.replace({name: other})
    yield "average", lambda: ckpt.average([run, run])
    if adapter is not None:
        tuned = ckpt.open(adapter)
        yield "merge_lora", lambda: ckpt.merge_lora(run, tuned)


@pytest.fixture
def adapter_of(tmp_path: Path) -> Callable[[ckpt.Checkpoint], Path | None]:
    """Writes an adapter for the largest matrix of a checkpoint; None if that is not the weight of a module."""

    def write(run: ckpt.Checkpoint) -> Path | None:
        name, parameter = largest_matrix(run)
        if not name.endswith(".weight"):
            return None
        rows, columns = parameter.shape
        module = name.removesuffix(".weight")
        arrays = {
            f"{module}.lora_A.weight": np.ones((1, columns), np.float32),
            f"{module}.lora_B.weight": np.ones((rows, 1), np.float32),
        }
        write_adapter(tmp_path / "adapter", arrays, lora_alpha=1, r=1)
        return tmp_path / "adapter"

    return write


def largest_matrix(run: ckpt.Checkpoint) -> tuple[str, ckpt.types.Parameter]:
    matrices = {
        name: one
        for name, one in run.items()
        if len(one.shape) == 2 and one.shape[0] > 2 and one.shape[0] != one.shape[1] and one.dtype.name in WEIGHTS
    }
    return max(matrices.items(), key=lambda pair: pair[1].weight.size)


@every_sample
def test_edits_read_nothing_until_a_slice_is_read(
    path: Path, adapter_of: Callable[[ckpt.Checkpoint], Path | None]
) -> None:
    run = ckpt.open(path)
    name, parameter = largest_matrix(run)
    adapter = adapter_of(run)
    for edit, make in edits_of(run, adapter):
        with bytes_read() as total:
            edited = make()
            assert len(edited) > 0
            assert all(one.shape == one.weight.shape for one in edited.values())
            assert total() == 0, edit
            assert edited.history[: len(run.history)] == run.history or edit in ("average", "merge_lora")
            changed = f"model.{name}" if edit == "rename" else name
            if changed in edited:
                row = edited[changed][1:2]
                assert row.shape == (1, parameter.shape[1])
                assert total() <= most_for_a_row(edit, run, parameter)
                # The rows of a log with one parameter are in memory once they were replayed.
                assert total() > 0 or edit == "replace" or (len(run) == 1 and edit != "select")


def most_for_a_row(edit: str, run: ckpt.Checkpoint, parameter: ckpt.types.Parameter) -> int:
    """Bytes that a row of an edited weight may cost: a row of float32, or all chunks that encode it."""
    row, sources = 4 * parameter.shape[1], 2 if edit in ("average", "merge_lora") else 1
    if run.format == "universal" or (run.path / "chain.json").is_file():
        return 2 * sources * parameter.nbytes + 64  # a chunk in a log has a head
    return sources * row + (4 if edit == "merge_lora" else 0)  # of the adapter: all of A, a row of B


def test_a_slice_of_a_large_file_reads_that_slice(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    big = random.normal(size=(4096, 512)).astype(np.float32)
    base = ckpt.open(ZERO1)
    source = base.weights_only().select(only=[r"^head\.weight$"])
    large = _with_array(source, "head.weight", big)
    ckpt.save(large, tmp_path / "big.safetensors", ckpt.Safetensors())
    run = ckpt.open(tmp_path / "big.safetensors")
    row = 512 * 4
    for edited in (run, run.cast("bf16"), run.rename({"head.weight": "x"}), ckpt.average([run, run])):
        (one,) = edited.values()
        with bytes_read() as total:
            block = one[1000:1003]
            assert block.shape == (3, 512)
            assert total() == 3 * row * (2 if edited.history[-1].__class__.__name__ == "Average" else 1)
    with bytes_read() as total:
        column = run["head.weight"][:64, 7]
        np.testing.assert_array_equal(column, big[:64, 7])
        assert total() <= 64 * row


def _with_array(source: ckpt.Checkpoint, name: str, array: np.ndarray) -> ckpt.Checkpoint:
    parameter = replace(source[name], states={"model": Tensor.of(ArrayBlob(array))}, values={})
    return replace(source, parameters={name: parameter}, aliases={})


# Writing


def tree_of(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


PAIRS = {
    "deepspeed to deepspeed": (ZERO1, ckpt.DeepSpeed(dp=3, zero=3), ("--to", "deepspeed", "--dp", "3", "--zero", "3")),
    "deepspeed to dcp": (ZERO1, ckpt.DCP(dp=4), ("--to", "dcp", "--dp", "4")),
    "megatron to megatron": (
        SAMPLES / "megatron-0.16-tp2-pp2-dist",
        ckpt.Megatron(tp=1, pp=1),
        ("--to", "megatron", "--tp", "1", "--pp", "1"),
    ),
    "dcp to torch": (SAMPLES / "dcp-2.13-fsdp2-w2", ckpt.Torch(), ("--to", "torch")),
    "dcp to universal": (SAMPLES / "dcp-2.13-fsdp2-w2", ckpt.Universal(), ("--to", "universal")),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_save_writes_the_bytes_of_the_command(pair: str, tmp_path: Path) -> None:
    source, format, options = PAIRS[pair]
    result = ckpt.save(ckpt.open(source), tmp_path / "library", format)
    assert command("convert", source, tmp_path / "command", *options).code == 0
    assert tree_of(tmp_path / "library") == tree_of(tmp_path / "command")
    assert result.target == tmp_path / "library"
    assert result.files > 0


SMALL_PACKS = ckpt.Universal(pack_nbytes=1)
"""So that a checkpoint has many files, and some are complete when a job ends early."""


def interrupted(source: ckpt.Checkpoint, target: Path) -> None:
    """A job that its progress stops after more than half."""

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckpt.save(source, target, SMALL_PACKS, resources=ckpt.Resources(workers=1), progress=stop)
    assert not target.exists()


def test_an_equal_job_goes_on_where_an_interrupted_one_was(tmp_path: Path) -> None:
    interrupted(ckpt.open(ZERO1).cast("fp32"), tmp_path / "out")
    result = ckpt.save(ckpt.open(ZERO1).cast("fp32"), tmp_path / "out", SMALL_PACKS)
    assert 0 < result.resumed < result.files
    ckpt.save(ckpt.open(ZERO1).cast("fp32"), tmp_path / "at once", SMALL_PACKS)
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "at once")


OTHERS: dict[str, Callable[[ckpt.Checkpoint], ckpt.Checkpoint]] = {
    "cast": lambda run: run.cast("fp16"),
    "select": lambda run: run.select(skip=[r"\.bias$"]),
    "rename": lambda run: run.rename(lambda name: name.replace("head", "lm_head")),
    "replace": lambda run: run.replace({"head.weight": np.ones(run["head.weight"].shape, np.float32)}),
    "weights only": lambda run: run.weights_only(),
    "average": lambda run: ckpt.average([run]),
}


@pytest.mark.parametrize("edit", OTHERS)
def test_a_job_with_another_edit_begins_anew(edit: str, tmp_path: Path) -> None:
    run = ckpt.open(ZERO1)
    assert (
        ckpt.Job(run, tmp_path / "out", SMALL_PACKS).id != ckpt.Job(OTHERS[edit](run), tmp_path / "out", SMALL_PACKS).id
    )
    interrupted(run, tmp_path / "out")
    result = ckpt.save(OTHERS[edit](run), tmp_path / "out", SMALL_PACKS)
    assert result.resumed == 0
    ckpt.save(OTHERS[edit](ckpt.open(ZERO1)), tmp_path / "at once", SMALL_PACKS)
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "at once")


@pytest.mark.parametrize("edit", OTHERS)
def test_the_same_edit_twice_is_the_same_job(edit: str, tmp_path: Path) -> None:
    jobs = [ckpt.Job(OTHERS[edit](ckpt.open(ZERO1)), tmp_path / "out", SMALL_PACKS) for _ in range(2)]
    assert jobs[0].id == jobs[1].id


def test_jobs_with_other_values_or_options_differ(tmp_path: Path) -> None:
    run, target = ckpt.open(ZERO1), tmp_path / "out"
    ones = np.ones(run["head.weight"].shape, np.float32)
    sources = [run, run.replace({"head.weight": ones}), run.replace({"head.weight": 2 * ones})]
    formats = [SMALL_PACKS, ckpt.Universal(codec="auto"), ckpt.DeepSpeed(), ckpt.DeepSpeed(dp=4), ckpt.DCP()]
    ids = {ckpt.Job(source, target, format).id for source in sources for format in formats}
    assert len(ids) == len(sources) * len(formats)


def test_progress_counts_up_to_the_whole(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    result = ckpt.save(ckpt.open(ZERO1), tmp_path / "out", SMALL_PACKS, progress=lambda *counted: calls.append(counted))
    done, totals = zip(*calls, strict=True)
    assert list(done) == sorted(done)
    assert len(set(totals)) == 1
    assert done[-1] == totals[0] == ckpt.Job(ckpt.open(ZERO1), tmp_path / "other", SMALL_PACKS).plan().nbytes
    assert result.nbytes > 0


def test_an_error_of_the_users_progress_is_the_users(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ckpt.save(ckpt.open(ZERO1), tmp_path / "out", SMALL_PACKS, progress=fail)
    assert not (tmp_path / "out").exists()
    assert ckpt.save(ckpt.open(ZERO1), tmp_path / "out", SMALL_PACKS).files > 0


def test_library_installs_no_handlers_in_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python allows handlers in the main thread only; what a server installed there must stay."""
    installed: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: installed.append(arguments))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            run = ckpt.open(ZERO1)
            ckpt.save(run, tmp_path / "out", ckpt.Universal(codec="auto"))
            assert ckpt.verify(run) == []
            assert ckpt.diff(run, ckpt.open(tmp_path / "out")).same
            ckpt.Chain(tmp_path / "run.chain").append(run)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert installed == []
    ckpt.save(ckpt.open(ZERO1), tmp_path / "main", SMALL_PACKS)
    assert installed  # it would have been seen


def test_library_restores_handlers_in_the_main_thread(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ckpt.save(ckpt.open(ZERO1), tmp_path / "out", SMALL_PACKS)
    interrupted(ckpt.open(ZERO1), tmp_path / "other")
    assert {number: signal.getsignal(number) for number in before} == before


def test_an_interrupt_by_signal_leaves_no_target(tmp_path: Path) -> None:
    sent = threading.Event()

    def once(done: int, total: int) -> None:
        if done > total // 2 and not sent.is_set():
            sent.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        ckpt.save(ckpt.open(ZERO1), tmp_path / "out", SMALL_PACKS, resources=ckpt.Resources(workers=1), progress=once)
    assert not (tmp_path / "out").exists()
    assert ckpt.save(ckpt.open(ZERO1), tmp_path / "out", SMALL_PACKS).resumed > 0


def test_library_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ckpt.open(ZERO1)
    ckpt.save(run, tmp_path / "out", ckpt.Torch())
    ckpt.verify(run)
    with pytest.raises(ckpt.errors.OutputError):
        ckpt.save(run, tmp_path / "out", ckpt.Torch())
    with pytest.raises(ckpt.NotFoundError):
        ckpt.open(tmp_path / "nothing")
    assert tuple(capfd.readouterr()) == ("", "")


def test_environment_is_read_by_stores_and_kernels_only() -> None:
    """The page says so. The recorder gives its own to the process that it starts."""
    readers = set()
    for path in [*(ROOT / "formats").rglob("*.py"), *(ROOT / "codecs").rglob("*.py")]:
        if path.name == "__main__.py":
            continue  # a program
        text = path.read_text("utf-8")
        if re.search(r"environ|getenv|\bprint\(|sys\.exit", text):
            nodes = list(ast.walk(ast.parse(text)))
            names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            names |= {node.id for node in nodes if isinstance(node, ast.Name)}
            assert not {"print"} & names, path
            assert not ("exit" in names and "sys" in names), path
            if {"environ", "environb", "getenv"} & names:
                readers.add(path.relative_to(ROOT).as_posix())
    parts = (
        "formats/ckpt_formats/stores/",
        "codecs/ckpt_codecs/native/library.py",
        "formats/ckpt_training/writing/link.py",
    )
    assert {path for path in readers if not path.startswith(parts)} == set()
    assert any(path.startswith(parts[0]) for path in readers)


def test_kernels_of_a_level_that_this_machine_lacks_are_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "level", library.level.__wrapped__)  # not the one that is bound already
    load_kernels()
    monkeypatch.setenv("CKPT_CPU_LEVEL", "99")
    with pytest.raises(library.LibraryError, match="CKPT_CPU_LEVEL=99"):
        load_kernels()


@pytest.mark.parametrize("codec", [None, "planes"])
def test_kernels_are_asked_for_where_the_source_is_compressed(codec: str | None, tmp_path: Path) -> None:
    w = held_parameter("w", {"model": np.arange(4096, dtype=np.float32)})
    save(checkpoint([w]), tmp_path / "source", registry.writable("universal", codec=codec), resources=Execution(1))
    job = Job(ckpt.open(tmp_path / "source"), tmp_path / "target", registry.writable("dcp"))
    assert job.needs_kernels == (codec is not None)
