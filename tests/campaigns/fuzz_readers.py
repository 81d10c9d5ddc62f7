"""Readers take any bytes: a script that changes what they read, in form and with right checksums.

The property is that each input ends in a result or in a `CkptError`: no other exception, no exit code 70, no more time
than `SECONDS`. What executes lines of ckpt that nothing executed before is kept and changed further (coverage guidance
by `sys.settrace`). Each kind of failure is reported once, with the input.
"""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import save_file

from ckpt.pipeline import receipts
from ckpt.pipeline.job_note import JobNote
from ckpt.shadow import described
from ckpt_formats.containers.ocdbt import MANIFEST, MANIFEST_MAGIC, NODE_MAGIC, ValueRange, read_database
from ckpt_formats.containers.ocdbt_write import database, framed
from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.tensor import ZeroBlob
from ckpt_formats.core.values import brief, tensor_names
from ckpt_formats.universal.gradients import layout as layouts
from damage import SAMPLES, ckpt, member
from forged import forge, signed
from gguf_models import write_model
from gradient_logs import small_log
from run import Round

SECONDS = 20.0
"""Seconds of the processor that one input may take, with tracing."""
_SLICE = 10.0
"""Seconds of this process that a round takes."""
HANGS = 300.0
"""Seconds of the clock after which an input hangs: threads wait for each other. A busy machine takes less."""
WORDS = ("", "x", "../x", "$", "$tensor", "\ud800", "\0", "a" * 5000, "float32", ",", "<U1", "parameter", "weight")
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    64,
    255,
    1 << 16,
    1 << 20,
    1 << 31,
    1 << 32,
    1 << 53,
    1 << 62,
    1 << 63,
    1 << 64,
    10**30,
    10**400,
)
ODD = (
    *(None, True, False, [], {}, [[]], {"": 0}, 0.5, -0.0, 1e308),
    *({"$int": "0x" + "f" * 300}, {"$tensor": "x"}, {"$tuple": [1, 2]}, {"$float": "7ff8000000000000"}),
    *({"$dict": [[1, 2], [{"$tuple": []}, 3]]}, {"$set": [1]}, {"$complex": [10**400, 0]}, {"$global": ["a", "b"]}),
    *({"$object": {"class": ["a", "b"]}}, {"$array": {"dtype": "<f4", "data": "AAAAAA==", "shape": [1]}}),
    *({"$array": {"dtype": "<U1", "data": "////fw=="}}, {"$std": {"class": ["collections", "Counter"], "items": []}}),
)


# Changes


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in some JSON, below its root."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*at, key)
        yield from places(tree[key], (*at, key))


def value_at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def changed_tree(tree: Any, random: Random) -> Any:
    """A copy of some JSON that is otherwise in a few places."""
    tree = deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        paths = list(places(tree))
        if not paths:
            return random.choice(ODD)
        path = random.choice(paths)
        holder, key = value_at(tree, path[:-1]), path[-1]
        change = random.randrange(8)
        if change == 0:
            del holder[key]
        elif change == 1:
            holder[key] = deepcopy(value_at(tree, random.choice(paths)))
        elif change == 2:
            holder[key] = deepcopy(random.choice(ODD))
        elif change == 3 and isinstance(holder, dict):
            holder[random.choice(WORDS)] = holder.pop(key)
        elif change == 4 and isinstance(holder, list):
            holder[key:key] = [deepcopy(holder[key])] * random.choice((1, 2, 70))
        else:
            holder[key] = _changed_leaf(holder[key], random)
    return tree


def _changed_leaf(value: Any, random: Random) -> Any:
    if isinstance(value, str):
        at = random.randrange(len(value) + 1)
        return random.choice((value[:at], value[:at] + random.choice(WORDS) + value[at:], random.choice(WORDS), 7))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return random.choice(
            (value + 1, value - 1, -value, random.choice(NUMBERS), float(value) if abs(value) < 1e300 else 1)
        )
    return random.choice((*NUMBERS, *WORDS))


def changed_bytes(data: bytes, random: Random) -> bytes:
    """Bytes of which a few are otherwise, missing, or there again."""
    content = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        at = random.randrange(len(content) + 1)
        change = random.randrange(6)
        if change == 0 and at < len(content):
            content[at] ^= 1 << random.randrange(8)
        elif change == 1 and at < len(content):
            content[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        elif change == 2:
            del content[at : at + random.choice((1, 2, 4, 8, 64))]
        elif change == 3:
            content[at:at] = random.randbytes(random.choice((1, 2, 4, 8)))
        elif change == 4:
            content[at : at + 8] = struct.pack(random.choice("<>") + "q", random.choice((0, 1, -1, 1 << 31, 1 << 62)))
        else:
            other = random.randrange(len(content) + 1)
            content[at:at] = content[other : other + random.choice((1, 4, 16, 64))]
    return bytes(content)


# Targets


@dataclass
class Target:
    """A reader: inputs that it takes, how they are changed, and what reads one in an empty folder."""

    name: str
    seeds: list[Any]
    change: Callable[[Any, Random], Any]
    read: Callable[[Any, Path], object]
    kept: list[Any] = field(default_factory=list)


class Fault(Exception):
    """The command ended with exit code 70."""


def run(*arguments: object) -> int:
    """Run the command within this process. Raises `Fault` with what it printed."""
    ran = ckpt(*arguments)
    if ran.code == 70:
        raise Fault(ran.err)
    return ran.code


def commands(path: Path) -> None:
    """What commands do with a checkpoint."""
    code = run("inspect", path, "-v")
    if code == 0:
        run("inspect", path, "--json")
        run("verify", path, "-v")
        for number, options in enumerate((("universal",), ("torch",), ("safetensors",), ("dcp",))):
            run("convert", path, path.parent / f"out{number}", "--to", *options, "-v")


def make_targets(folder: Path) -> list[Target]:
    """All targets, with small good inputs that are made in a folder."""
    return [
        _typed(),
        *_universal(folder),
        *_logs(folder),
        _safetensors(),
        _hf(folder),
        _msgpack(folder),
        *_orbax(folder),
        _gguf(folder),
        *_torch(folder),
        _receipts(),
        _job(),
        _state(),
    ]


def _typed() -> Target:
    def read(tree: Any, folder: Path) -> None:
        value = decode(json.loads(json.dumps(tree)), folder / "typed.json")
        encode(value)
        brief(value)
        list(tensor_names(value))

    return Target(
        "typed",
        [{"values": list(ODD), "deep": {"$tuple": [{"$size": [1, 2]}, {"$bytes": "AA=="}]}}],
        changed_tree,
        read,
    )


def _copied(source: Path, folder: Path) -> Path:
    path = folder / source.name
    shutil.copytree(source, path) if source.is_dir() else shutil.copyfile(source, path)
    return path


def _small_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "a.bias": np.ones(3, np.float16)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def _universal(folder: Path) -> list[Target]:
    stage = next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2"))
    sources = [folder / "of-deepspeed", folder / "of-safetensors", folder / "compressed"]
    assert run("convert", stage, sources[0], "--to", "universal") == 0
    assert run("convert", _small_model(folder / "small"), sources[1], "--to", "universal") == 0
    assert run("compress", stage, sources[2]) == 0
    fields = [(number, json.loads((one / "manifest.json").read_bytes())) for number, one in enumerate(sources)]
    for _, one in fields:
        del one["checksum"]

    def manifest(seed: tuple[int, Any], place: Path) -> None:
        path = _copied(sources[seed[0]], place)

        def change(forged: Any) -> None:
            forged.fields.clear()
            forged.fields.update(deepcopy(seed[1]))

        try:
            forge(path, change)
        except Exception:  # the helper of tests computes ids of what may have none
            (path / "manifest.json").write_bytes(signed(seed[1]))
        commands(path)

    def columns(seed: tuple[int, int], place: Path) -> None:
        random = Random(seed[1])
        path = _copied(sources[seed[0]], place)

        def change(forged: Any) -> None:
            for _ in range(random.choice((1, 1, 2))):
                column = forged.columns[random.choice(sorted(forged.columns))]
                if column.size:
                    limit = int(np.iinfo(column.dtype).max) if column.dtype.kind in "iu" else 1
                    value = random.choice(
                        (0, 1, 2, limit, limit // 2, limit // 3, int(random.choice(column.reshape(-1))))
                    )
                    column.reshape(-1)[random.randrange(column.size)] = value

        with suppress(ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, MemoryError):
            forge(path, change)
        commands(path)

    return [
        Target("manifest", fields, lambda seed, random: (seed[0], _dict(changed_tree(seed[1], random))), manifest),
        Target("index", [(0, 0), (1, 0), (2, 0)], lambda seed, random: (seed[0], random.randrange(1 << 60)), columns),
    ]


def _dict(tree: Any) -> dict[str, Any]:
    return tree if isinstance(tree, dict) else {"format": tree}


def _logs(folder: Path) -> list[Target]:
    log = small_log()
    plain = json.loads(layouts.dump(log.layout))
    del plain["checksum"]
    log.write(folder / "run")
    chain = json.loads((folder / "run" / "chain.json").read_bytes())
    del chain["checksum"]

    def read(run_folder: Path) -> None:
        for command in ("inspect", "verify"):
            run(command, run_folder, "-v")
        for step in (1, 3):
            run("inspect", f"{run_folder}@{step}", "-v")
        run("convert", f"{run_folder}@3", run_folder.parent / "out", "-v")

    def layout(tree: Any, place: Path) -> None:
        log.write(place / "run", layout=signed(tree))
        read(place / "run")

    def listed(tree: Any, place: Path) -> None:
        log.write(place / "run", chain=signed(tree))
        read(place / "run")

    def records(seed: Any, place: Path) -> None:
        other = log.copy()
        for (rank, number), meta in seed:
            other.ranks[rank][number].meta = meta
        other.write(place / "run")
        read(place / "run")

    metas = [
        [((rank, number), one.meta)] for rank, entries in enumerate(log.ranks) for number, one in enumerate(entries)
    ]

    def changed(seed: Any, random: Random) -> Any:
        (place, _) = random.choice(metas)[0]
        return [(place, _dict(changed_tree(log.ranks[place[0]][place[1]].meta, random)))]

    return [
        Target("layout", [plain], changed_tree, layout),
        Target("chain", [chain], changed_tree, listed),
        Target("records", metas, changed, records),
    ]


def _safetensors() -> Target:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "b": {"dtype": "BF16", "shape": [0, 5], "data_offsets": [48, 48]},
        "c": {"dtype": "F4", "shape": [2, 4], "data_offsets": [48, 52]},
    }

    def read(tree: Any, folder: Path) -> None:
        text = json.dumps(tree).encode()
        path = folder / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(52))
        commands(path)

    return Target("safetensors", [header], changed_tree, read)


def _hf(folder: Path) -> Target:
    config = {
        "model_type": "llama",
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 3,
    }
    index = {
        "metadata": {"total_size": 54},
        "weight_map": {"a.weight": "model.safetensors", "a.bias": "model.safetensors"},
    }
    model = _small_model(folder / "hf")
    seed = {"config.json": config, "model.safetensors.index.json": index, "generation_config.json": {"a": [1, 2.5]}}
    seed["trainer_state.json"] = {"global_step": 3, "epoch": 0.5, "log_history": []}
    seed["quantization"] = {"quant_method": "gptq", "bits": 4}

    def read(tree: Any, place: Path) -> None:
        path = place / "hf"
        path.mkdir()
        shutil.copyfile(model, path / "model.safetensors")
        for name, content in (tree if isinstance(tree, dict) else {}).items():
            with suppress(OSError, ValueError):
                if "/" not in name:
                    (path / name).write_text(json.dumps(content))
        commands(path)

    return Target("hf", [seed], changed_tree, read)


def _msgpack(folder: Path) -> Target:
    source = _small_model(folder / "msgpack")
    assert run("convert", source, folder / "m.msgpack") == 0

    def read(data: bytes, place: Path) -> None:
        (place / "m.msgpack").write_bytes(data)
        commands(place / "m.msgpack")

    return Target("msgpack", [(folder / "m.msgpack").read_bytes()], changed_bytes, read)


def _orbax(folder: Path) -> list[Target]:
    """A tree whose JSON is changed, a database whose nodes are changed under right checksums, and an old tree."""
    folders: dict[str, Path] = {}
    for name, options in (("second", ()), ("third", ("--zarr3", "--parts-per-axis", 2))):
        folders[name] = folder / f"orbax-{name}"
        assert run("convert", _small_model(folder / "orbax"), folders[name], "--to", "orbax", *options) == 0
    seeds = []
    for path in folders.values():
        values = read_database(path)
        arrays = {key: json.loads(value) for key, value in values.items() if isinstance(value, bytes)}
        chunks = {key: list(value) for key, value in values.items() if isinstance(value, ValueRange)}
        files = {name: json.loads((path / name).read_bytes()) for name in ("_METADATA", "_CHECKPOINT_METADATA")}
        data = {one.relative_to(path).as_posix(): one.read_bytes() for one in path.glob("d/0*")}
        seeds.append({"arrays": arrays, "chunks": chunks, "files": files, "data": data})

    def change(seed: Any, random: Random) -> Any:
        return {**_dict(changed_tree({**seed, "data": None}, random)), "data": seed["data"]}

    def tree(seed: Any, place: Path) -> None:
        path = place / "orbax"
        (path / "d").mkdir(parents=True)
        for file, data in seed["data"].items():
            (path / file).write_bytes(data)
        for file, content in _dict(seed.get("files")).items():
            with suppress(OSError, ValueError):
                if "/" not in file:
                    (path / file).write_text(json.dumps(content))
        with suppress(Exception):  # the writer takes no other values
            values: dict[str, ValueRange | bytes] = {
                key: json.dumps(value).encode() for key, value in _dict(seed.get("arrays")).items()
            }
            values |= {key: ValueRange(*value) for key, value in _dict(seed.get("chunks")).items()}
            nodes, manifest = database(values, "d/nodes")
            (path / "d/nodes").write_bytes(nodes)
            (path / MANIFEST).write_bytes(manifest)
        commands(path)

    nodes = "d/" + "f" * 32
    second = folders["second"]
    parts = {name: (second / name).read_bytes()[14:-4] for name in (MANIFEST, nodes)}

    def change_part(seed: tuple[str, bytes], random: Random) -> tuple[str, bytes]:
        name = random.choice(sorted(parts))
        return name, changed_bytes(seed[1] if seed[0] == name else parts[name], random)

    def node(seed: tuple[str, bytes], place: Path) -> None:
        path = _copied(second, place)
        (path / seed[0]).write_bytes(framed(MANIFEST_MAGIC if seed[0] == MANIFEST else NODE_MAGIC, seed[1]))
        commands(path)

    inner = serialize(
        {"params": {"a": np.ones((2, 3), np.float32), "b": "PLACEHOLDER://params.b"}, "step": 3, "x": [None, (1.5,)]}
    )

    def aggregate(data: bytes, place: Path) -> None:
        (place / "old").mkdir()
        (place / "old" / "checkpoint").write_bytes(data)
        (place / "old" / "params.b").mkdir()
        layout = {"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "<f4", "compressor": None}
        (place / "old" / "params.b" / ".zarray").write_text(json.dumps(layout))
        (place / "old" / "params.b" / "0").write_bytes(bytes(8))
        commands(place / "old")

    listed = [
        {"path": f"{part}/{name}", "shape": [2], "dtype": "float32"}
        for part, name in (("model", "w"), ("tx", "0/mu/w"))
    ]
    by_index = {
        "index": {"format": "tensorstore", "prefixes": {"model": listed[:1], "tx": listed[1:]}},
        "layouts": {
            one["path"]: {"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "<f4", "compressor": None}
            for one in listed
        },
    }

    def indexed(seed: Any, place: Path) -> None:
        path = place / "run-3"
        for name in ("model/w", "tx/0/mu/w"):
            (path / name).mkdir(parents=True)
            (path / name / "0").write_bytes(bytes(8))
            (path / name / ".zarray").write_text(json.dumps(_dict(_dict(seed).get("layouts")).get(name)))
        (path / "tensorstore_index.json").write_text(json.dumps(_dict(seed).get("index")))
        commands(path)

    return [
        Target("orbax", seeds, change, tree),
        Target("orbax-index", [by_index], changed_tree, indexed),
        Target("ocdbt", [(name, parts[name]) for name in sorted(parts)], change_part, node),
        Target("aggregate", [inner], changed_bytes, aggregate),
    ]


def serialize(tree: Any) -> bytes:
    """What Orbax's `msgpack_serialize` makes of a tree."""
    import msgpack

    def leaf(value: Any) -> Any:
        if isinstance(value, tuple):
            return msgpack.ExtType(4, msgpack.packb(list(value), strict_types=True, default=leaf))
        return msgpack.ExtType(1, msgpack.packb((value.shape, value.dtype.name, value.tobytes())))

    packed: bytes = msgpack.packb(tree, strict_types=True, default=leaf)
    return packed


def _gguf(folder: Path) -> Target:
    assert run("convert", write_model(folder / "llama", "llama"), folder / "m.gguf") == 0
    content = (folder / "m.gguf").read_bytes()

    def read(data: bytes, folder: Path) -> None:
        (folder / "m.gguf").write_bytes(data)
        commands(folder / "m.gguf")
        run("convert", folder / "m.gguf", folder / "hf", "--to", "hf")
        run("convert", folder / "m.gguf", folder / "n.gguf", "--outtype", "q8_0")

    # The header is in the first bytes, and one byte of the tensors is like the other.
    return Target("gguf", [content], lambda data, random: changed_bytes(data[:3000], random) + data[3000:], read)


def _torch(folder: Path) -> list[Target]:
    import zipfile

    stage = next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2"))
    assert run("convert", stage, folder / "m.pt", "--to", "torch") == 0
    assert run("convert", _small_model(folder / "dcp"), folder / "as-dcp", "--to", "dcp") == 0
    with zipfile.ZipFile(folder / "m.pt") as archive:
        name = next(one for one in archive.namelist() if one.endswith("/data.pkl"))
        tree = archive.read(name)

    def pickled(data: bytes, place: Path) -> None:
        path = _copied(folder / "m.pt", place)
        member("data.pkl", data)(path)
        commands(path)

    def archived(data: bytes, place: Path) -> None:
        (place / "m.pt").write_bytes(data)
        commands(place / "m.pt")

    def metadata(data: bytes, place: Path) -> None:
        path = _copied(folder / "as-dcp", place)
        (path / ".metadata").write_bytes(data)
        commands(path)

    tail = (folder / "m.pt").read_bytes()
    return [
        Target("pickle", [tree], changed_bytes, pickled),
        Target("archive", [tail], lambda data, random: data[:-4000] + changed_bytes(data[-4000:], random), archived),
        Target("dcp", [(folder / "as-dcp" / ".metadata").read_bytes()], changed_bytes, metadata),
    ]


def _receipts() -> Target:
    seal = ["a", 0, 4, "xxh3-128", "7", "label", 0]
    packed = base64.b64encode(zlib.compress(json.dumps([seal]).encode())).decode()
    seed = {"file": "a", "nbytes": 4, "seals": [seal], "entry": {"x": 1}, "e_tag": "", "read": ["", "", packed]}

    def read(tree: Any, folder: Path) -> None:
        text = json.dumps(tree)
        list(receipts.from_lines([f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n"]))

    return Target("receipts", [seed], changed_tree, read)


def _job() -> Target:
    seed = JobNote("0" * 32, "ckpt", "a", "b", "torch", ("ckpt", "convert"), "/", "2026-01-01", ("a", "b"))

    def read(data: bytes, folder: Path) -> None:
        JobNote.from_json(data, folder / "job.json")

    return Target("job", [seed.to_json()], changed_bytes, read)


def _state() -> Target:
    seed = {"step": 3, "parameters": [["w", "parameter", [["param", "float32", [2]]], {}]], "groups": [], "extras": {}}

    def read(tree: Any, folder: Path) -> None:
        described.load(
            bytearray(json.dumps(tree).encode()), folder, lambda number, shape, dtype: ZeroBlob(shape, dtype), ()
        )

    return Target("state", [seed], changed_tree, read)


# Fuzzing


class Coverage:
    """The lines of ckpt that were executed."""

    def __init__(self) -> None:
        self.lines: set[tuple[CodeType, int]] = set()
        self.new = 0

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Count within."""
        self.new = 0
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if "/ckpt" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        key = (frame.f_code, frame.f_lineno)
        if key not in self.lines:
            self.lines.add(key)
            self.new += 1
        return self._line


class _TooLong(BaseException):
    """The input took longer than `SECONDS` or `HANGS`."""


def one_input(target: Target, seed: Any) -> str | None:
    """What is wrong when an input is read, in short; None if nothing is."""
    with tempfile.TemporaryDirectory(prefix="fuzz-readers-") as folder:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, HANGS)
        try:
            target.read(seed, Path(folder))
        except CkptError:
            return None
        except Fault as fault:
            return _short(str(fault))
        except _TooLong:
            return f"took longer than {SECONDS:g} s of the processor, or {HANGS:g} s"
        except Exception:
            return _short(traceback.format_exc())
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _short(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines()]
    frames = [line for line in lines if line.startswith("File ") and "/ckpt" in line]
    return f"{frames[-1] if frames else ''} | {lines[-1] if lines else ''}"[:400]


def fuzz(targets: list[Target], seconds: float, seed: int, guided: bool = True, most: int = 1 << 60) -> dict[str, Any]:
    """Failures by what is wrong, each with its target and first input, after at most `most` inputs.

    Seconds are those of this process.
    """

    def too_long(number: int, frame: object) -> None:
        raise _TooLong

    before = {number: signal.signal(number, too_long) for number in (signal.SIGALRM, signal.SIGPROF)}
    random, coverage, failures = Random(seed), Coverage(), dict[str, Any]()
    end, count = time.process_time() + seconds, 0
    try:
        while time.process_time() < end and count < most:
            target = targets[count % len(targets)]
            count += 1
            chosen = random.choice(target.kept if target.kept and random.random() < 0.6 else target.seeds)
            changed = target.change(chosen, random)
            with coverage.traced() if guided else nullcontext():
                wrong = one_input(target, changed)
            if wrong is not None and (key := f"{target.name}: {wrong}") not in failures:
                failures[key] = changed
            if coverage.new and wrong is None and len(target.kept) < 2000:
                target.kept.append(changed)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return failures


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    """Fuzz each target for some seconds, in turn, without end."""
    failures = dict[str, Any]()

    def fuzzed(target: Target, number: int) -> dict[str, int]:
        new = {what: one for what, one in fuzz([target], _SLICE, seed + number).items() if what not in failures}
        failures.update(new)
        assert not new, "\n".join(f"{what}\n    input: {str(one)[:600]!r}" for what, one in new.items())
        return {"rounds": 1}

    targets = make_targets(folder)
    for number in itertools.count():
        target = targets[number % len(targets)]
        yield Round(target.name, partial(fuzzed, target, number))
