"""One flipped bit, anywhere in a checkpoint: the conversion refuses, or its result is what it would have been."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from damage import SOURCES, Ran, ckpt, make_sources
from effort import TIMES

SEALED = ("zero1", "zero3", "pipeline", "universal", "model.pt")
"""Sources whose files hold checksums: safetensors and the legacy files of torch have none."""

REFUSED = {10, 20, 21, 22, 23}
TRIALS = 12 * TIMES


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    make_sources(folder)
    return folder


class Flipper:
    """Flips one bit of a copy of a checkpoint, and flips it back."""

    def __init__(self, source: Path, copy: Path) -> None:
        self.copy = copy
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            shutil.copyfile(source, copy)
        self.files = sorted(path for path in (copy, *copy.rglob("*")) if path.is_file())

    def flip(self, rng: random.Random) -> tuple[Path, int, int]:
        file = rng.choice(self.files)
        where = file, rng.randrange(file.stat().st_size), 1 << rng.randrange(8)
        self.toggle(*where)
        return where

    def toggle(self, file: Path, at: int, bit: int) -> None:
        with file.open("r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ bit]))


def converted(source: Path, target: Path) -> tuple[Ran, str | None]:
    """What the command did, and the content id of what it made."""
    shutil.rmtree(target, ignore_errors=True)
    done = ckpt("convert", source, target, "--json")
    if done.code:
        assert not target.exists()
        return done, None
    return done, json.loads((target / "manifest.json").read_bytes())["content"]


def assert_typed(done: Ran) -> None:
    assert done.code in REFUSED | {0}, done.err
    assert "Traceback" not in done.err
    assert "fault of ckpt" not in done.err
    assert done.code == 0 or done.err.count("error: ") + done.out.count("DAMAGED: ") == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name", [name if name in ("zero1", "universal") else pytest.param(name, marks=pytest.mark.slow) for name in SEALED]
)
def test_a_flipped_bit_is_refused_or_harmless(name: str, sources: Path, tmp_path: Path) -> None:
    rng, flipper, target = random.Random(name), Flipper(sources / name, tmp_path / name), tmp_path / "out"
    _, good = converted(flipper.copy, target)
    assert good is not None
    codes: Counter[int] = Counter()
    for _ in range(TRIALS):
        file, at, bit = flipper.flip(rng)
        done, content = converted(flipper.copy, target)
        flipper.toggle(file, at, bit)
        codes[done.code] += 1
        assert_typed(done)
        assert content in (None, good), f"a wrong result: bit {bit} of byte {at} of {file}"
    assert codes[20] > TRIALS // 4


@pytest.mark.parametrize("name", SEALED)
@pytest.mark.slow
def test_verify_finds_what_convert_refuses(name: str, sources: Path, tmp_path: Path) -> None:
    rng, flipper = random.Random(name), Flipper(sources / name, tmp_path / name)
    for _ in range(TRIALS):
        file, at, bit = flipper.flip(rng)
        verified = ckpt("verify", flipper.copy)
        done, content = converted(flipper.copy, tmp_path / "out")
        flipper.toggle(file, at, bit)
        assert_typed(verified)
        assert done.code == 0 or verified.code == done.code, f"convert {done.err}, but verify {verified.err}"
        assert content is None or verified.code in (0, 20)


@pytest.mark.parametrize("name", sorted(set(SOURCES) - set(SEALED)))
@pytest.mark.slow
def test_flipped_bit_ends_in_no_untyped_error_without_checksums(name: str, sources: Path, tmp_path: Path) -> None:
    rng, flipper = random.Random(name), Flipper(sources / name, tmp_path / name)
    codes: Counter[int] = Counter()
    for _ in range(TRIALS):
        file, at, bit = flipper.flip(rng)
        if rng.random() < 0.5 and file.suffix == ".safetensors":
            flipper.toggle(file, at, bit)
            at, bit = rng.randrange(400), bit
            flipper.toggle(file, at, bit)
        done, _ = converted(flipper.copy, tmp_path / "out")
        flipper.toggle(file, at, bit)
        codes[done.code] += 1
        assert_typed(done)
    assert codes[0]
    assert codes[20]


PACKS = ("--pack-size", 1)
"""A pack for each parameter, so that there are files to go on with."""


@pytest.mark.parametrize("name", ["zero3", "universal", "model.pt"])
@pytest.mark.slow
def test_a_flipped_bit_of_the_journal_is_harmless(name: str, sources: Path, tmp_path: Path) -> None:
    """What an interrupted run left behind is no more to be believed than a source."""
    rng, target = random.Random(name), tmp_path / "out"
    assert ckpt("convert", sources / name, target, *PACKS).code == 0
    whole = {path.relative_to(target): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    stage = tmp_path / ".out.ckpt-partial"
    kept = tmp_path / "kept"
    _interrupted(sources / name, target, kept)
    resumed = 0
    for _ in range(TRIALS):
        shutil.copytree(kept, stage)
        written = sorted(path for path in (stage / "data").rglob("*") if path.is_file())
        file = rng.choice([rng.choice(sorted((stage / "journal").iterdir())), rng.choice(written)])
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        shutil.rmtree(target, ignore_errors=True)
        done = ckpt("convert", sources / name, target, "--json", *PACKS)
        assert done.code == 0, done.err
        resumed += json.loads(done.out)["resumed_files"] > 0
        files = {path.relative_to(target): path.read_bytes() for path in target.rglob("*") if path.is_file()}
        assert files == whole
        assert not stage.exists()
    assert resumed > TRIALS // 4


def _interrupted(source: Path, target: Path, kept: Path) -> None:
    """Leave in `kept` what a run that was killed before its last step would: every part, and the whole journal."""
    from ckpt.pipeline.folder_target import FolderTarget

    def killed(self: FolderTarget, receipts: object, commit: Callable[[Path], None]) -> None:
        self.flush()
        shutil.copytree(self.folder, kept)
        raise KeyboardInterrupt

    shutil.rmtree(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderTarget, "publish", killed)
        assert ckpt("convert", source, target, *PACKS).code == 130
    shutil.rmtree(target.parent / f".{target.name}.ckpt-partial")
    manifest = kept / "data" / "manifest.json"
    manifest.unlink(missing_ok=True)
