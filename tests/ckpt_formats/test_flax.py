"""Model weights of Flax: files as `flax.serialization` writes them, by `msgpack`; both ways, and hostile."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt_formats.containers import msgpack as container
from ckpt_formats.core import files
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, CorruptError, NotFoundError, UnsafeError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.engines.flax import Flax
from ckpt_formats.registry.location import detect
from damage import SAMPLES
from damage import ckpt as command
from held import SHAPES, array, checkpoint, everything, parameter

msgpack = pytest.importorskip("msgpack")
ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"


# What flax.serialization does, with the package that it uses


def pack_leaf(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(1, pack_array(value))
    if isinstance(value, np.generic):
        return msgpack.ExtType(3, pack_array(np.asarray(value)))
    if isinstance(value, complex):
        return msgpack.ExtType(2, msgpack.packb((value.real, value.imag)))
    raise TypeError(value)


def pack_array(value: np.ndarray) -> bytes:
    return msgpack.packb((value.shape, value.dtype.name, value.tobytes("C")), use_bin_type=True)


def serialize(tree: Any, max_chunk: int = 1 << 30) -> bytes:
    return msgpack.packb(chunked(tree, max_chunk), default=pack_leaf, strict_types=True)


def chunked(tree: Any, max_chunk: int) -> Any:
    if isinstance(tree, dict):
        return {key: chunked(value, max_chunk) for key, value in tree.items()}
    if not isinstance(tree, np.ndarray) or tree.nbytes <= max_chunk:
        return tree
    step, flat = max(1, max_chunk // tree.itemsize), tree.reshape(-1)
    chunks = [flat[i : i + step] for i in range(0, flat.size, step)]
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(i): length for i, length in enumerate(tree.shape)},
        "chunks": {str(i): chunk for i, chunk in enumerate(chunks)},
    }


def restore(data: bytes) -> Any:
    def leaf(code: int, inner: bytes) -> Any:
        shape, dtype, values = msgpack.unpackb(inner, raw=True)
        assert code == 1
        return np.frombuffer(values, DTYPES[dtype.decode()]).reshape(shape)

    def whole(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        if "__msgpack_chunked_array__" in tree:
            parts = [tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]
            return np.concatenate(parts).reshape([tree["shape"][str(i)] for i in range(len(tree["shape"]))])
        return {key: whole(value) for key, value in tree.items()}

    return whole(msgpack.unpackb(data, ext_hook=leaf, raw=False))


def flat(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    if not isinstance(tree, dict):
        yield keys, tree
        return
    for key, value in tree.items():
        yield from flat(value, (*keys, key))


def bits(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    return values.dtype.name, values.shape, values.tobytes()


def model(seed: int = 0) -> dict[str, Any]:
    """Parameters and running means, as a small network has them."""
    f32, bf16 = DTYPES["float32"], DTYPES["bfloat16"]
    return {
        "params": {
            "embed": {"embedding": array(f32, (40, 8), seed)},
            "layers_0": {"kernel": array(bf16, (8, 24), seed), "bias": array(bf16, (24,), seed + 1)},
            "layers_1": {"kernel": array(f32, (24, 3, 2), seed), "scale": array(f32, (), seed)},
        },
        "batch_stats": {"norm": {"mean": array(f32, (24,), seed + 2)}},
    }


def file(tmp_path: Path, tree: Any, name: str = "flax_model.msgpack", max_chunk: int = 1 << 30) -> Path:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(tree if isinstance(tree, bytes) else serialize(tree, max_chunk))
    return tmp_path / name


# Reading


@pytest.mark.parametrize("max_chunk", [1 << 30, 100, 7])
def test_flax_reads_arrays_bit_for_bit(max_chunk: int, tmp_path: Path) -> None:
    tree = model()
    run = ckpt.open(file(tmp_path, tree, max_chunk=max_chunk))
    assert (run.format, run.origin.engine) == ("flax", "flax")
    expected = {".".join(keys): bits(values) for keys, values in flat(tree)}
    assert {name: bits(read(one.weight)) for name, one in run.items()} == expected
    assert run["batch_stats.norm.mean"].role == "buffer"
    assert run["params.embed.embedding"].role == "parameter"
    assert ckpt.verify(run) == []
    kernel = tree["params"]["layers_1"]["kernel"]
    assert bits(run["params.layers_1.kernel"][3:20:4, 1]) == bits(kernel[3:20:4, 1])


def test_flax_reads_every_type_and_shape(tmp_path: Path) -> None:
    tree = {name: {str(i): array(dtype, shape) for i, shape in enumerate(SHAPES)} for name, dtype in DTYPES.items()}
    run = ckpt.open(file(tmp_path, tree))
    for (name, number), values in flat(tree):
        assert bits(read(run[f"{name}.{number}"].weight)) == bits(values)


def test_flax_reads_the_folder_of_a_model(tmp_path: Path) -> None:
    file(tmp_path / "m", model())
    (tmp_path / "m" / "config.json").write_text("{}")
    run = ckpt.open(tmp_path / "m")
    assert detect(tmp_path / "m").name == "flax"
    assert "params.layers_0.kernel" in run
    assert any("config.json" in notice for notice in run.notices)
    (tmp_path / "m" / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(UnsupportedError, match="several files"):
        ckpt.open(tmp_path / "m")


@pytest.mark.parametrize("width", [1, 16, 70_000])
def test_flax_detects_a_file_by_its_first_bytes(width: int, tmp_path: Path) -> None:
    tree = {f"w{i}": np.float32(i) for i in range(width)}
    assert len(ckpt.open(file(tmp_path, tree, "checkpoint_1000"))) == width
    ckpt.save(ckpt.open(ZERO1), tmp_path / "out", ckpt.Flax())
    assert detect(tmp_path / "out").name == "flax"
    for head in (b"", b"\x80", b"\x81", b"x", b"{}", b"\x80\x02", b"PK\3\4"):
        (tmp_path / "other").write_bytes(head)
        assert not Flax().detect(tmp_path / "other")


def test_flax_reads_plain_values_as_extras(tmp_path: Path) -> None:
    values = {"rate": 0.1, "name": "x" * 40, "none": None, "on": True, "z": 1 + 2j, "empty": {}, "list": [1, -70000]}
    run = ckpt.open(file(tmp_path, {"w": np.ones(3, np.float32), "more": values, "single": np.float32(2)}))
    assert list(run) == ["w", "single"]
    assert run.extras["more.z"] == 1 + 2j
    assert {key: run.extras[f"more.{key}"] for key in ("rate", "name", "none", "on", "empty")} == {
        key: values[key] for key in ("rate", "name", "none", "on", "empty")
    }
    assert (run.extras["more.list.0"], run.extras["more.list.1"]) == (1, -70000)
    assert run["single"][()] == 2


def test_flax_matches_optimizer_states_to_parameters(tmp_path: Path) -> None:
    moment = array(DTYPES["float32"], (4, 2), 5)
    states = {"0": {"mu": {"w": moment}, "hidden": {"v": moment + 1}}, "1": {}}
    run = ckpt.open(file(tmp_path, {"step": 12, "params": {"w": np.ones((4, 2), np.float32)}, "opt_state": states}))
    assert run.step == 12
    assert bits(read(run["w"].states["exp_avg"])) == bits(moment)
    ckpt.save(run, tmp_path / "universal", ckpt.Universal())
    again = ckpt.open(tmp_path / "universal")
    assert bits(read(again.parameters["opt_state/0/hidden/v"].weight)) == bits(moment + 1)


def test_flax_bounds_the_bytes_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "_MAX_READ", 1000)
    tree = {str(i): "text" * 30 for i in range(10)}
    with pytest.raises(UnsafeError, match="more than 1,000 bytes that are not arrays"):
        ckpt.open(file(tmp_path, {"w": np.ones(2, np.float32), **tree}))


def test_orbax_refuses_numbers_that_its_types_do_not_hold(tmp_path: Path) -> None:
    state = {"params": {"w": np.ones(2, np.float32)}, "opt_state": {}, "seed": (1 << 64) - 1}
    with pytest.raises(UnsupportedError, match=r"`seed` is 18446744073709551615, which int64 does not hold"):
        ckpt.save(ckpt.open(file(tmp_path, state)), tmp_path / "out", "orbax")


def test_flax_names_newer_files_of_a_run_that_are_damaged_and_refuses_several_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (9, 10):
        file(tmp_path, {"step": step, "w": np.ones(2, np.float32)}, f"checkpoint_{step}")
    (tmp_path / "checkpoint_11").write_bytes(b"")
    (tmp_path / "log_1").write_text("a text")
    run = ckpt.open(tmp_path)
    assert run.step == 10
    assert any("checkpoint_10 is read, the newest of 2" in notice for notice in run.notices)
    assert any("newer, but damaged" in notice and "checkpoint_11" in notice for notice in run.notices)
    file(tmp_path, {"step": 7, "w": np.ones(2, np.float32)}, "critic_7")
    with pytest.raises(UnsupportedError, match=r"several models are saved here: .*critic_7"):
        ckpt.open(tmp_path)
    opened: list[Path] = []
    monkeypatch.setattr("ckpt_formats.engines.flax.begins_as_dict", opened.append)
    other = tmp_path / "other"
    other.mkdir()
    for number in range(40):
        (other / f"part_{number}").touch()
    assert not Flax().detect(other)
    assert len(opened) < 10


def test_opening_reads_no_array_and_a_slice_only_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path, {"w": np.arange(1 << 18, dtype=np.float32).reshape(512, 512)}, max_chunk=1 << 16)
    total, original = 0, files.Reader.read_into

    def counted(self: Any, path: Path, offset: int, out: memoryview, seal: Any = None) -> None:
        nonlocal total
        total += len(out)
        original(self, path, offset, out, seal)

    monkeypatch.setattr(files.Reader, "read_into", counted)
    run = ckpt.open(path).cast("bf16")
    assert total == 0
    assert run["w"][100:102].shape == (2, 512)
    assert total == 2 * 512 * 4


# Names


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"a": {"b": 1, "c": {"d": 1}}}, ["a.b", "a.c.d"]),
        ({"a": {"b/c": 1}}, ["a.b/c"]),
        ({"a": {"b.c": 1}, "d": 1}, ["a/b.c", "d"]),
        ({"a.b": 1, "a/c": 1}, ["a.b", "a/c"]),
        ({"": {"": 1}, "a": 1}, [".", "a"]),
    ],
)
def test_names_join_the_keys_and_are_split_again(tree: Any, names: list[str], tmp_path: Path) -> None:
    def with_arrays(tree: Any) -> Any:
        return {k: with_arrays(v) for k, v in tree.items()} if isinstance(tree, dict) else np.ones(2, np.int8)

    path = file(tmp_path, with_arrays(tree))
    run = ckpt.open(path)
    assert list(run) == names
    ckpt.save(run, tmp_path / "universal", ckpt.Universal())
    for source in (run, ckpt.open(tmp_path / "universal")):
        (tmp_path / "again.msgpack").unlink(missing_ok=True)
        ckpt.save(source, tmp_path / "again.msgpack", ckpt.Flax())
        assert (tmp_path / "again.msgpack").read_bytes() == path.read_bytes()


def test_flax_refuses_keys_with_both_separators(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="unique"):
        ckpt.open(file(tmp_path, {"a": {"b.c": np.ones(1)}, "d": {"e/f": np.ones(1)}}))


@pytest.mark.parametrize(
    ("separator", "keys"), [(None, ("a", "b/c")), (".", ("a", "b/c")), ("/", ("a.b", "c")), ("", ("a.b/c",))]
)
def test_flax_takes_the_separator_of_the_option(separator: str | None, keys: tuple[str, ...], tmp_path: Path) -> None:
    source = checkpoint([parameter("a.b/c", {"model": np.ones(2, np.float32)})])
    ckpt.save(source, tmp_path / "out.msgpack", ckpt.Flax(separator=separator))
    assert [keys for keys, _ in flat(restore((tmp_path / "out.msgpack").read_bytes()))] == [keys]


# Writing


@pytest.mark.parametrize("max_chunk", [1 << 30, 100, 7])
def test_flax_writes_the_bytes_of_the_package(max_chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_CHUNK", max_chunk)
    path = file(tmp_path, model(), max_chunk=max_chunk)
    result = ckpt.save(ckpt.open(path), tmp_path / "again.msgpack", ckpt.Flax())
    assert (tmp_path / "again.msgpack").read_bytes() == path.read_bytes()
    assert result.files == 1


@pytest.mark.parametrize("nbytes", [0, 1, 4, 100, 240, 260, 65_500, 65_540])
def test_flax_writes_headers_of_all_lengths(nbytes: int, tmp_path: Path) -> None:
    tree = {"k" * (nbytes % 300): np.zeros(nbytes, np.uint8), "é" * 20: np.zeros((nbytes, 1), np.bool_)}
    path = file(tmp_path, tree)
    ckpt.save(ckpt.open(path), tmp_path / "again.msgpack", ckpt.Flax())
    assert (tmp_path / "again.msgpack").read_bytes() == path.read_bytes()


def test_flax_writes_long_headers_of_large_maps_and_arrays() -> None:
    for count in (0, 15, 16, 65_535, 65_536):
        packed = msgpack.packb({str(i): None for i in range(count)})
        assert packed.startswith(container.map_header(count))
    for number in (0, 127, 128, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32):
        assert container.natural_bytes(number) == msgpack.packb(number)
    for text in ("", "a" * 31, "a" * 32, "a" * 255, "a" * 256, "a" * 65_535, "a" * 65_536):
        assert container.text_bytes(text) == msgpack.packb(text)
    ((_, nbytes),) = container.array_pieces((1 << 30,), DTYPES["uint8"])
    assert nbytes == 1 << 30
    pieces = list(container.array_pieces(((1 << 30) + 1, 4), DTYPES["float32"]))
    assert [nbytes for _, nbytes in pieces] == [*[1 << 30] * 16, 16]


def test_flax_returns_a_real_checkpoint(tmp_path: Path) -> None:
    run = ckpt.open(ZERO1)
    plan = ckpt.Job(run, tmp_path / "out.msgpack", ckpt.Flax()).plan()
    assert any("optimizer states" in notice for notice in plan.dropped)
    assert plan.single_file == "flax_model.msgpack"
    ckpt.save(run, tmp_path / "out.msgpack", ckpt.Flax())
    written = restore((tmp_path / "out.msgpack").read_bytes())
    for name in (*run, *run.aliases):
        values = written
        for key in name.split("."):
            values = values[key]
        assert bits(values) == bits(read(run[name].weight))
    back = ckpt.open(tmp_path / "out.msgpack")
    assert set(back) == {*run, *run.aliases}
    ckpt.save(back, tmp_path / "back.safetensors", ckpt.Safetensors())
    assert ckpt.verify(back) == []


def test_flax_writes_everything_that_a_checkpoint_can_hold(tmp_path: Path) -> None:
    source = everything()
    ckpt.save(source, tmp_path / "out.msgpack", ckpt.Flax())
    back = ckpt.open(tmp_path / "out.msgpack")
    for name in (*source, *source.aliases):
        assert bits(read(back[name].weight)) == bits(read(source[name].weight))


def test_flax_refuses_a_tensor_that_is_also_a_dict(tmp_path: Path) -> None:
    for names in (("a", "a.b"), ("a.b", "a"), ("a.b.c", "a.b")):
        source = checkpoint([parameter(name, {"model": np.ones(2, np.float32)}) for name in names])
        with pytest.raises(UnsupportedError, match="dict"):
            ckpt.Job(source, tmp_path / "out.msgpack", ckpt.Flax()).plan()
        ckpt.Job(source, tmp_path / "out.msgpack", ckpt.Flax(separator="/")).plan()


def test_convert_writes_flax(tmp_path: Path) -> None:
    done = command("convert", ZERO1, tmp_path / "out.msgpack", "--to", "flax", "--separator", "/", "--model-only")
    assert done.code == 0
    assert list(restore((tmp_path / "out.msgpack").read_bytes())) == [*ckpt.open(ZERO1), *ckpt.open(ZERO1).aliases]
    assert command("verify", tmp_path / "out.msgpack").code == 0
    assert command("convert", ZERO1, tmp_path / "x", "--to", "torch", "--separator", "/").code == 2


def test_decompress_returns_a_flax_file_byte_for_byte(tmp_path: Path) -> None:
    path = file(tmp_path, model())
    assert command("compress", path, f"{tmp_path / 'small'}/").code == 0
    assert command("decompress", tmp_path / "small", tmp_path / "again.msgpack").code == 0
    assert (tmp_path / "again.msgpack").read_bytes() == path.read_bytes()


# Hostile files


def opened(tmp_path: Path, data: bytes) -> ckpt.Checkpoint:
    return ckpt.open(file(tmp_path, data))


def ext(code: int, inner: bytes) -> bytes:
    return msgpack.packb({"w": msgpack.ExtType(code, inner)})


HOSTILE: dict[str, tuple[bytes, type[CkptError]]] = {
    "nothing": (b"", CorruptError),
    "no dict": (msgpack.packb([1, 2]), CorruptError),
    "an empty dict": (b"\x80", CorruptError),
    "a byte that begins nothing": (b"\x81\xa1a\xc1", CorruptError),
    "a map of four billion entries": (b"\xdf\xff\xff\xff\xff", CorruptError),
    "a list of four billion entries": (b"\x81\xa1a\xdd\xff\xff\xff\xff", CorruptError),
    "a text of four billion bytes": (b"\x81\xdb\xff\xff\xff\xff", UnsafeError),
    "bytes of four billion": (b"\x81\xa1a\xc6\xff\xff\xff\xff", UnsafeError),
    "an extension of four billion bytes": (b"\x81\xa1a\xc9\xff\xff\xff\xff\x01", CorruptError),
    "nested without end": (b"\x81\xa1a" * 5000 + b"\x80", UnsafeError),
    "lists without end": (b"\x81\xa1a" + b"\x91" * 5000 + b"\x80", UnsafeError),
    "a key that is not a text": (msgpack.packb({1: 2}), UnsupportedError),
    "a key that is a map": (b"\x81\x80\x01", UnsupportedError),
    "a key twice": (b"\x82\xa1a\x01\xa1a\x02", CorruptError),
    "a text that is no UTF-8": (b"\x81\xa1\xff\x01", CorruptError),
    "another extension type": (ext(5, b"x"), UnsupportedError),
    "a tuple that is no list": (ext(4, b"x"), CorruptError),
    "a timestamp": (msgpack.packb({"w": msgpack.Timestamp(1)}), UnsupportedError),
    "an array of objects": (ext(1, msgpack.packb(((1,), "object", b"12345678"))), UnsupportedError),
    "a structured array": (ext(1, msgpack.packb(((1,), "void64", b"12345678"))), UnsupportedError),
    "a negative length": (ext(1, msgpack.packb(((-1, -8), "uint8", b"12345678"))), CorruptError),
    "a shape that overflows": (ext(1, msgpack.packb(((1 << 40, 1 << 40, 0, 3), "uint8", b"x"))), CorruptError),
    "a huge shape": (ext(1, msgpack.packb(((1 << 40,), "uint8", b"x"))), CorruptError),
    "a shape of 100 axes": (ext(1, msgpack.packb(((1,) * 100, "uint8", b"x"))), CorruptError),
    "a shape of booleans": (ext(1, msgpack.packb(((True,), "uint8", b"x"))), CorruptError),
    "more bytes than the shape": (ext(1, msgpack.packb(((1,), "uint8", b"xy"))), CorruptError),
    "bytes beyond the extension": (ext(1, msgpack.packb(((1,), "uint8", b"x")) + b"y"), CorruptError),
    "no bytes": (ext(1, msgpack.packb(((1,), "uint8", 7))), CorruptError),
    "an array in an array": (ext(1, msgpack.packb((msgpack.ExtType(1, b"x"), "uint8", b"x"))), CorruptError),
    "a complex number of texts": (ext(2, msgpack.packb(("a", "b"))), CorruptError),
    "chunks without a shape": (serialize({"w": {"__msgpack_chunked_array__": True}}), CorruptError),
    "chunks that do not fit": (
        serialize({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 3}, "chunks": {"0": np.ones(2)}}}),
        CorruptError,
    ),
    "chunks of two types": (
        serialize(
            {
                "w": {
                    "__msgpack_chunked_array__": True,
                    "shape": {"0": 2},
                    "chunks": {"0": np.ones(1), "1": np.ones(1, np.float32)},
                }
            }
        ),
        CorruptError,
    ),
    "chunks that are not numbered": (
        serialize({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 1}, "chunks": {"1": np.ones(1)}}}),
        CorruptError,
    ),
    "no chunks": (
        serialize({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 0}, "chunks": {}}}),
        CorruptError,
    ),
    "a chunk that is in chunks": (
        serialize({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 2}, "chunks": {"0": np.ones(2)}}}, 8),
        CorruptError,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_flax_refuses_hostile_files(name: str, tmp_path: Path) -> None:
    data, kind = HOSTILE[name]
    with pytest.raises(kind):
        opened(tmp_path, data)


def test_flax_refuses_too_many_values_before_they_take_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_VALUES", 1000)
    with pytest.raises(UnsafeError):
        opened(tmp_path, b"\x81\xa1a\xdc\x27\x10" + b"\x01" * 10_000)


def test_flax_is_not_found_when_the_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ckpt.open(tmp_path / "none.msgpack")
    (tmp_path / "x.msgpack").mkdir()
    with pytest.raises(NotFoundError):
        ckpt.open(tmp_path / "x.msgpack")
