"""The command line: help, exit codes, streams, and names that attack a terminal."""

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click import Context

from ckpt_cli.commands.doctor import UNFIT
from ckpt_cli.main import COMMANDS, EXIT_STATUS, FAULT, INTERRUPTED, PIPE_CLOSED, TERMINATED, cli
from ckpt_cli.options.exit_codes import EXIT_CODES, exit_code
from ckpt_formats.core import errors
from ckpt_formats.core.errors import CkptError
from ckpt_formats.engines.megatron import MegatronDist
from damage import HOSTILE_NAMES, SAMPLES, ckpt

ZERO1 = next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2"))
CKPT = [sys.executable, "-m", "ckpt_cli"]


def command(*arguments: object, **more: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*CKPT, *map(str, arguments)], capture_output=True, text=True, timeout=60, **more)  # type: ignore[call-overload,no-any-return]


def kinds_of_error() -> Iterator[type[CkptError]]:
    waiting = [CkptError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind is not CkptError:
            yield kind


# Help


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    done = ckpt(name, "--help")
    assert done.code == 0
    assert done.err == ""
    assert re.search(rf"^ +Examples:\n +ckpt {name}\b", done.out, re.MULTILINE)
    assert "--verbose" in done.out
    assert max(map(len, done.out.splitlines())) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_says_what_it_does(name: str) -> None:
    subcommand = cli.get_command(Context(cli), name)
    assert subcommand is not None
    for option in subcommand.params:
        assert option.param_type_name == "argument" or getattr(option, "help", None), option.name


def test_the_commands_are_listed_with_a_line_each() -> None:
    done = ckpt("--help")
    assert done.code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\S", done.out, re.MULTILINE)


def test_ckpt_shows_its_help_without_arguments() -> None:
    done = ckpt()
    assert done.code == 2
    assert "Usage: ckpt" in done.out + done.err


# Exit codes


@pytest.mark.parametrize("kind", list(kinds_of_error()), ids=lambda kind: kind.__name__)
def test_every_kind_of_error_has_its_own_line_in_the_table(kind: type[CkptError]) -> None:
    own = next(base for base in kind.__mro__ if base.__module__ == errors.__name__)
    assert own in EXIT_CODES
    assert exit_code(kind("what")) == EXIT_CODES[own]


def test_the_table_is_complete_and_in_the_help() -> None:
    public = {kind for kind in kinds_of_error() if kind.__module__ == errors.__name__}
    assert set(EXIT_CODES) == public
    listed = {int(code) for code in re.findall(r"(?:^|\s)(\d+)  [a-z]", ckpt("--help").out)}
    assert (
        listed
        == {0, 1, 2, UNFIT, FAULT, INTERRUPTED, PIPE_CLOSED, TERMINATED, *EXIT_CODES.values()}
        == EXIT_STATUS.keys()
    )


WRONG = {
    "an unknown command": (["transmute", "a", "b"], 2, "transmute"),
    "no source": (["inspect"], 2, "CKPT"),
    "no target": (["convert", "SOURCE"], 2, "TARGET"),
    "too many arguments": (["rules", "SOURCE", "b"], 2, "b"),
    "an unknown option": (["inspect", "SOURCE", "--josn"], 2, "--josn"),
    "an unknown format": (["convert", "SOURCE", "TARGET", "--to", "tensorflow"], 2, "'tensorflow'"),
    "a size in words": (["convert", "SOURCE", "TARGET", "--memory", "lots"], 2, "'lots' is not a size like"),
    "a size of nothing": (["convert", "SOURCE", "TARGET", "--shard-size", "0G"], 2, "'0G' is not a size like"),
    "a negative size": (["verify", "SOURCE", "--memory", "-1G"], 2, "'-1G' is not a size like"),
    "no workers": (["convert", "SOURCE", "TARGET", "--workers", "0"], 2, "workers"),
    "too many workers": (["verify", "SOURCE", "--workers", "1000"], 2, "workers"),
    "a depth of nothing": (["inspect", "SOURCE", "--depth", "0"], 2, "depth"),
    "a source that is not there": (["inspect", "gone"], 10, "gone"),
    "a source under a file": (["inspect", "SOURCE/latest/x"], 10, "latest/x"),
    "a source with an endless name": (["inspect", "x" * 5000], 10, "File name too long"),
    "a source that is a device": (["inspect", "/dev/null"], 10, "/dev/null"),
    "an empty folder": (["verify", "EMPTY"], 10, "it is empty"),
    "an unknown element type": (["convert", "SOURCE", "TARGET", "--dtype", "fp7"], 2, "'fp7'"),
    "an element type of integers": (["convert", "SOURCE", "TARGET", "--dtype", "int8"], 2, "'int8'"),
    "a pattern that matches nothing": (["convert", "SOURCE", "TARGET", "--only", "nought"], 10, "`nought`"),
    "a skip that matches nothing": (["convert", "SOURCE", "TARGET", "--skip", "nought"], 10, "`nought`"),
    "a pattern that is none": (["convert", "SOURCE", "TARGET", "--only", "("], 2, "`(` is not a regular expression"),
    "a pattern without end": (["convert", "SOURCE", "TARGET", "--only", "(a+)+b"], 21, "(a+)+b"),
    "rules that are not there": (["inspect", "SOURCE", "--rules", "gone.toml"], 10, "gone.toml"),
    "rules that are a folder": (["inspect", "SOURCE", "--rules", "EMPTY"], 2, "is a directory"),
    "rules that are none": (["inspect", "SOURCE", "--rules", "SOURCE/latest"], 23, "not a TOML file"),
    "an order that names a parameter twice": (["inspect", "SOURCE", "--param-order", "TWICE"], 23, "names `a.b` twice"),
    "a target that exists": (["convert", "SOURCE", "EMPTY"], 30, "exists already"),
    "a target that is a file": (["convert", "SOURCE", "FILE"], 30, "exists already"),
    "a target that is a dangling link": (["convert", "SOURCE", "LINK"], 30, "exists already"),
    "a target that is the source": (["convert", "SOURCE", "SOURCE"], 30, "exists already"),
    "a target within the source": (["convert", "SOURCE", "SOURCE/new"], 30, "the target is inside the source"),
    "a target within the source by a link": (["convert", "SOURCE", "INTO/new"], 30, "the target is inside the source"),
    "a target without a folder": (["convert", "SOURCE", "EMPTY/a/b"], 30, "does not exist"),
    "a target under a file": (["convert", "SOURCE", "FILE/b"], 30, "FILE"),
    "a target with an endless name": (["convert", "SOURCE", "x" * 250], 30, "File name too long"),
    "a target whose staging is a file": (["convert", "SOURCE", "STAGED"], 21, "is a file; ckpt needs a folder"),
}  # fmt: skip


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The places that wrong arguments speak of, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ZERO1, tmp_path / "SOURCE")
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").write_text("here")
    (tmp_path / "TWICE").write_text("a.b\nc\na.b\n")
    (tmp_path / "LINK").symlink_to("nowhere")
    (tmp_path / "INTO").symlink_to("SOURCE")
    (tmp_path / ".STAGED.ckpt-partial").write_text("in the way")
    return tmp_path


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_explained(name: str, places: Path) -> None:
    arguments, code, says = WRONG[name]
    before = tree(places)
    done = ckpt(*arguments)
    assert done.code == code, done.err
    assert says in done.err
    assert done.err.lower().count("error: ") == 1
    assert "Traceback" not in done.err
    assert "fault of ckpt" not in done.err
    assert done.out == ""
    assert tree(places) == before


def test_a_target_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    stage = tmp_path / ".out.ckpt-partial"
    stage.mkdir()
    with (stage / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = ckpt("convert", ZERO1, tmp_path / "out")
    assert done.code == 11
    assert "another process" in done.err
    assert str(tmp_path / "out") in done.err
    assert [path.name for path in stage.iterdir()] == ["lock"]
    assert ckpt("convert", ZERO1, tmp_path / "out").code == 0


def test_leftovers_of_an_interrupted_run_are_no_checkpoint(tmp_path: Path) -> None:
    assert ckpt("convert", ZERO1, tmp_path / "hf", "--to", "safetensors").code == 0
    assert ckpt("convert", ZERO1, tmp_path / "universal").code == 0
    assert ckpt("convert", ZERO1, tmp_path / "model.pt", "--to", "torch").code == 0
    stage = tmp_path / ".out.ckpt-partial"
    stage.mkdir()
    for name in ("hf", "universal", "model.pt"):
        (tmp_path / name).rename(stage / name)
        for command in ("inspect", "verify"):
            done = ckpt(command, stage / name)
            assert done.code == 10
            assert "interrupted run" in done.err


UNPRIVILEGED = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []
"""In front of a command: root, too, is bound by permissions then."""


@pytest.mark.skipif(os.getuid() == 0 and not shutil.which("setpriv"), reason="root minds no permissions")
@pytest.mark.slow
def test_files_and_folders_without_permission_are_named(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(ZERO1, source)
    out.mkdir()

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        argv = [*UNPRIVILEGED, *CKPT, *map(str, arguments)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60)

    assert run("convert", source, out / "good").returncode == 0
    out.chmod(0o555)
    done = run("convert", source, out / "bad")
    out.chmod(0o755)
    assert done.returncode == 30
    assert "no permission" in done.stderr
    assert str(out) in done.stderr
    shard = next(source.rglob("*rank_1_*optim*"))
    for closed, says in {
        shard: ("Permission denied", "Check its permissions", shard.name),
        source / "global_step5": ("source",),
        source / "latest": ("Permission denied", "latest"),
        source: ("source",),
        tmp_path / "good" / "manifest.json": ("Permission denied", "manifest.json"),
    }.items():
        if closed.name == "manifest.json":
            shutil.copytree(out / "good", tmp_path / "good")
        mode = closed.stat().st_mode
        closed.chmod(0)
        opened = source if source in (closed, *closed.parents) else tmp_path / "good"
        for arguments in (["inspect", opened], ["verify", opened], ["convert", opened, out / "bad"]):
            done = run(*arguments)
            assert done.returncode == 10, done.stderr
            assert done.stdout == ""
            assert done.stderr.count("error: ") == 1
            assert "Traceback" not in done.stderr
            assert "fault of ckpt" not in done.stderr
            for words in says:
                assert words in done.stderr
        closed.chmod(mode)
    assert [path.name for path in out.iterdir()] == ["good"]


@pytest.mark.parametrize(
    ("format", "pp"),
    [
        (MegatronDist(), None),
        (MegatronDist(pp=4), 4),
        (MegatronDist(stages=(3, 5)), 2),
        (MegatronDist(stages=(1, 2, 3, 4), vpp=2), 2),
        (MegatronDist(stages=(1, 2, 3, 4), pp=2), 2),
    ],
)
def test_how_many_stages_there_are_is_stated_or_counted(format: MegatronDist, pp: int | None) -> None:
    assert format.stage_count == pp


# Streams


@pytest.fixture(scope="module")
def universal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("universal") / "step5"
    assert ckpt("convert", ZERO1, folder).code == 0
    return folder


@pytest.mark.parametrize("form", ["universal", "torch", "safetensors"])
def test_json_is_all_that_is_on_stdout(form: str, tmp_path: Path) -> None:
    for arguments in (
        ["inspect", ZERO1],
        ["verify", ZERO1],
        ["convert", ZERO1, tmp_path / "out", "--to", form, "--dry-run"],
        ["convert", ZERO1, tmp_path / "out", "--to", form],
    ):
        done = ckpt(*arguments, "--json")
        assert done.code == 0, done.err
        assert isinstance(json.loads(done.out), dict)
        assert done.out.count("\n") == 1
        assert "{" not in done.err


def test_results_are_on_stdout_and_all_else_on_stderr(tmp_path: Path) -> None:
    done = ckpt("convert", ZERO1, tmp_path / "out", "--to", "safetensors")
    assert done.out.startswith(f"wrote {tmp_path / 'out'}")
    assert done.out.count("\n") == 1
    assert "note: safetensors has no place for optimizer states" in done.err
    done = ckpt("verify", ZERO1)
    assert done.out.startswith("ok: ")
    assert done.err == "note: in the folder of the checkpoint, and not read: truth.safetensors\n"
    done = ckpt("inspect", ZERO1)
    assert done.err == "note: in the folder of the checkpoint, and not read: truth.safetensors\n"
    assert "blocks" in done.out


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize("form", ["universal", "torch", "safetensors"])
def test_a_dry_run_writes_nothing(form: str, as_json: list[str], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ZERO1, source)
    before = tree(tmp_path)
    done = ckpt("convert", source, tmp_path / "out", "--to", form, "--dry-run", *as_json)
    assert done.code == 0, done.err
    assert done.out
    assert tree(tmp_path) == before


def test_a_dry_run_refuses_what_the_run_would(tmp_path: Path) -> None:
    done = ckpt("convert", SAMPLES / "damaged" / "missing-rank", tmp_path / "out", "--dry-run")
    assert done.code == 20
    (tmp_path / "out").mkdir()
    assert ckpt("convert", ZERO1, tmp_path / "out", "--dry-run").code == 30


def test_verbose_shows_where_an_error_came_from(tmp_path: Path) -> None:
    broken = SAMPLES / "damaged" / "truncated-shard"
    for arguments in (["inspect", broken], ["verify", broken], ["convert", broken, tmp_path / "out"]):
        brief, long = ckpt(*arguments), ckpt(*arguments, "-v")
        assert brief.code == long.code == 20
        assert "Traceback" not in brief.err
        assert "Traceback (most recent call last)" in long.err
        assert long.err.endswith(brief.err)


@pytest.mark.slow
def test_no_escape_codes_without_a_terminal(universal: Path, tmp_path: Path) -> None:
    for arguments in (
        ["--help"],
        ["inspect", universal],
        ["verify", universal],
        ["convert", universal, tmp_path / "o"],
    ):
        done = command(*arguments, env={**os.environ, "FORCE_COLOR": "", "TERM": "xterm-256color"})
        assert done.returncode == 0
        assert "\x1b" not in done.stdout + done.stderr


def on_a_terminal(arguments: list[object], **env: str) -> str:
    """What a command writes when all its streams are one terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(CKPT[0], [*CKPT, *map(str, arguments)], {**os.environ, "TERM": "xterm-256color", **env})
    out = b""
    while True:
        try:
            block = os.read(terminal, 65536)
        except OSError:
            break
        if not block:
            break
        out += block
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return out.decode()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.slow
def test_no_color_is_heeded_on_a_terminal(universal: Path, tmp_path: Path) -> None:
    colour = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
    for number, arguments in enumerate((["inspect", universal], ["verify", universal], ["convert", universal, "OUT"])):
        words = [tmp_path / f"out{number}" if a == "OUT" else a for a in arguments]
        assert not colour.search(on_a_terminal(words, NO_COLOR="1"))


@pytest.mark.quick(2)
@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--json"], ["inspect", "--extras"]])
def test_a_reader_that_stops_early_is_no_error(arguments: list[str], universal: Path) -> None:
    line = " ".join([*CKPT, *arguments, str(universal)])
    done = subprocess.run(["bash", "-c", f"{line} | head -c 10"], capture_output=True, text=True, timeout=60)
    assert len(done.stdout) == 10
    assert done.stderr == ""


def test_a_reader_that_stops_early_does_not_hide_the_exit_code() -> None:
    for arguments, code in (
        (["verify", SAMPLES / "damaged" / "flipped-bit"], 20),
        (["diff", SAMPLES / "universal-1-delta@10", SAMPLES / "universal-1-delta@11", "--top", "0"], PIPE_CLOSED),
    ):
        line = " ".join(map(str, [*CKPT, *arguments]))
        script = f"set -o pipefail; {{ sleep 0; {line}; }} | true"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (code, "")
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_stdout_that_is_full_is_said_plainly(universal: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*CKPT, "inspect", str(universal)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 30
    assert "standard output" in done.stderr
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
def test_closed_streams_do_no_harm(universal: Path, tmp_path: Path) -> None:
    for i, closed in enumerate(("2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-")):
        target = tmp_path / f"out{i}"
        line = " ".join([*CKPT, "convert", str(universal), str(target), closed])
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert ckpt("verify", target).code == 0


# Names that attack


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A safetensors file whose tensors have the worst of names."""
    path = tmp_path_factory.mktemp("hostile") / "model.safetensors"
    entries = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(HOSTILE_NAMES.values())
    }
    header = {"__metadata__": {"\x1b[31malias": HOSTILE_NAMES["a path"], "\x1b[2Jkey": "\x1b[2Jvalue"}, **entries}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(entries)))
    return path


def assert_tame(text: str) -> None:
    for line in text.splitlines():
        assert line.isprintable(), ascii(line)[:300]


@pytest.mark.parametrize("form", ["universal", "torch", "safetensors"])
def test_hostile_names_are_escaped_and_survive(form: str, hostile: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors" if form == "safetensors" else tmp_path / "out"
    names, skip = set(HOSTILE_NAMES.values()), []
    if form == "safetensors":  # whose header must be UTF-8
        half = HOSTILE_NAMES["a lone surrogate"]
        done = ckpt("convert", hostile, target, "--to", form)
        assert done.code == 22
        assert_tame(done.err)
        names, skip = names - {half}, ["--skip", half]
    for arguments in (
        ["inspect", hostile],
        ["inspect", hostile, "--extras", "--depth", "1"],
        ["verify", hostile],
        ["convert", hostile, target, "--to", form, *skip, "--dry-run"],
        ["convert", hostile, target, "--to", form, *skip],
        ["inspect", target, "--extras"],
        ["verify", target],
    ):
        done = ckpt(*arguments)
        assert done.code == 0, done.err
        assert_tame(done.out)
        assert_tame(done.err)
    done = ckpt("inspect", target, "--json")
    assert done.out.isascii()
    assert {p["name"] for p in json.loads(done.out)["parameters"]} == names


def test_hostile_names_never_become_file_names(hostile: Path, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "down"
    folder.mkdir(parents=True)
    assert ckpt("convert", hostile, folder / "out", "--pack-size", 1).code == 0
    assert {p.name for p in tmp_path.rglob("*") if p.is_dir()} == {"deep", "down", "out", "packs"}
    names = sorted(p.name for p in (folder / "out" / "packs").iterdir())
    assert names == [f"{i:05d}.safetensors" for i in range(len(HOSTILE_NAMES))]


def test_hostile_names_are_escaped_in_errors(hostile: Path, tmp_path: Path) -> None:
    """Damage each tensor's file: the finding and the refusal name the tensor, tamely and briefly."""
    good = tmp_path / "good"
    assert ckpt("convert", hostile, good, "--pack-size", 1).code == 0
    report = json.loads(ckpt("inspect", good, "--json").out)
    packs = [file for file in report["files"] if file["role"] == "all"]
    assert len(packs) == len(HOSTILE_NAMES)
    for file in packs:
        path = Path(file["file"])
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + b"\1")
        for arguments in (["verify", good], ["convert", good, tmp_path / "out"]):
            done = ckpt(*arguments)
            assert done.code == 20
            assert path.name in done.out + done.err
            assert_tame(done.out)
            assert_tame(done.err)
        path.write_bytes(whole[:-1])
        for arguments in (["verify", good], ["convert", good, tmp_path / "out"]):
            done = ckpt(*arguments)
            assert done.code == 20
            assert path.name in done.err
            assert len(done.err) < 3000
            assert_tame(done.err)
        path.write_bytes(whole)
        assert not (tmp_path / "out").exists()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "name", ["\x1b[31mred\x1b[0m", "two\nerror: lines", "shown\rhidden", "\u202egnp.exe", "[bold]not[/bold]"]
)
def test_hostile_paths_are_escaped(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / name, tmp_path / f"{name}-out"
    done = ckpt("inspect", source)
    assert done.code == 10
    assert_tame(done.err)
    shutil.copytree(ZERO1, source)
    for arguments in (
        ["inspect", source],
        ["verify", source],
        ["convert", source, target],
        ["convert", source, target],
    ):
        done = ckpt(*arguments)
        assert_tame(done.out + done.err)
    assert done.code == 30
    assert ckpt("verify", target).code == 0
