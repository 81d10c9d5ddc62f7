"""Ways to damage a checkpoint, each with the exit code and the words that must follow.

A source is a small good checkpoint, made once; a damage changes a copy of it.
Also `ckpt`, which runs the command within this process.
"""
# ruff: noqa: E501 -- a table is read along its lines

import gc
import io
import json
import os
import pickle
import re
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import forged as forgery
from ckpt_cli.main import run
from ckpt_formats.containers.torchfile import open_file, reading_chunks, write_file
from ckpt_formats.core.files import Reader
from forged import Change, Forged, forge

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"

NOT_FOUND, BROKEN, UNSAFE, UNSUPPORTED, BAD_RULES, FULL, OUTPUT = 10, 20, 21, 22, 23, 28, 30


@dataclass(frozen=True)
class Ran:
    """What a run of the command did."""

    code: int
    out: str
    err: str


def ckpt(*arguments: object) -> Ran:
    """Run the command in this process, as its entry point does, but what it froze for the collector is thawed again."""
    out, err, before, thresholds = io.StringIO(), io.StringIO(), sys.argv, gc.get_threshold()
    sys.argv = ["ckpt", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            run()
    except SystemExit as end:
        return Ran(int(end.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.argv = before
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    raise AssertionError("run() returned")


# Good checkpoints


def make_sources(folder: Path) -> None:
    """One small good checkpoint of every kind, in `folder`."""
    for name, sample in _REAL.items():
        sample_folder = next(SAMPLES.glob(f"deepspeed-*-{sample}"))
        shutil.copytree(sample_folder, folder / name, ignore=shutil.ignore_patterns("truth.safetensors"))
    for name, options in _MADE.items():
        done = ckpt("convert", folder / "zero1", folder / name, *options)
        assert done.code == 0, done.err
    with zipfile.ZipFile(folder / "model.pt") as archive:
        assert archive.testzip() is None
    _legacy(folder / "legacy")


_REAL = {"zero1": "zero1-bf16-dp2", "zero3": "zero3-bf16-dp4-tied-frozen", "pipeline": "bf16opt-tp2-pp2"}
_MADE = {
    "universal": ("--to", "universal"),
    "model.pt": ("--to", "torch"),
    "shards": ("--to", "safetensors", "--shard-size", "20K"),
    "model.safetensors": ("--to", "safetensors"),
}
SOURCES = (*_REAL, *_MADE, "legacy")


def _legacy(path: Path) -> None:
    """A file as `torch.save` wrote it before PyTorch 1.6, of one tensor of four floats."""
    mark = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\4NtQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + mark + b"K\0K\4\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR"
    root = b"\x80\2}X\6\0\0\0weight" + tensor + b"s."
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    head = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, system))
    path.write_bytes(head + root + pickle.dumps(["0"], 2) + struct.pack("<q4f", 4, 1, 2, 3, 4))


# How files are changed


Harm = Callable[[Path], object]


@dataclass(frozen=True)
class Damage:
    """A way to damage a copy of `source`; `ckpt` must exit with `code` and say each of `says`.

    `seen` is by whom: the index shows it to every command; damaged data only to
    those that read it; what is `spare` is not needed, so only `verify` minds.
    """

    source: str
    harm: Harm
    code: int
    says: tuple[str, ...]
    seen: str = "index"


def in_file(pattern: str, *harms: Callable[[Path], object]) -> Harm:
    """Do harm to the one file that fits the pattern."""

    def harm(root: Path) -> None:
        for one in harms:
            one(file_in(root, pattern))

    return harm


def file_in(root: Path, pattern: str) -> Path:
    if root.is_file():
        return root
    return sorted(root.rglob(pattern))[0]


def cut(to: Callable[[bytes], int]) -> Callable[[Path], object]:
    """Truncate a file to a length told by its content."""
    return lambda path: os.truncate(path, to(path.read_bytes()))


def flip(at: Callable[[bytes], int]) -> Callable[[Path], object]:
    """Flip one bit of the byte at a place told by the file's content."""

    def harm(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at(data)] ^= 0b100
        path.write_bytes(data)

    return harm


def add(text: bytes, *, front: bool = False) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text + path.read_bytes() if front else path.read_bytes() + text)


def write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop_instead(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def nowhere_instead(path: Path) -> None:
    path.unlink()
    path.symlink_to("not-there")


def tree(change: Callable[[Any], object]) -> Callable[[Path], object]:
    """Change what a file of torch holds, and write it again in good form."""

    def harm(path: Path) -> None:
        root = open_file(path).root
        change(root)
        new = path.with_name("new.pt")
        with Reader(check=False) as reader:
            write_file(new, root, reading_chunks(reader), path.name.removesuffix(".pt"))
        new.replace(path)

    return harm


def members(change: Callable[[dict[str, bytes]], object]) -> Callable[[Path], object]:
    """Change members of an archive, and write it again with the right checksums."""

    def harm(path: Path) -> None:
        with zipfile.ZipFile(path) as old:
            held = {info.filename: old.read(info) for info in old.infolist()}
        change(held)
        with zipfile.ZipFile(path, "w") as new:
            for name, data in held.items():
                new.writestr(name, data)

    return harm


def member(name: str, data: bytes | Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Give one member of an archive another content."""

    def change(held: dict[str, bytes]) -> None:
        key = next(key for key in held if key.partition("/")[2] == name)
        held[key] = data if isinstance(data, bytes) else data(held[key])

    return members(change)


def only_pickle(data: bytes) -> Callable[[Path], object]:
    """Give the pickle of an archive another content, and leave out the values, which it does not name any more."""

    def change(held: dict[str, bytes]) -> None:
        for key in [key for key in held if key.partition("/")[2].startswith("data/")]:
            del held[key]
        held[next(key for key in held if key.endswith("/data.pkl"))] = data

    return members(change)


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the header of a safetensors file."""

    def harm(path: Path) -> None:
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        fields = json.loads(data[8 : 8 + length])
        change(fields)
        text = json.dumps(fields).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return harm


def header_text(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(struct.pack("<Q", len(text)) + text)


def index(change: Callable[[dict[str, Any]], object]) -> Harm:
    """Change the index of a folder of safetensors files."""

    def harm(root: Path) -> None:
        path = root / "model.safetensors.index.json"
        fields = json.loads(path.read_text())
        change(fields)
        path.write_text(json.dumps(fields))

    return harm


def forged(change: Change) -> Harm:
    """Change the manifest or the index of a universal checkpoint, as somebody would who can compute checksums."""
    return lambda root: forge(root, change)


def field(*keys: Any, value: Any) -> Harm:
    """Set a field of the manifest."""
    return forged(forgery.put(*keys, value=value))


def column(name: str, state: str, value: int) -> Harm:
    """Set a number of a state of the parameter that tests look at."""
    return forged(forgery.number(name, (_LOOKED_AT, state), value))


def codec(state: str, config: Any, base: str | None = None) -> Harm:
    """Give a state of this parameter another codec."""
    return forged(forgery.codec(_LOOKED_AT, state, config, base))


def sizes(state: str, value: int) -> Harm:
    """Set all sizes of a state of this parameter."""
    return forged(lambda f: f.columns["state.dims"].__setitem__(f.dims(_LOOKED_AT, state), value))


def rank(state: str, value: int) -> Harm:
    """Set the number of dimensions of a state of this parameter, and as many sizes of 1."""

    def change(forged: Forged) -> None:
        at, dims = forged.dims(_LOOKED_AT, state), forged.columns["state.dims"]
        forged.columns["state.rank"][forged.row(_LOOKED_AT, state)] = value
        forged.columns["state.dims"] = np.concatenate([dims[: at.start], np.ones(value, dims.dtype), dims[at.stop :]])

    return forged(change)


def in_state(state: str) -> Harm:
    """Flip a bit of a state of this parameter."""

    def harm(root: Path) -> None:
        columns = load_file(root / "index.safetensors")
        fields = json.loads((root / "manifest.json").read_bytes())
        row = Forged(fields, columns).row(_LOOKED_AT, state)
        pack = root / f"packs/{int(columns['state.pack'][row]):05d}.safetensors"
        flip(lambda data: int(columns["state.offset"][row]) + 5)(pack)

    return harm


def exchanged(first: str, second: str, state: str) -> Harm:
    """Exchange the bytes of one state of two parameters, which have the same length."""

    def harm(root: Path) -> None:
        columns = load_file(root / "index.safetensors")
        fields = json.loads((root / "manifest.json").read_bytes())
        rows = [Forged(fields, columns).row(name, state) for name in (first, second)]
        assert columns["state.pack"][rows].tolist() == [0, 0]
        pack = root / "packs/00000.safetensors"
        data = bytearray(pack.read_bytes())
        (a, b), nbytes = columns["state.offset"][rows].tolist(), int(columns["state.nbytes"][rows[0]])
        data[a : a + nbytes], data[b : b + nbytes] = data[b : b + nbytes], data[a : a + nbytes]
        pack.write_bytes(data)

    return harm


_PACK, _INDEX = "00000.safetensors", "index.safetensors"
_LOOKED_AT = "blocks.0.mlp.up.weight"


def put(*keys: Any, value: Any) -> Callable[[Any], object]:
    """Replace the entry at a path of keys."""

    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    return change


def drop(*keys: Any) -> Callable[[Any], object]:
    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        del tree[keys[-1]]

    return change


def swap(one: str, other: str) -> Harm:
    """Exchange two files."""

    def harm(root: Path) -> None:
        a, b = file_in(root, one), file_in(root, other)
        kept = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(kept)

    return harm


def again(pattern: str, name: str) -> Harm:
    """A second copy of a file, under another name."""

    def harm(root: Path) -> None:
        path = file_in(root, pattern)
        shutil.copyfile(path, path.with_name(name))

    return harm


def remove_all(pattern: str) -> Harm:
    def harm(root: Path) -> None:
        for path in root.rglob(pattern):
            path.unlink()

    return harm


def of_another_run(pattern: str) -> Harm:
    """Every float of a file's storages becomes another; all checksums are right."""

    def change(held: dict[str, bytes]) -> None:
        for name, data in held.items():
            if "/data/" in name and len(data) > 64:
                held[name] = bytes(byte ^ 0x11 for byte in data)

    return in_file(pattern, members(change))


def later_step(root: Path) -> None:
    """A file of the same run, three steps later."""
    shard = next((SAMPLES / "damaged" / "mixed-steps").rglob("*rank_1_*optim_states.pt"))
    shutil.copyfile(shard, file_in(root, shard.name))


# Places in an archive


def in_member(name: str) -> Callable[[bytes], int]:
    """The middle of a member's data."""

    def at(data: bytes) -> int:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            info = next(i for i in archive.infolist() if i.filename.partition("/")[2] == name)
        begin = info.header_offset + 30 + sum(struct.unpack_from("<HH", data, info.header_offset + 26))
        return begin + info.file_size // 2

    return at


def at_directory(data: bytes) -> int:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.start_dir


def _record(magic: bytes) -> Callable[[bytes], int]:
    return lambda data: data.rindex(magic)


CUTS: dict[str, Callable[[bytes], int]] = {
    "to nothing": lambda data: 0,
    "to one byte": lambda data: 1,
    "to its magic": lambda data: 4,
    "in its first header": lambda data: 20,
    "in its pickle": in_member("data.pkl"),
    "in a tensor": in_member("data/1"),
    "in front of its directory": at_directory,
    "in its directory": lambda data: at_directory(data) + 30,
    "in front of its end record": _record(b"PK\5\6"),
    "in its end record": lambda data: len(data) - 10,
    "by one byte": lambda data: len(data) - 1,
}

FLIPS: dict[str, tuple[Callable[[bytes], int], str]] = {
    "its magic": (lambda data: 0, "neither an archive"),
    "the name in a header": (lambda data: 32, "contradict each other"),
    "its pickle": (in_member("data.pkl"), "do not match their checksum"),
    "its byte order": (in_member("byteorder"), "do not match their checksum"),
    "the magic of its directory": (at_directory, "directory is malformed"),
    "a checksum in its directory": (lambda data: at_directory(data) + 16, "do not match their checksum"),
    "a size in its directory": (lambda data: at_directory(data) + 24, "two sizes"),
    "a name in its directory": (lambda data: at_directory(data) + 71, "data.pkl"),
    "its count of entries": (lambda data: len(data) - 14, "contradict each other"),
    "its directory's offset": (lambda data: len(data) - 6, "contradict each other"),
    "its 64-bit directory": (_record(b"PK\6\6"), "64-bit directory"),
}


# Attacks

_CANARY = "canary-of-the-damage-tests"


def pickled(body: bytes) -> bytes:
    return b"\x80\2" + body + b"."


def _call(module: str, name: str, text: str = f"touch {_CANARY}") -> bytes:
    data = text.encode()
    return f"c{module}\n{name}\n".encode() + b"(X" + struct.pack("<I", len(data)) + data + b"tR"


ATTACKS = {
    "that runs a command": _call("os", "system"),
    "that evaluates": _call("builtins", "eval", "1"),
    "that imports": _call("builtins", "__import__", "os"),
    "that opens a shell": _call("subprocess", "Popen"),
    "that runs torch code": _call("torch.hub", "load"),
    "that fetches an attribute": b"c__builtin__\ngetattr\n(cos\npath\nX\4\0\0\0bombtR",
}

HOSTILE_NAMES = {
    "escape codes": "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "a line feed": "two\nerror: lines",
    "a carriage return": "shown\rhidden",
    "bidirectional controls": "\u202egnp.exe\u2066",
    "markup": "[bold red]not[/bold red] [link=file:///etc/passwd]x[/link]",
    "a path": "../../../../tmp/escaped",
    "an absolute path": "/etc/passwd",
    "a lone surrogate": "\ud800half",
    "a NUL": "nul\0nul",
    "64 KiB": "long" * (16 << 10),
    "nothing": "",
    "dots": "..",
    "a device": "con.nul",
}


# The table

_OPTIM0, _OPTIM1 = "*pp_rank_0_mp_rank_00_optim_states.pt", "*pp_rank_1_mp_rank_00_optim_states.pt"
_MODEL = "mp_rank_00_model_states.pt"
_MODEL3 = "zero_pp_rank_1_mp_rank_00_model_states.pt"

DAMAGES: dict[str, Damage] = {}


def _add(name: str, source: str, harm: Harm, code: int, *says: str, seen: str = "index") -> None:
    assert name not in DAMAGES, name
    DAMAGES[name] = Damage(source, harm, code, says, seen)


def _add_all(source: str, kinds: Iterable[tuple[str, Harm, int, tuple[str, ...]]]) -> None:
    for name, harm, code, says in kinds:
        _add(f"{source}: {name}", source, harm, code, *says)


# fmt: off
for _place, _at in CUTS.items():
    _add(f"zero1: a shard cut {_place}", "zero1", in_file(_OPTIM1, cut(_at)), BROKEN, "pp_rank_1_mp_rank_00_optim_states.pt")
    _add(f"torch: cut {_place}", "model.pt", in_file("", cut(_at)), BROKEN, "model.pt")
_add("pipeline: a layer cut in a tensor", "pipeline", in_file("layer_02-model_01*", cut(in_member("data/1"))), BROKEN, "layer_02-model_01-model_states.pt")
_add("zero3: a model file cut in a tensor", "zero3", in_file(_MODEL3, cut(in_member("data/1"))), BROKEN, _MODEL3)

for _place, (_at, _message) in FLIPS.items():
    _add(f"zero1: a bit flipped in {_place}", "zero1", in_file(_MODEL, flip(_at)), BROKEN, _MODEL, _message)

_add("zero1: a bit flipped in a master", "zero1", in_file(_OPTIM1, flip(in_member("data/6"))), BROKEN, "rank_1_mp_rank_00_optim_states", "data/6", seen="data")
_add("zero1: a bit flipped in a moment", "zero1", in_file(_OPTIM0, flip(in_member("data/1"))), BROKEN, "rank_0_mp_rank_00_optim_states", "data/1", seen="data")
_add("zero1: a bit flipped in a weight", "zero1", in_file(_MODEL, flip(in_member("data/4"))), BROKEN, _MODEL, "data/4", seen="data")
_add("zero3: a bit flipped in a master", "zero3", in_file("*rank_2_*optim*", flip(in_member("data/6"))), BROKEN, "rank_2_mp_rank_00_optim_states", "data/6", seen="data")
_add("zero3: a bit flipped in a frozen slice", "zero3", in_file("*rank_3_*model*", flip(in_member("data/33"))), BROKEN, "rank_3_mp_rank_00_model_states", "data/33", seen="data")
_add("pipeline: a bit flipped in a layer", "pipeline", in_file("layer_01-model_01*", flip(in_member("data/1"))), BROKEN, "layer_01-model_01", "data/1", seen="data")
_add("pipeline: a bit flipped in a master", "pipeline", in_file("*mp_rank_03_optim*", flip(in_member("data/6"))), BROKEN, "mp_rank_03_optim_states", "data/6", seen="data")
_add("torch: a bit flipped in a tensor", "model.pt", in_file("", flip(in_member("data/3"))), BROKEN, "model.pt", "data/3", seen="data")
_add("universal: a bit flipped in a tensor", "universal", in_state("fp32"), BROKEN, f"{_LOOKED_AT}/master", seen="data")
_add("universal: a bit flipped in a header", "universal", in_file(_PACK, flip(lambda data: 20)), BROKEN, "header of pack 0", seen="spare")

# Files that are not there, or are those of others

_add_all(
    "zero1",
    [
        ("the first shard is missing", in_file(_OPTIM0, remove), BROKEN, ("_pp_rank_0_mp_rank_00_optim", "is missing")),
        ("the last shard is missing", in_file(_OPTIM1, remove), BROKEN, ("2", "files of 1 are here")),
        ("all shards are missing", remove_all("*optim_states.pt"), BROKEN, ("global_step5", "no optimizer file")),
        ("the model file is missing", in_file(_MODEL, remove), BROKEN, ("mp_rank_00_model_states.pt is missing",)),
        ("all files are missing", remove_all("*.pt"), NOT_FOUND, ("latest", "global_step5", "not a checkpoint")),
        ("a shard of a later step", later_step, BROKEN, ("global_step5", "rank_1", "`step` is 5.0", "8.0")),
        ("a shard of another run", of_another_run(_OPTIM1), BROKEN, ("rank_1_mp_rank_00_optim_states.pt", "do not belong to the weights")),
        ("a model of another run", of_another_run(_MODEL), BROKEN, ("optim_states.pt", "do not belong to the weights")),
        ("two shards swapped", swap(_OPTIM0, _OPTIM1), BROKEN, ("optim_states.pt", "was saved as")),
        ("one shard twice", in_file(_OPTIM0, lambda p: shutil.copyfile(p, file_in(p.parent, _OPTIM1))), BROKEN, ("optim_states", "was saved as")),
        ("a shard of one rank under two names", again(_OPTIM1, "zero_pp_rank_1_mp_rank_00_optim_states.pt"), BROKEN, ("bf16_zero_pp_rank_1", "both of one rank")),
        ("a shard of a larger run left over", again(_OPTIM1, "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"), BROKEN, ("rank_2_mp_rank_00_optim_states.pt was saved as",)),
        ("a file of stage 3 left over", again(_MODEL, _MODEL3), BROKEN, ("global_step5", "stage 3")),
        ("a shard of an absurd rank", again(_OPTIM1, "bf16_zero_pp_rank_99999999999_mp_rank_00_optim_states.pt"), BROKEN, ("_pp_rank_2_mp_rank_00_optim", "is missing")),
        ("a model file of an absurd rank", again(_MODEL, f"mp_rank_{'9' * 60}_model_states.pt"), BROKEN, ("mp_rank_01_model_states.pt is missing",)),
        ("a model file of another rank only", in_file(_MODEL, lambda p: p.rename(p.with_name("mp_rank_01_model_states.pt"))), BROKEN, ("mp_rank_00_model_states.pt is missing",)),
        ("a shard is a folder", in_file(_OPTIM1, folder_instead), NOT_FOUND, ("rank_1", "not a regular file")),
        ("a shard is a pipe", in_file(_OPTIM1, pipe_instead), NOT_FOUND, ("rank_1", "not a regular file")),
        ("a shard links to itself", in_file(_OPTIM1, loop_instead), NOT_FOUND, ("rank_1", "symbolic links")),
        ("a shard links to nowhere", in_file(_OPTIM1, nowhere_instead), NOT_FOUND, ("rank_1", "No such file")),
        ("the model file is a pipe", in_file(_MODEL, pipe_instead), NOT_FOUND, (_MODEL, "not a regular file")),
        ("bytes in front of a shard", in_file(_OPTIM1, add(b"#!/bin/sh\n", front=True)), BROKEN, ("rank_1", "neither an archive")),
        ("bytes behind a shard", in_file(_OPTIM1, add(b"\n")), BROKEN, ("rank_1", "appended")),
        ("a shard of zeros", in_file(_OPTIM1, lambda p: p.write_bytes(bytes(p.stat().st_size))), BROKEN, ("rank_1", "begins with zeros")),
        ("a shard of text", in_file(_OPTIM1, write(b"version https://git-lfs.github.com/spec/v1\n")), BROKEN, ("rank_1", "Git LFS")),
        ("states offloaded", lambda root: (root / "global_step5" / "offloaded_tensors").mkdir(), UNSUPPORTED, ("global_step5", "swap files")),
    ],
)
_add_all(
    "zero1",
    [
        (f"`latest` {what}", in_file("latest", *([harm] if callable(harm) else [write(harm)])), code, ("latest", *says))
        for what, harm, code, says in [
            ("names another step", b"global_step9", NOT_FOUND, ("global_step9", "global_step5")),
            ("is empty", b"", BROKEN, ("not the name of a folder",)),
            ("is binary", bytes(range(256)), BROKEN, ("not the name of a folder",)),
            ("leads elsewhere", b"../zero1/global_step5", BROKEN, ("not the name of a folder", "global_step5")),
            ("is absolute", b"/etc", BROKEN, ("not the name of a folder",)),
            ("is the folder above", b"..", BROKEN, ("not the name of a folder",)),
            ("is endless", b"global_step5" * 1000, BROKEN, ("not the name of a folder",)),
            ("controls the terminal", b"\x1b[2Jgone", NOT_FOUND, (r"\x1b[2Jgone",)),
            ("holds a NUL", b"global\0step", NOT_FOUND, (r"\x00",)),
            ("links to itself", loop_instead, NOT_FOUND, ("holds", "global_step5")),
        ]
    ],
)
_add("zero1: `latest` is a pipe", "zero1", in_file("latest", pipe_instead), NOT_FOUND, "not a regular file", "latest")

# What the files say

_SHAPES = ("param_shapes", 0, "word.weight")
_STATE = "optimizer_state_dict"
_add_all(
    "zero1",
    [
        ("a shape is absurd", in_file(_MODEL, tree(put(*_SHAPES, value=(1 << 40, 1 << 20)))), BROKEN, ("group 0", "elements")),
        ("a shape is negative", in_file(_MODEL, tree(put(*_SHAPES, value=(-256, 32)))), BROKEN, (_MODEL, "not a shape")),
        ("a shape is text", in_file(_MODEL, tree(put(*_SHAPES, value="256"))), BROKEN, (_MODEL, "not a shape")),
        ("a shape is another", in_file(_MODEL, tree(put(*_SHAPES, value=(32, 256)))), BROKEN, ("word.weight",)),
        ("a shape is smaller", in_file(_MODEL, tree(put(*_SHAPES, value=(255, 32)))), BROKEN, ("word.weight",)),
        ("a parameter is not listed", in_file(_MODEL, tree(drop(*_SHAPES))), BROKEN, ("optim_states.pt",)),
        ("a group is not listed", in_file(_MODEL, tree(drop("param_shapes", 1))), BROKEN, ("group",)),
        ("a weight is not there", in_file(_MODEL, tree(drop("module", "head.weight"))), BROKEN, ("head.weight",)),
        ("no weights are there", in_file(_MODEL, tree(put("module", value={}))), BROKEN, ("word.weight",)),
        ("the weights are text", in_file(_MODEL, tree(put("module", value="here"))), BROKEN, ("global_step5",)),
        ("the shapes are a number", in_file(_MODEL, tree(put("param_shapes", value=7))), BROKEN, (_MODEL, "param_shapes")),
        ("a model file without anything", in_file(_MODEL, only_pickle(pickle.dumps({}, 2))), BROKEN, ("global_step5",)),
        ("a model file of a list", in_file(_MODEL, only_pickle(pickle.dumps([], 2))), BROKEN, (_MODEL, "mapping")),
        ("a shard of a list", in_file(_OPTIM1, only_pickle(pickle.dumps([], 2))), BROKEN, ("rank_1", "mapping")),
        ("a shard without a state", in_file(_OPTIM1, tree(drop(_STATE))), BROKEN, ("rank_1", _STATE)),
        ("a shard without masters", in_file(_OPTIM1, tree(drop(_STATE, "single_partition_of_fp32_groups"))), BROKEN, ("rank_1", "fp32_groups")),
        ("a shard without a group's masters", in_file(_OPTIM1, tree(drop(_STATE, "single_partition_of_fp32_groups", 1))), BROKEN, ("rank_1",)),
        ("a shard without moments", in_file(_OPTIM1, tree(drop(_STATE, "base_optimizer_state", "state", 0, "exp_avg"))), BROKEN, ("rank_1",)),
        ("the first shard without moments", in_file(_OPTIM0, tree(drop(_STATE, "base_optimizer_state", "state", 0, "exp_avg"))), BROKEN, ("exp_avg", "rank_1")),
        ("a shard without any moments", in_file(_OPTIM0, tree(put(_STATE, "base_optimizer_state", "state", value={}))), BROKEN, ("optim_states.pt",)),
        ("a shard cut over another count", in_file(_OPTIM1, tree(put(_STATE, "partition_count", value=[4, 4]))), BROKEN, ("rank_1", "split over [2, 4] ranks")),
        ("a shard cut over a negative count", in_file(_OPTIM0, tree(put(_STATE, "partition_count", value=[-2, -2]))), BROKEN, ("split over [-2, 2]",)),
        ("paddings are absurd", in_file(_OPTIM0, tree(put(_STATE, "param_alignment_paddings", value=[[1 << 50] * 11, [0] * 20]))), BROKEN, ("group 0", "elements")),
        ("paddings are too few", in_file(_OPTIM0, tree(put(_STATE, "param_alignment_paddings", value=[[0], [0]]))), BROKEN, ("global_step5", "form of a DeepSpeed checkpoint")),
    ],
)
for _what, _body in ATTACKS.items():
    _add(f"zero1: a pickle {_what}", "zero1", in_file(_OPTIM1, member("data.pkl", pickled(_body))), UNSAFE, "rank_1", "data.pkl")
    _add(f"torch: a pickle {_what}", "model.pt", in_file("", write(pickled(_body))), UNSAFE, "model.pt")
_add("zero1: a pickle of an endless value", "zero1", in_file(_MODEL, only_pickle(pickled(b"}q\0X\1\0\0\0ah\0s"))), BROKEN, "global_step5")
_add("zero1: a pickle nested without end", "zero1", in_file(_MODEL, tree(lambda root: put("lr_scheduler", value=_nested(400))(root))), UNSAFE, "lr_scheduler")

_add_all(
    "zero3",
    [
        ("a shard is missing", in_file("*rank_2_*optim*", remove), BROKEN, ("_pp_rank_2_mp_rank_00_optim_states.pt is missing",)),
        ("the last shard is missing", in_file("*rank_3_*optim*", remove), BROKEN, ("_pp_rank_3_mp_rank_00_optim_states.pt is missing",)),
        ("a model file is missing", in_file("*rank_1_*model*", remove), BROKEN, ("_pp_rank_1_mp_rank_00_model_states.pt is missing",)),
        ("the last rank is missing", remove_all("*rank_3_*"), BROKEN, ("zero_pp_rank_3_mp_rank_00_optim_states.pt is missing", "files of 3")),
        ("all shards are missing", remove_all("*optim_states.pt"), BROKEN, ("_pp_rank_0_mp_rank_00_optim_states.pt is missing",)),
        ("all model files are missing", remove_all("*model_states.pt"), BROKEN, ("model_states", "missing")),
        ("a shard of another count of ranks", in_file("*rank_2_*optim*", tree(put(_STATE, "partition_count", value=2))), BROKEN, ("rank_2", "split over 2 ranks")),
        ("a shard of another step", in_file("*rank_2_*optim*", member("data/0", struct.pack("<f", 8.0))), BROKEN, ("rank_2", "`step` is 5.0", "8.0")),
        ("a model file of another step", in_file("*rank_2_*model*", tree(put("global_steps", value=6))), BROKEN, ("rank_2", "`global_steps` is 5")),
        ("a model file of another version", in_file("*rank_2_*model*", tree(put("ds_version", value="0.9"))), BROKEN, ("rank_2", "`ds_version`")),
        ("a shape is another", in_file("*rank_0_*model*", tree(put(*_SHAPES, value=(4096, 32)))), BROKEN, ("rank_0", "`param_shapes`")),
        ("a shape is smaller", in_file("*rank_0_*model*", tree(put(*_SHAPES, value=(128, 32)))), BROKEN, ("`param_shapes`", "rank_0")),
        ("a frozen slice is missing", in_file("*rank_1_*model*", tree(drop("frozen_param_fragments", "position.weight"))), BROKEN, ("rank_1", "position.weight")),
        ("a shard without masters", in_file("*rank_1_*optim*", tree(drop(_STATE, "fp32_flat_groups"))), BROKEN, ("rank_1", "fp32_flat_groups")),
        ("a shard without a group", in_file("*rank_1_*optim*", tree(drop(_STATE, _STATE, "state", 1))), BROKEN, ("rank_1",)),
    ],
)
_add_all(
    "pipeline",
    [
        ("a rank's shard is missing", in_file("*mp_rank_01_optim*", remove), BROKEN, ("_mp_rank_01_optim_states.pt is missing",)),
        ("a rank's model file is missing", in_file("mp_rank_02_model*", remove), BROKEN, ("mp_rank_02_model_states.pt is missing",)),
        ("the last rank is missing", remove_all("*mp_rank_03_*"), BROKEN, ("mp_rank_03_model_states.pt is missing", "files of 3 are here")),
        ("a layer of one rank is missing", in_file("layer_02-model_01*", remove), BROKEN, ("layer_02", "model_01", "missing")),
        ("a layer of all ranks is missing", remove_all("layer_02-*"), BROKEN, ("2.",)),
        ("all layers are missing", remove_all("layer_*"), BROKEN, ("no model file",)),
        ("layers swapped between ranks", swap("layer_01-model_00*", "layer_01-model_01*"), BROKEN, ("layer_01-model_00", "was saved as")),
        ("layers swapped", swap("layer_01-model_00*", "layer_02-model_00*"), BROKEN, ("was saved as",)),
        ("shards swapped", swap("*mp_rank_00_optim*", "*mp_rank_01_optim*"), BROKEN, ("was saved as",)),
        ("a rank of another step", in_file("mp_rank_02_model*", tree(put("global_steps", value=6))), BROKEN, ("mp_rank_02", "`global_steps` is 5")),
        ("absurd degrees", in_file("mp_rank_00_model*", tree(put("checkpoint_parallel_dimensions", value={"tp_degree": 1 << 60, "pp_degree": 1 << 60}))), BROKEN, ("`tp_degree` is 1152",)),
        ("no degrees", in_file("mp_rank_00_model*", tree(put("checkpoint_parallel_dimensions", value={"tp_degree": 0, "pp_degree": 0}))), BROKEN, ("`tp_degree` is 0",)),
        ("a layer of an absurd number", again("layer_02-model_01*", f"layer_{'9' * 60}-model_{'9' * 60}-model_states.pt"), BROKEN, ("layer_9",)),
        ("a rank has other names", in_file("mp_rank_01_model*", tree(drop("param_shapes", 0, "1.mlp.down.weight"))), BROKEN, ("1.mlp.down.weight",)),
    ],
)

# Safetensors


def _first(fields: dict[str, Any]) -> dict[str, Any]:
    return next(value for key, value in fields.items() if key != "__metadata__")  # type: ignore[no-any-return]


_add_all(
    "model.safetensors",
    [
        (name, harm, code, ("model.safetensors", *says))
        for name, harm, code, says in [
            ("cut to nothing", cut(lambda data: 0), BROKEN, ("the file is empty",)),
            ("cut in its length", cut(lambda data: 5), BROKEN, ("not a safetensors file",)),
            ("cut in its header", cut(lambda data: 100), BROKEN, ("not a safetensors file",)),
            ("cut behind its header", cut(lambda data: 8 + struct.unpack_from("<Q", data)[0]), BROKEN, ("cut short",)),
            ("cut by one byte", cut(lambda data: len(data) - 1), BROKEN, ("cut short",)),
            ("one byte too many", add(b"\0"), BROKEN, ("header describes",)),
            ("an absurd length of the header", write(struct.pack("<Q", 1 << 63) + b"{}"), BROKEN, ("not a safetensors file",)),
            ("a bit flipped in its length", flip(lambda data: 1), BROKEN, ("model.safetensors",)),
            ("a bit flipped in its header", flip(lambda data: 8), BROKEN, ("not valid JSON",)),
            ("a header of a list", header_text(b"[]"), BROKEN, ("not a JSON object",)),
            ("a header nested without end", header_text(b"[" * 100_000), BROKEN, ("not valid JSON",)),
            ("a header with a name twice", header_text(b'{"a":{},"a":{}}'), BROKEN, ("twice",)),
            ("a header of another encoding", header_text('{"é":1}'.encode("latin-1")), BROKEN, ("not valid JSON",)),
            ("a header with an endless number", header_text(b'{"a":' + b"9" * 10_000 + b"}"), BROKEN, ("not valid JSON",)),
            ("an unknown element type", header(lambda fields: _first(fields).update(dtype="F3")), UNSUPPORTED, ("F3",)),
            ("an element type of a list", header(lambda fields: _first(fields).update(dtype=["F32"])), UNSUPPORTED, ("F32",)),
            ("an absurd shape", header(lambda fields: _first(fields).update(shape=[1 << 40, 1 << 40])), BROKEN, ("does not match shape",)),
            ("a negative shape", header(lambda fields: _first(fields).update(shape=[-1])), BROKEN, ("not a shape",)),
            ("a shape of floats", header(lambda fields: _first(fields).update(shape=[1.0])), BROKEN, ("not a shape",)),
            ("a range that is reversed", header(lambda fields: _first(fields).update(data_offsets=[8, 0])), BROKEN, ("range",)),
            ("a range behind the file", header(lambda fields: _first(fields).update(data_offsets=[1 << 40, 1 << 41])), BROKEN, ("does not match shape",)),
            ("a range of negative numbers", header(lambda fields: _first(fields).update(data_offsets=[-8, 0])), BROKEN, ("not a range",)),
            ("two ranges that overlap", header(lambda fields: fields.update(again=dict(_first(fields)))), BROKEN, ("overlap",)),
            ("a hole", header(lambda fields: fields.pop(next(k for k in fields if k != "__metadata__"))), BROKEN, ("gap",)),
            ("metadata that is a list", header(lambda fields: fields.update(__metadata__=[1])), BROKEN, ("__metadata__",)),
        ]
    ],
)


def _first_name(fields: dict[str, Any]) -> str:
    return next(iter(fields["weight_map"]))


_SHARD = "model-00002-of-*"
_add_all(
    "shards",
    [
        ("a file is missing", in_file(_SHARD, remove), BROKEN, ("index.json", "model-00002")),
        ("a file is missing, and the index too", lambda root: (file_in(root, _SHARD).unlink(), file_in(root, "*.json").unlink()), BROKEN, ("model-00002", "missing")),
        ("a file is a folder", in_file(_SHARD, folder_instead), BROKEN, ("model-00002",)),
        ("a file links to itself", in_file(_SHARD, loop_instead), BROKEN, ("model-00002",)),
        ("a file is a pipe", in_file(_SHARD, pipe_instead), BROKEN, ("model-00002",)),
        ("a file is a pipe, and the index is gone", lambda root: (pipe_instead(file_in(root, _SHARD)), file_in(root, "*.json").unlink()), NOT_FOUND, ("model-00002", "not a regular file")),
        ("the index is a pipe", in_file("*.json", pipe_instead), NOT_FOUND, ("index.json", "not a regular file")),
        ("the index is a folder", in_file("*.json", folder_instead), NOT_FOUND, ("index.json", "not a regular file")),
        ("two files swapped", swap(_SHARD, "model-00001-of-*"), BROKEN, ("index.json", "model-0000")),
        ("the index is no JSON", in_file("*.json", write(b"{")), BROKEN, ("index.json", "not valid JSON")),
        ("the index is empty", in_file("*.json", write(b"")), BROKEN, ("index.json", "not valid JSON")),
        ("the index is a list", in_file("*.json", write(b"[]")), BROKEN, ("index.json", "not a JSON object")),
        ("the index maps nothing", index(lambda fields: fields.pop("weight_map")), BROKEN, ("weight_map",)),
        ("the index maps to numbers", index(lambda fields: fields["weight_map"].update(a=1)), BROKEN, ("weight_map",)),
        ("the index leads elsewhere", index(lambda fields: fields["weight_map"].update(a="../model.safetensors")), UNSAFE, ("../model.safetensors",)),
        ("the index leads to a root", index(lambda fields: fields["weight_map"].update(a="/etc/passwd")), UNSAFE, ("/etc/passwd",)),
        ("the index leads to a NUL", index(lambda fields: fields["weight_map"].update(a="a\0b")), BROKEN, ("index.json", r"\x00")),
        ("the index names a tensor that is not there", index(lambda fields: fields["weight_map"].update(a=fields["weight_map"][_first_name(fields)])), BROKEN, ("tensor `a`",)),
        ("the index lacks a tensor", index(lambda fields: fields["weight_map"].pop(_first_name(fields))), BROKEN, ("index.json", "the index states")),
    ],
)

# Universal

_add_all(
    "universal",
    [
        ("the manifest is missing", in_file("manifest.json", remove), BROKEN, ("incomplete checkpoint", "manifest.json")),
        ("the manifest is empty", in_file("manifest.json", write(b"")), BROKEN, ("manifest.json",)),
        ("the manifest is cut", in_file("manifest.json", cut(lambda data: len(data) // 2)), BROKEN, ("manifest.json", "checksum")),
        ("the manifest is cut by one byte", in_file("manifest.json", cut(lambda data: len(data) - 1)), BROKEN, ("manifest.json", "checksum")),
        ("a bit flipped in the manifest", in_file("manifest.json", flip(lambda data: len(data) // 2)), BROKEN, ("manifest.json", "checksum")),
        ("a bit flipped in the manifest's checksum", in_file("manifest.json", flip(lambda data: 30)), BROKEN, ("manifest.json",)),
        ("the manifest has another line", in_file("manifest.json", add(b"\n")), BROKEN, ("manifest.json", "checksum")),
        ("the index is missing", in_file(_INDEX, remove), BROKEN, (_INDEX, "index of the checkpoint is missing")),
        ("the index is empty", in_file(_INDEX, write(b"")), BROKEN, (_INDEX, "checksum")),
        ("the index is cut", in_file(_INDEX, cut(lambda data: len(data) // 2)), BROKEN, (_INDEX, "checksum")),
        ("the index is longer", in_file(_INDEX, add(b"\0")), BROKEN, (_INDEX, "longer")),
        ("a bit flipped in the index", in_file(_INDEX, flip(lambda data: len(data) // 2)), BROKEN, (_INDEX, "checksum")),
        ("a bit flipped in the header of the index", in_file(_INDEX, flip(lambda data: 20)), BROKEN, (_INDEX, "checksum")),
        ("a pack is missing", in_file(_PACK, remove), BROKEN, (_PACK, "missing")),
        ("all packs are missing", lambda root: shutil.rmtree(root / "packs"), BROKEN, ("missing",)),
        ("a pack is cut", in_file(_PACK, cut(lambda data: len(data) - 1)), BROKEN, (_PACK, "bytes")),
        ("a pack is longer", in_file(_PACK, add(b"\0")), BROKEN, (_PACK, "bytes")),
        ("a pack links to itself", in_file(_PACK, loop_instead), NOT_FOUND, (_PACK, "symbolic links")),
        ("a format of the future", field("version", value=9), UNSUPPORTED, ("manifest.json", "version 9")),
        ("another format", field("format", value="mine"), BROKEN, ("manifest.json",)),
        ("another content id", field("content", value="blake2b-256:00"), BROKEN, ("content",)),
        ("no content id", forged(forgery.drop("content")), BROKEN, ("content",)),
        ("no packs", forged(forgery.drop("packs")), BROKEN, ("packs is missing",)),
        ("packs of text", field("packs", value="all"), BROKEN, ("packs is not a list",)),
        ("a pack of text", field("packs", value=["all"]), BROKEN, ("packs",)),
        ("a pack that is shorter", field("packs", 0, 0, value=50_000), BROKEN, ("pack 0",)),
        ("no index", forged(forgery.drop("index")), BROKEN, ("index is missing",)),
        ("an index of text", field("index", value="all"), BROKEN, ("index is not an object",)),
        ("an index of an absurd length", field("index", "nbytes", value=1 << 60), BROKEN, (_INDEX, "checksum")),
        ("a negative step", field("origin", "step", value=-1), BROKEN, ("origin.step",)),
        ("a version of a list", field("origin", "version", value=[1]), BROKEN, ("version",)),
        ("a step of text", field("origin", "step", value="five"), BROKEN, ("origin.step",)),
        ("extras that are no typed values", field("extras", value={"a": {"$int": []}}), BROKEN, ("typed value",)),
        ("extras of an unknown type", field("extras", value={"a": {"$exec": "1"}}), BROKEN, ("typed value",)),
        ("extras of an absurd array", field("extras", value={"a": {"$array": {"dtype": "<f8", "data": "", "shape": [1 << 60]}}}), BROKEN, ("typed value",)),
        ("extras of objects in an array", field("extras", value={"a": {"$array": {"dtype": "|O", "data": "AAAAAAAAAAA=", "shape": [1]}}}), BROKEN, ("typed value",)),
        ("an unknown role", forged(forgery.number("parameter.role", 0, 77)), BROKEN, ("parameter.role",)),
        ("a name of bytes that are no text", forged(forgery.number("parameter.names", 0, 255)), BROKEN, ("UTF-8",)),
        ("an unknown element type", field("dtypes", 0, value="object"), BROKEN, ("dtypes",)),
        ("an absurd shape", sizes("fp32", 1 << 40), BROKEN, (f"`{_LOOKED_AT}` master", "shape")),
        ("a shape beyond 64 bits", sizes("fp32", (1 << 64) - 1), BROKEN, (f"`{_LOOKED_AT}` master", "shape")),
        ("too many axes", rank("fp32", 100), BROKEN, ("64 dimensions",)),
        ("a shape that does not fit", sizes("fp32", 3), BROKEN, (f"`{_LOOKED_AT}` master", "shape")),
        ("a state behind its pack", column("state.offset", "fp32", 1 << 40), BROKEN, ("pack 0",)),
        ("a state in the header", column("state.offset", "fp32", 0), BROKEN, ("pack 0",)),
        ("a state of another length", column("state.nbytes", "fp32", 12), BROKEN, (f"`{_LOOKED_AT}` master",)),
        ("a state in a pack that is not there", column("state.pack", "fp32", 7), BROKEN, ("number of a pack",)),
        ("a state stored in an unknown way", column("state.storage", "fp32", 9), BROKEN, ("state.storage",)),
        ("a derived codec of the future", codec("param", {"name": "../x"}, "fp32"), UNSUPPORTED, (_LOOKED_AT, "../x")),
        ("a codec of text", field("codecs", 1, value="zstd"), BROKEN, ("codecs",)),
        ("a base that is not there", codec("param", {"name": "rounded"}, "ghost"), BROKEN, ("base",)),
        ("a base that is itself", codec("param", {"name": "rounded"}, "param"), BROKEN, ("base",)),
        ("a checksum of text", field("packs", 0, 2, value="trust me"), BROKEN, ("checksum",)),
    ],
)
_add("universal: two parameters swapped", "universal", exchanged("blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight", "fp32"), BROKEN, "mlp.up.weight", seen="data")


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# Files of torch


def _ours(change: Callable[[Any], object]) -> Harm:
    return in_file("", tree(lambda root: change(root["extras"]["ckpt"])))


_add_all(
    "model.pt",
    [
        ("a member that leads elsewhere", in_file("", members(lambda held: held.update({"../../escaped": b"x"}))), UNSAFE, ("../../escaped",)),
        ("a member of another folder", in_file("", members(lambda held: held.update({"other/data/0": b"x"}))), UNSAFE, ("other/data/0",)),
        ("a TorchScript program", in_file("", members(lambda held: held.update({"archive/code/a.py": b"x"}))), UNSUPPORTED, ("TorchScript",)),
        ("a member is missing", in_file("", members(lambda held: held.pop("archive/data/3"))), BROKEN, ("data/3",)),
        ("a member is shorter", in_file("", member("data/3", lambda data: data[:-4])), BROKEN, ("storage '3'",)),
        ("a member is longer", in_file("", member("data/3", lambda data: data + bytes(8))), BROKEN, ("storage '3'",)),
        ("compressed", in_file("", lambda p: _compressed(p)), UNSUPPORTED, ("compressed",)),
        ("big-endian", in_file("", member("byteorder", b"big")), UNSUPPORTED, ("big-endian",)),
        ("of no byte order", in_file("", member("byteorder", b"mixed")), BROKEN, ("byte order",)),
        ("bytes behind the pickle", in_file("", member("data.pkl", lambda data: data + b"x")), BROKEN, ("1 bytes follow",)),
        ("roles of a list", _ours(put("roles", value=[1])), BROKEN, ("form in which ckpt writes",)),
        ("an unknown role", _ours(put("roles", _LOOKED_AT, value="ghost")), BROKEN, ("ghost",)),
        ("a parameter that is not there", _ours(put("roles", "ghost", value="parameter")), BROKEN, ("ghost",)),
        ("no origin", _ours(drop("origin")), BROKEN, ("origin",)),
        ("a layout of text", _ours(put("origin", "layout", value={"$int": []})), BROKEN, ("typed value",)),
        ("aliases of a number", _ours(put("aliases", value=5)), BROKEN, ("form in which ckpt writes",)),
        ("a weight of text", in_file("", tree(put("model", _LOOKED_AT, value="heavy"))), BROKEN, ("form in which ckpt writes",)),
        ("groups of text", in_file("", tree(put("optimizer", "param_groups", value=["a"]))), BROKEN, ("form in which ckpt writes",)),
        ("two tensors of one name", in_file("", tree(lambda root: _ambiguous(root))), BROKEN, ("a.b", "two")),
        ],
)
_add_all(
    "legacy",
    [
        ("cut in its pickle", in_file("", cut(lambda data: 60)), BROKEN, ("legacy",)),
        ("cut in front of its tensors", in_file("", cut(lambda data: len(data) - 24)), BROKEN, ("legacy",)),
        ("cut by one byte", in_file("", cut(lambda data: len(data) - 1)), BROKEN, ("legacy", "truncated")),
        ("one byte too many", in_file("", add(b"\0")), BROKEN, ("legacy", "1 bytes follow")),
        ("another length of a tensor", in_file("", flip(lambda data: len(data) - 24)), BROKEN, ("legacy", "elements")),
        ("an absurd length of a tensor", in_file("", flip(lambda data: len(data) - 18)), BROKEN, ("legacy", "elements")),
        ("another version", in_file("", lambda p: p.write_bytes(p.read_bytes().replace(b"M\xe9\x03.", b"M\xea\x03.", 1))), BROKEN, ("legacy", "1002")),
        ("another magic", in_file("", flip(lambda data: 6)), BROKEN, ("legacy", "bytes follow the pickle")),
    ],
)


# What no header shows, but the names or the blocks do

_add("zero3: a frozen shape is another", "zero3", in_file("*rank_0_*model*", tree(put("frozen_param_shapes", "position.weight", value=(64, 64)))), BROKEN, "`frozen_param_shapes`", "rank_0")
_add("model.pt: a group of names that are not there", "model.pt", in_file("", tree(put("optimizer", "param_groups", 0, "params", value=["ghost"]))), BROKEN, "ghost", "group 0", seen="data")
_add("model.pt: an alias of nothing", "model.pt", _ours(put("aliases", "other", value="ghost")), BROKEN, "ghost", "other", seen="data")
_add("universal: an alias of nothing", "universal", field("aliases", "other", value="ghost"), BROKEN, "ghost", "other", seen="data")
_add("universal: a group of names that are not there", "universal", field("groups", 0, "parameters", value=[[0, 1 << 20]]), BROKEN, "groups")
# fmt: on


def _compressed(path: Path) -> None:
    with zipfile.ZipFile(path) as old:
        held = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in held.items():
            new.writestr(name, data)


def _ambiguous(root: Any) -> None:
    weights = list(root["model"].values())
    root.clear()
    root.update({"a.b": weights[0], "a": {"b": weights[5]}})


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
