"""What every format keeps, stated once: each law is tried with a small checkpoint of each format of the registry."""

import io
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.findings import find_problems
from ckpt.job import Job, save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, InvalidArgumentError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import WritableFormat
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.registry import FORMATS, ONLY_READ, format_named, writable
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from effort import TIMES
from format_sources import MAKE, SAMPLES
from held import contents, flip, plain

EACH = pytest.mark.parametrize("name", FORMATS)
WRITABLE = [name for name in FORMATS if name not in ONLY_READ]
EACH_WRITABLE = pytest.mark.parametrize("name", WRITABLE)
UNSEALED = ("safetensors", "flax", "gguf", "hf", "torchtune", "orbax")
"""Formats of files without checksums: a flipped bit may become another value."""
EFFORT = Execution(1, 1 << 20)
Content = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The good checkpoint of a format, made once."""
    folder, checkpoints = tmp_path_factory.mktemp("whole"), dict[str, Path]()

    def of(name: str) -> Path:
        if name not in checkpoints:
            checkpoints[name] = MAKE[name](folder / name)
        return checkpoints[name]

    return of


@pytest.fixture(scope="module")
def good_values(whole: Callable[[str], Path]) -> Callable[[str], Content]:
    """The values of the good checkpoint of a format, read once."""
    return cache(lambda name: values_of(open_checkpoint(whole(name))))


@pytest.fixture
def copied(whole: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of it, to be damaged."""

    def of(name: str) -> Path:
        source, target = whole(name), tmp_path / whole(name).name
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
        return target

    return of


def values_of(checkpoint: Checkpoint) -> Content:
    """Every bit of its parameters; not of extras, where what has lost its parameter is carried."""
    extras = {name for name, one in checkpoint.parameters.items() if one.role == "extra"}
    return {key: values for key, values in contents(checkpoint).items() if key[0] not in extras}


def accepted(path: Path) -> tuple[Checkpoint, Content] | None:
    """The checkpoint and all its values, if it opens and `verify` finds nothing; None if a `CkptError` refuses it."""
    try:
        checkpoint = open_checkpoint(path)
        return None if find_problems(checkpoint, EFFORT) else (checkpoint, values_of(checkpoint))
    except CkptError:
        return None


def outcome(path: Path) -> Content | None:
    """All values of a checkpoint that is accepted."""
    return result[1] if (result := accepted(path)) is not None else None


def files_of(path: Path) -> list[Path]:
    """Its files, at most five of them, evenly spread."""
    every = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    return every[:: -(-len(every) // 5)]


def test_contract_covers_every_format() -> None:
    assert list(MAKE) == list(FORMATS)


# --- detecting and reading


def odd_paths(folder: Path) -> Iterator[Path]:
    """Paths that are no checkpoints."""
    for number, content in enumerate((b"", b"hello\n", bytes(5000), b"[]", b"PK\3\4")):
        for ending in ("", ".pt", ".safetensors", ".msgpack", ".npz", ".tar", ".zip"):
            path = folder / f"{number}{ending}"
            path.write_bytes(content)
            yield path
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "nowhere").symlink_to("gone")
    yield from (folder / "folder", folder / "loop", folder / "nowhere", folder / "absent" / "too")


@EACH
def test_format_detects_its_checkpoint_and_never_raises(
    name: str, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    assert detect(whole(name)).name == name
    assert format_named(name).detect(whole(name))
    for path in (*map(whole, FORMATS), *odd_paths(tmp_path)):
        assert format_named(name).detect(path) in (True, False)


@EACH
def test_format_reads_the_same_from_an_index_that_was_pickled(name: str, whole: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(whole(name))
    again: Checkpoint = pickle.loads(pickle.dumps(checkpoint))
    assert contents(again) == contents(checkpoint)
    assert contents(checkpoint)
    assert not find_problems(checkpoint, EFFORT)


# --- damage


def instead(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_instead(to: str) -> Callable[[Path], object]:
    def harm(path: Path) -> None:
        path.unlink()
        path.symlink_to(to or path.name)

    return harm


HARMS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": instead(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": instead(b"version https://git-lfs.github.com/spec/v1\n"),
    "json": instead(b'{"a": [1, 2]}'),
    "another archive": instead(b"PK\5\6" + bytes(18)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0more"),
    "a folder": folder_instead,
    "a link to itself": link_instead(""),
    "a link to nowhere": link_instead("not-there"),
}


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS)
@EACH
def test_format_refuses_a_damaged_file_or_reads_no_other_value(
    name: str, harm: str, good_values: Callable[[str], Content], copied: Callable[[str], Path]
) -> None:
    """What comes of a checkpoint one of whose files is damaged is a part of what was there, or a `CkptError`.

    Of more than three files, each is removed, and every other one is damaged in each further way: in campaigns all.
    """
    good, path, refused = good_values(name), copied(name), 0
    files = files_of(path)
    are_all = len(files) < 4 or harm == "missing" or TIMES > 1
    for file in files if are_all else files[[*HARMS].index(harm) % 2 :: 2]:
        data = file.read_bytes()
        HARMS[harm](file)
        result = outcome(path)
        refused += result is None
        assert result is None or result.items() <= good.items(), file
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
        file.write_bytes(data)
    assert refused or harm == "longer"
    assert outcome(path) == good


@pytest.mark.slow
@EACH
def test_format_refuses_a_file_that_is_cut(
    name: str, good_values: Callable[[str], Content], copied: Callable[[str], Path]
) -> None:
    """A small file at every byte, a large one at its beginning, its end and in between: in campaigns at more places."""
    good, path, refused = good_values(name), copied(name), 0
    for file in files_of(path):
        data = file.read_bytes()
        first, between = ((0, 6, 30), 8) if TIMES == 1 else (range(0, 60, 6), 12)
        places = {*first, *range(0, len(data), len(data) // between + 1), len(data) - 9, len(data) - 1}
        for at in range(len(data)) if len(data) < 700 and path.is_file() else sorted(places):
            file.write_bytes(data[: max(at, 0)])
            result = outcome(path)
            refused += result is None
            assert result is None or result.items() <= good.items(), (file, at)
        file.write_bytes(data)
    assert refused


@pytest.mark.slow
@EACH
def test_format_finds_a_flipped_bit(
    name: str, good_values: Callable[[str], Content], copied: Callable[[str], Path]
) -> None:
    good, path, rng = good_values(name), copied(name), random.Random(name)
    whole = open_checkpoint(path)
    extras, groups = plain(whole.extras), whole.groups
    files, refused = sorted(one for one in path.rglob("*") if one.is_file()) or [path], 0
    for _ in range(40 * TIMES):
        file = rng.choice(files)
        at, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        flip(file, at, bit)
        result = accepted(path)
        if result is not None and name not in UNSEALED:
            checkpoint, values = result
            assert values == good, (file, at, bit)
            assert plain(checkpoint.extras) == extras, (file, at, bit)
            assert checkpoint.groups == groups, (file, at, bit)
        refused += result is None
        flip(file, at, bit)
    assert refused or name in UNSEALED


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["dcp-2.13-fsdp2-w2", "megatron-*-dist", "megatron-*-legacy"])
def test_files_of_engines_that_are_lost_cut_or_flipped_are_refused(sample: str, tmp_path: Path) -> None:
    """The laws above are tried with small checkpoints of one writer; several ranks of the real engines wrote these.

    Each file is removed, and cut in its middle and before its last byte; then bits are flipped, in all files alike.
    """
    (source,) = SAMPLES.glob(sample)
    path = Path(shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("truth.safetensors")))
    whole, good = accepted(path) or pytest.fail("the sample is refused")
    extras, groups = plain(whole.extras), whole.groups
    files, rng = sorted(one for one in path.rglob("*") if one.is_file()), random.Random(sample)
    for file in files:
        data = file.read_bytes()
        file.unlink()
        assert (outcome(path) is None) == (file.name != MARK), file
        for end in (len(data) // 2, len(data) - 1):
            file.write_bytes(data[:end])
            assert outcome(path) is None, (file, end)
        file.write_bytes(data)
    refused = 0
    for number in range(20 * TIMES):
        file = files[number % len(files)]
        at, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        flip(file, at, bit)
        if (result := accepted(path)) is None:
            refused += 1
        else:  # a bit of what nothing reads, such as the date of a member of an archive
            checkpoint, values = result
            assert (values == good, plain(checkpoint.extras) == extras) == (True, True), (file, at, bit)
            assert checkpoint.groups == groups, (file, at, bit)
        flip(file, at, bit)
    assert refused > 10 * TIMES
    assert outcome(path) == good


MARK = "latest_checkpointed_iteration.txt"
"""Of Megatron: without it, the only iteration that is there is read."""


class Attack:
    """Pickles into a call of `os.mkdir`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@EACH
def test_format_runs_no_code_of_a_pickle(name: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    path, unsafe = copied(name), list[tuple[str, str]]()
    for file in files_of(path):
        data = file.read_bytes()
        if data[:4] == b"PK\3\4" or data[:1] == b"\x80":
            for torchs in (True, False):
                attack, stream = {"w": Attack(tmp_path / "ran")}, io.BytesIO()
                torch.save(attack, stream) if torchs else pickle.dump(attack, stream, 2)
                file.write_bytes(stream.getvalue())
                try:
                    find_problems(open_checkpoint(path), EFFORT)
                except UnsafeError as error:
                    unsafe.append((file.name, str(error)))
                except CkptError:
                    pass
        file.write_bytes(data)
    assert unsafe or name in PICKLE_FREE
    assert all(file in error for file, error in unsafe)
    assert not (tmp_path / "ran").exists()


PICKLE_FREE = ("universal", "chain", "safetensors", "flax", "gguf", "numpy", "tar", "orbax")
"""Formats without pickles of their own."""


# --- writing


def source_of(name: str, whole: Callable[[str], Path]) -> Checkpoint:
    """A checkpoint that the format can hold."""
    return open_checkpoint(whole(name if name.startswith(("megatron", "hf", "gguf")) else "deepspeed"))


def target_of(name: str, folder: Path) -> Path:
    endings = {"safetensors": ".safetensors", "torch": ".pt", "flax": ".msgpack", "gguf": ".gguf"}
    return folder / f"out{endings.get(name, '')}"


def files_in(path: Path) -> dict[str, bytes]:
    every = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return {one.relative_to(path.parent).as_posix(): one.read_bytes() for one in every}


@pytest.mark.slow
@EACH_WRITABLE
def test_format_is_read_back_as_it_was_written(name: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    """Its values are those of the source; written again, the bytes are the same."""
    source = source_of(name, whole)
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        save(source, target_of(name, folder), writable(name), resources=EFFORT)
    target = target_of(name, tmp_path / "a")
    assert detect(target).name == name
    assert files_in(target) == files_in(target_of(name, tmp_path / "b"))
    written, good = outcome(target), contents(source)
    assert written
    names = {(parameter, values) for (parameter, _), values in good.items()}
    assert all((parameter, values) in names for (parameter, _), values in written.items())


@EACH_WRITABLE
def test_format_plans_without_side_effects(name: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    job = Job(source_of(name, whole), target_of(name, tmp_path), writable(name))
    plans = [[(one.file, one.role, dict(one.rank), one.nbytes) for one in job.plan().files] for _ in range(2)]
    assert plans[0] == plans[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@EACH_WRITABLE
def test_format_writes_the_same_files_by_a_plan_that_was_pickled(
    name: str, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    source = source_of(name, whole)
    target = target_of(name, tmp_path)
    format = writable(name).for_target(target)
    plan = Job(source, target, format).plan()
    written = []
    for number, files in enumerate((plan.files, pickle.loads(pickle.dumps(plan.files)))):
        folder = tmp_path / str(number)
        with Reader() as reader, Transfer(reader) as transfer:
            for file in reversed(files):
                (folder / file.file).parent.mkdir(parents=True, exist_ok=True)
                receipt = format.write(folder, file, transfer)
                assert format.is_intact(folder, receipt, reader)
        written.append({path.partition("/")[2]: data for path, data in files_in(folder).items()})
    assert written[0] == written[1]


@EACH_WRITABLE
def test_format_refuses_unknown_options_by_name(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"format {name} has no option no_option"):
        writable(name, no_option=1)
    assert isinstance(format_named(name), WritableFormat)
    assert writable(name) == writable(name)
    assert isinstance(writable(name).identity(), dict)


@pytest.mark.parametrize("name", ONLY_READ)
def test_format_that_is_only_read_says_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} can be read, not written"):
        writable(name)
    with pytest.raises(CkptError):
        ckpt.open(tmp_path / "absent")
