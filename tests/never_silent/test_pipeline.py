"""What happens to a run while it runs: files that change, vanish or are replaced, crashes, locks, limits."""

import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.compare import checkpoints as differences
from ckpt.pipeline import job_id
from ckpt.pipeline import target as life
from ckpt.rename import UseNames, use_names
from ckpt_cli.views import verify as verification
from ckpt_codecs.registry import parse_delta
from ckpt_formats.core import locking
from ckpt_formats.core import publish as publishing
from ckpt_formats.core.checkpoint import Checkpoint, Edit, Origin
from ckpt_formats.core.edits import Cast, Rename, Replace, Select, WeightsOnly
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.identity import Identity
from ckpt_formats.core.layout import Rule
from ckpt_formats.registry import FORMATS, ONLY_READ, writable
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from ckpt_formats.universal.delta_format import Delta
from ckpt_formats.universal.manifest import Parent
from ckpt_formats.universal.unchanged import EarlierMember
from damage import Ran, ckpt

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"
Fault = Callable[[], object]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Fault], None]:
    """Puts a fault at a named point of a run: it happens once, when the point is reached first."""

    def put(point: str, fault: Fault) -> None:
        waiting = [fault]

        def reached(now: str) -> None:
            if now == point and waiting:
                waiting.pop()()

        monkeypatch.setattr(life, "reached", reached)

    return put


def save(path: Path, seed: int = 0, step: int = 7) -> Path:
    """A small training state, as `torch.save` writes it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 40)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
    return path


def write_again(path: Path) -> None:
    """Other bytes in the same file, of the same length, at another time."""
    before = path.stat()
    with path.open("r+b") as file:
        data = file.read()
        file.seek(0)
        file.write(data[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns - 10**9))  # also where the clock goes backwards


def replace_file(path: Path) -> None:
    """Another file of the same name."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    os.replace(other, path)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def repoint(path: Path) -> None:
    """A link leads to another file of the same bytes."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    path.unlink()
    path.symlink_to(other)


CHANGES = {"written again": write_again, "replaced": replace_file, "cut short": cut_short, "a link": repoint}


def only_left(folder: Path, *names: str) -> bool:
    return {path.name for path in folder.iterdir()} <= {*names, "other"}


@pytest.mark.parametrize("point", ["written", "settled", "committed"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_while_it_is_read_is_named_and_nothing_is_published(
    change: str, point: str, at: Callable[[str, Fault], None], tmp_path: Path
) -> None:
    source, target = save(tmp_path / "a.pt"), tmp_path / "out"
    at(point, lambda: CHANGES[change](source))
    done = ckpt("convert", source, target, "--workers", 1)
    assert done.code == 20
    assert "a.pt" in done.err
    assert "changed or replaced while it was read" in done.err
    assert only_left(tmp_path, "a.pt")


@pytest.mark.parametrize("command", [("compress",), ("convert", "--to", "dcp"), ("convert", "--to", "torch")])
@pytest.mark.parametrize("point", ["written", "committed"])
def test_a_source_that_vanishes_while_it_is_read_is_named(
    command: tuple[str, ...], point: str, at: Callable[[str, Fault], None], tmp_path: Path
) -> None:
    source = save(tmp_path / "a.pt")
    at(point, source.unlink)
    done = ckpt(command[0], source, tmp_path / "out", *command[1:], "--workers", 1)
    assert done.code == 20
    assert "a.pt" in done.err
    assert "was removed while it was read" in done.err
    assert only_left(tmp_path)


def chain_of(folder: Path, *steps: int) -> Path:
    run = folder / "run.chain"
    for step in steps:
        assert ckpt("append", run, save(folder / f"{step}.pt", step, step)).code == 0
    return run


@pytest.mark.parametrize("which", ["source", "parent"])
def test_a_chain_gets_no_member_whose_source_or_parent_changed(
    which: str, at: Callable[[str, Fault], None], tmp_path: Path
) -> None:
    run, source = chain_of(tmp_path, 1), save(tmp_path / "2.pt", 2, 2)
    parent = next(run.glob("step-*/packs/*"))
    at("committed", lambda: replace_file(source if which == "source" else parent))
    done = ckpt("append", run, source)
    assert done.code == 20
    assert (source if which == "source" else parent).name in done.err
    assert [step["step"] for step in json.loads(ckpt("log", run, "--json").out)["steps"]] == [1]


def test_a_restored_state_of_a_member_that_changed_is_not_published(
    at: Callable[[str, Fault], None], tmp_path: Path
) -> None:
    run = chain_of(tmp_path, 1, 2)
    at("committed", lambda: replace_file(next(run.glob("step-*2/packs/*"))))
    done = ckpt("restore", run, tmp_path / "out", "--step", 2)
    assert done.code == 20
    assert "changed or replaced" in done.err
    assert not (tmp_path / "out").exists()


def test_a_chain_that_grows_and_a_run_that_goes_on_do_not_disturb_who_reads_them(
    at: Callable[[str, Fault], None], tmp_path: Path
) -> None:
    run, more = chain_of(tmp_path, 1, 2), save(tmp_path / "3.pt", 3, 3)
    at("journalled", lambda: ckpt("append", run, more))
    assert ckpt("restore", run, tmp_path / "out", "--step", 1).code == 0
    assert len(json.loads(ckpt("log", run, "--json").out)["steps"]) == 3
    folder = shutil.copytree(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", tmp_path / "run")
    at("journalled", lambda: (folder / "latest").write_text("global_step999"))
    assert ckpt("convert", folder, tmp_path / "ds").code == 0
    assert (folder / "latest").read_text() == "global_step999"


@pytest.mark.parametrize("command", ["verify", "diff"])
def test_a_file_that_changes_while_it_is_checked_is_named(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, other = save(tmp_path / "a.pt"), save(tmp_path / "b.pt")
    place: Any = verification if command == "verify" else differences
    name = "find_problems" if command == "verify" else "compare_each"
    before = getattr(place, name)

    def changing(*arguments: Any, **options: Any) -> Any:
        result = before(*arguments, **options)
        replace_file(source)
        return result

    monkeypatch.setattr(place, name, changing)
    done = ckpt(command, source, *([other] if command == "diff" else []))
    assert done.code == 20
    assert "a.pt" in done.out + done.err
    assert "changed or replaced" in done.out + done.err


def test_a_file_that_is_opened_again_must_be_the_one_that_was_opened_first(tmp_path: Path) -> None:
    from ckpt_formats.core.errors import CorruptError
    from ckpt_formats.core.files import Reader

    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.write_bytes(bytes(64))
    identities = {path: Identity.of(path.stat()) for path in (one, two)}
    with Reader(check=False, max_files=1, identities=identities) as reader:
        reader.read_into(one, 0, memoryview(bytearray(8)))
        reader.read_into(two, 0, memoryview(bytearray(8)))
        replace_file(one)
        with pytest.raises(CorruptError, match="replaced"):
            reader.read_into(one, 8, memoryview(bytearray(8)))


# Publishing


def put(path: Path, folder: bool) -> None:
    if folder:
        path.mkdir()
    else:
        path.write_text("somebody else's")


@pytest.mark.parametrize("able", [True, False], ids=["renameat2", "without"])
@pytest.mark.parametrize(("form", "folder"), [("universal", True), ("universal", False), ("safetensors", False)])
def test_a_target_that_appears_at_the_last_moment_is_not_replaced(
    form: str,
    folder: bool,
    able: bool,
    at: Callable[[str, Fault], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if not able:
        monkeypatch.setattr(publishing, "renameat2", lambda source, target: errno.EINVAL)
    source, target = save(tmp_path / "a.pt"), tmp_path / ("out.safetensors" if form == "safetensors" else "out")
    at("before rename", lambda: put(target, folder))
    done = ckpt("convert", source, target, "--to", form)
    assert done.code == 30
    assert "exists already" in done.err
    assert list(target.iterdir()) == [] if folder else target.read_text() == "somebody else's"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL])
@pytest.mark.parametrize("form", ["universal", "safetensors"])
def test_a_kernel_without_the_call_publishes_all_the_same(
    form: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(publishing, "renameat2", lambda source, target: code)
    assert ckpt("convert", save(tmp_path / "a.pt"), tmp_path / "out", "--to", form).code == 0
    assert only_left(tmp_path, "a.pt", "out")


# Crashes

KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from ckpt.pipeline import target as life
from ckpt_cli.main import run
left = [{nth}]
def reached(point):
    if point == {point!r}:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
life.reached = reached
sys.argv = ["ckpt", *{arguments!r}]
run()
"""


def killed(point: str, *arguments: object, nth: int = 1) -> None:
    """Run the command in a process of its own, which is killed when the point is reached so many times."""
    code = KILLED.format(paths=[p for p in sys.path if p], point=point, nth=nth, arguments=[*map(str, arguments)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr


NTH = {"written": 2, "journalled": 2}


@pytest.mark.quick(2)
@pytest.mark.parametrize("point", ["written", "journalled", "settled", "committed", "before rename"])
def test_killed_command_continues_and_gives_the_same(point: str, tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt")
    small = ("--pack-size", 1)
    assert ckpt("convert", source, tmp_path / "good", *small).code == 0
    nth = 2 if point in ("written", "journalled") else 1
    killed(point, "convert", source, tmp_path / "out", "--workers", 1, *small, nth=nth)
    assert not (tmp_path / "out").exists()
    done = ckpt("convert", source, tmp_path / "out", "--json", *small)
    assert done.code == 0
    assert json.loads(done.out)["resumed_files"] >= (0 if point == "written" else 2)
    assert ckpt("diff", tmp_path / "good", tmp_path / "out").code == 0
    assert only_left(tmp_path, "a.pt", "good", "out")


def test_a_source_that_changed_between_two_runs_is_read_anew(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt")
    killed("settled", "convert", source, tmp_path / "out", "--workers", 1)
    replace_file(source)
    done = ckpt("convert", source, tmp_path / "out", "--json")
    assert done.code == 0
    assert json.loads(done.out)["resumed_files"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("then", ["the same command", "another command there"])
def test_a_copy_that_a_killed_restore_left_behind_is_removed(then: str, tmp_path: Path) -> None:
    run = tmp_path / "run.chain"
    for step in (1, 2):
        values = torch.arange(300_000, dtype=torch.float32) * (1 + 2**-20 * step)
        torch.save({"model": {"w": values}, "step": step}, tmp_path / f"{step}.pt")
        assert ckpt("append", run, tmp_path / f"{step}.pt").code == 0
    for _ in range(2):  # when the replayed copy is published beside the target, and when the target is
        assert not (tmp_path / "out").exists()
        killed("renamed", "restore", run, tmp_path / "out", "--to", "dcp")
    assert (tmp_path / "out").exists()
    left = tmp_path / ".out.ckpt-partial"
    assert left.exists()
    if then == "the same command":
        done = ckpt("restore", run, tmp_path / "out", "--to", "dcp")
        assert (done.code, "exists already" in done.err) == (30, True)
    else:
        assert ckpt("convert", tmp_path / "1.pt", tmp_path / "more").code == 0
    assert not left.exists()
    assert ckpt("verify", tmp_path / "out").code == 0


def test_clean_leaves_what_another_process_is_writing(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt")
    folder = tmp_path / ".other.ckpt-partial"
    folder.mkdir()
    (folder / "published").touch()
    (tmp_path / "other").mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ckpt("convert", source, tmp_path / "out").code == 0
    assert folder.exists()
    assert ckpt("convert", source, tmp_path / "more").code == 0
    assert not folder.exists()


# Locks


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("command", ["convert", "diff"])
def test_a_file_system_that_cannot_lock_is_named_as_what_it_is(
    command: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(locking.fcntl, "flock", flock)
    source, target = save(tmp_path / "a.pt"), tmp_path / "out"
    arguments = ["append", target, source] if command == "diff" else ["convert", source, target]
    done = ckpt(*arguments)
    assert done.code == 30
    assert "cannot lock" in done.err
    assert "--no-lock" in done.err
    assert not target.exists()
    assert ckpt(*arguments, "--no-lock").code == 0
    assert ckpt("verify", target).code == 0


@pytest.mark.parametrize("command", ["convert", "diff"])
def test_a_lock_that_is_held_is_respected_with_no_lock_too(command: str, tmp_path: Path) -> None:
    source, target = save(tmp_path / "a.pt"), tmp_path / "out"
    if command == "diff":
        target = chain_of(tmp_path, 1)
        file, arguments = target / "chain.lock", ["append", target, save(tmp_path / "9.pt", 9, 9)]
    else:
        (tmp_path / ".out.ckpt-partial").mkdir()
        file, arguments = tmp_path / ".out.ckpt-partial/lock", ["convert", source, target]
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ckpt(*arguments).code == 11
        assert ckpt(*arguments, "--no-lock").code == 11


@pytest.mark.parametrize("command", ["convert", "diff"])
def test_a_lock_whose_file_was_replaced_is_no_lock(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, target = save(tmp_path / "a.pt"), tmp_path / "out"
    run = chain_of(tmp_path, 1)
    file = run / "chain.lock" if command == "diff" else tmp_path / ".out.ckpt-partial/lock"
    before = fcntl.flock

    def flock(opened: int, how: int) -> None:
        before(opened, how)
        if file.exists():
            replace_file(file)

    monkeypatch.setattr(locking.fcntl, "flock", flock)
    later = save(tmp_path / "9.pt", 9, 9)
    done = ckpt("append", run, later) if command == "diff" else ckpt("convert", source, target)
    assert done.code == 11


# What a job is


SOURCE = Checkpoint(path=Path("/source"), origin=Origin("torch"), parameters={})
WRITABLE = [name for name in FORMATS if name not in ONLY_READ]
OPTIONS = [(name, field.name) for name in WRITABLE for field in fields(writable(name))]  # type: ignore[arg-type]
EDITS: dict[str, Edit] = {
    "select": Select(("a",), ()),
    "weights only": WeightsOnly(),
    "cast": Cast("float32"),
    "rename": Rename({"a": "b"}),
    "replace": Replace({"a": "float32 00"}),
    "names": UseNames("hf"),
}


CONTENT = f"blake2b-256:{'0' * 64}"
OTHER_VALUES: dict[str, Any] = {
    **dict.fromkeys(("dp", "tp", "pp", "vpp", "ep", "etp"), 2),
    "stages": (0, 1),
    "zero": 1,
    "vocab_rows": 7,
    "rules": (Rule("a"),),
    "config": Path("config.json"),
    "codec": "planes",
    "level": "max",
    "check": False,
    "content": CONTENT,
    "pack_nbytes": 1,
    "chunk_nbytes": 1,
    "zarr3": True,
    "parts_per_axis": 2,
    "file_nbytes": 1,
    "single_file": True,
    "shard_nbytes": 1,
    "with_optimizer": True,
    "keys": "torchtitan",
    "separator": "/",
    "original": True,
    "outtype": "q8_0",
    "without_tokenizer": True,
}
"""A value of each option that is none of its defaults."""


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_every_option_of_a_format_changes_the_job(name: str, option: str) -> None:
    """`identity` is all fields, so none can be forgotten."""
    format = writable(name)
    assert job_id(SOURCE, {}, replace(format, **{option: OTHER_VALUES[option]})) != job_id(SOURCE, {}, format)


@pytest.mark.parametrize("option", [field.name for field in fields(Delta)])
def test_every_option_of_a_delta_changes_the_job(option: str) -> None:
    others: dict[str, Any] = {"delta_codecs": {"a": parse_delta("difference")}, "check": False, "level": "max"}
    others |= {"codec": "planes", "stored_against": Parent(CONTENT, "p"), "content": CONTENT, "pack_nbytes": 1}
    others |= {"unchanged": EarlierMember(open_checkpoint(SAMPLES / "universal-1-plain"))}
    if option == "earlier":  # its content id is in `stored_against`, and its files are in the identities
        return
    if option == "single_file":  # a delta is never one file
        return
    assert job_id(SOURCE, {}, replace(Delta(), **{option: others[option]})) != job_id(SOURCE, {}, Delta())


ORDER = ("0.weight", "0.bias", "1.weight", "1.bias")


@pytest.mark.parametrize("field", [field.name for field in fields(ReadOptions)])
def test_every_option_of_reading_changes_the_job(field: str, tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt")
    others = {
        "rules": (Rule("a"),),
        "order": ORDER,
        "orders": {"optimizer": ORDER},
        "shapes": open_checkpoint(save(tmp_path / "shapes.pt")),
        "missing_files": True,
    }
    plain = open_checkpoint(path)
    changed = replace(plain, history=open_checkpoint(path, ReadOptions(**{field: others[field]})).history)
    assert job_id(changed, {}, Universal()) != job_id(plain, {}, Universal())


def test_every_edit_changes_the_job() -> None:
    histories = [(), *((edit,) for edit in EDITS.values()), tuple(EDITS.values())[:2]]
    ids = {job_id(replace(SOURCE, history=history), {}, Universal()) for history in histories}
    assert len(ids) == len(histories)
    others = [Select(("a",), ("b",)), Cast("float16"), Rename({"a": "c"}), Replace({"a": "float32 01"})]
    others += [UseNames("hf", {"layers": 2}), UseNames("hf", None, allow_rounding=True)]
    assert len(ids | {job_id(replace(SOURCE, history=(one,)), {}, Universal()) for one in others}) == len(ids) + 6


def test_every_edit_leaves_itself_in_the_history(tmp_path: Path) -> None:
    source = open_checkpoint(save(tmp_path / "a.pt"))
    name = next(iter(source))
    edited = [
        source.select([name]),
        source.weights_only(),
        source.cast("fp16"),
        source.rename({name: "other"}),
        source.replace({name: np.zeros(source[name].weight.shape, source[name].weight.dtype)}),
        use_names(source, "hf"),
    ]
    assert {type(one.history[-1]) for one in edited} == {type(edit) for edit in EDITS.values()}
    assert all(one.history[:-1] == source.history for one in edited)


def test_the_files_that_are_read_are_part_of_the_job(tmp_path: Path) -> None:
    source = Checkpoint(path=Path("/source"), origin=Origin("torch"), parameters={})
    one = Identity(1, 2, 3, 4)

    def id_of(identity: Identity) -> str:
        return job_id(source, {Path("/source"): identity}, Universal())

    for field in fields(Identity):
        changed = replace(one, **{field.name: 9})
        # A device may have another number when the machine starts again.
        assert (id_of(changed) == id_of(one)) == (field.name == "device")


def test_shapes_of_another_content_are_another_job(tmp_path: Path) -> None:
    source, shapes = save(tmp_path / "a.pt"), save(tmp_path / "shapes.pt")
    killed("settled", "convert", source, tmp_path / "out", "--to", "dcp", "--keys", "nested")
    done = ckpt("convert", source, tmp_path / "out", "--to", "dcp", "--keys", "torchtitan", "--json")
    assert json.loads(done.out)["resumed_files"] == 0
    assert shapes.exists()


# Chains and their deltas


def test_a_delta_on_its_own_is_read_from_the_chain_that_was_compacted_around_its_parent(tmp_path: Path) -> None:
    run, later = chain_of(tmp_path, 1, 2), save(tmp_path / "3.pt", 3, 3)
    assert ckpt("diff", run, later, "-o", tmp_path / "own.delta").code == 0
    assert ckpt("compact", run, "--keep", "last:1").code == 0  # step 2 is written again, in another folder
    assert ckpt("verify", tmp_path / "own.delta").code == 0
    assert ckpt("append", run, save(tmp_path / "4.pt", 4, 4)).code == 0
    assert ckpt("compact", run, "--keep", "last:1").code == 0  # step 2 is gone
    for command in ("inspect", "verify"):
        done = ckpt(command, tmp_path / "own.delta")
        assert done.code == 20
        assert "ckpt compact" in done.err
        assert "ckpt diff" in done.err


# Limits


@pytest.fixture
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, opened + 40), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.quick(3)
@pytest.mark.parametrize("sample", sorted(p.name for p in SAMPLES.iterdir() if p.is_dir() and p.name != "damaged"))
@pytest.mark.parametrize("workers", [8])
def test_few_open_files_are_enough(sample: str, workers: int, few_files: None, tmp_path: Path) -> None:
    source = SAMPLES / sample
    done = ckpt("convert", source, tmp_path / "out", "--workers", workers)
    assert done.code == 0, done.err
    for arguments in (["verify", source], ["diff", source, tmp_path / "out", "--tensors-only"]):
        done = ckpt(*arguments, "--workers", workers)
        assert "many open files" not in done.out + done.err
        assert done.code in (0, 1, 20)


# Wrong usage


@dataclass(frozen=True)
class Wrong:
    arguments: list[str]
    says: str


WRONG = {
    "a pipe as source": Wrong(["convert", "-", "out"], "a pipe cannot be used"),
    "a pipe as target": Wrong(["convert", "a.pt", "-"], "a pipe cannot be used"),
    "a pipe to look at": Wrong(["inspect", "-"], "a pipe cannot be used"),
    "several sources": Wrong(["convert", "a.pt", "out", "b.pt", "c.pt"], "b.pt, c.pt"),
    "no type": Wrong(["convert", "a.pt", "out", "--dtype", "banana"], "banana"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_usage_is_2_and_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    save(tmp_path / "a.pt")
    command = [str(tmp_path / word) if word.endswith((".pt", "out")) else word for word in WRONG[name].arguments]
    done = ckpt(*command, "--json")
    assert done.code == 2
    assert all(part.rpartition("/")[2] in done.err for part in WRONG[name].says.split(", "))
    report = json.loads(done.out)
    assert report["error"]["code"] == 2
    assert report["error"]["kind"] == "usage"


@pytest.mark.parametrize("kind", ["fifo", "device", "a folder as file"])
def test_source_that_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert ckpt("convert", path, tmp_path / "out").code == 10


def test_a_staging_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".out.ckpt-partial").symlink_to(elsewhere)
    done = ckpt("convert", save(tmp_path / "a.pt"), tmp_path / "out")
    assert done.code == 21
    assert "link" in done.err
    assert list(elsewhere.iterdir()) == []


def test_a_folder_of_the_target_that_vanishes_is_an_error_of_the_target(
    at: Callable[[str, Fault], None], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()

    def vanish() -> None:
        while place.exists():  # a worker may write another file meanwhile
            shutil.rmtree(place, ignore_errors=True)

    at("journalled", vanish)
    done = ckpt("convert", save(tmp_path / "a.pt"), place / "out", "--workers", 1)
    assert done.code == 30
    assert "place" in done.err
    assert not place.exists()


def test_hard_links_and_sparse_files_are_read_as_what_they_are(
    at: Callable[[str, Fault], None], tmp_path: Path
) -> None:
    source = save(tmp_path / "a.pt")
    at("written", lambda: os.link(source, tmp_path / "b.pt"))  # changes no byte
    assert ckpt("convert", source, tmp_path / "out").code == 0
    np.save(tmp_path / "x", np.zeros(1))


def test_a_read_only_source_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    source = save(folder / "a.pt")
    source.chmod(0o444)
    folder.chmod(0o555)
    try:
        assert ckpt("convert", source, tmp_path / "out").code == 0
    finally:
        folder.chmod(0o755)


def test_two_targets_in_one_folder_do_not_disturb_each_other(at: Callable[[str, Fault], None], tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt")
    inner: list[Ran] = []
    at("journalled", lambda: inner.append(ckpt("convert", source, tmp_path / "two", "--workers", 1)))
    assert ckpt("convert", source, tmp_path / "one", "--workers", 1).code == 0
    assert ckpt("diff", tmp_path / "one", tmp_path / "two").code == 0
    assert inner[0].code == 0
    assert only_left(tmp_path, "a.pt", "one", "two")
