"""The universal format: what is written is what is read, is safetensors and JSON, and no changed bit passes."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_codecs import Rounded
from ckpt_formats.containers import sealed_json
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Group, Origin, Parameter
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import FileBlob, Tensor, read
from ckpt_formats.core.values import Global, Record, TensorName, Value
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.checked import KnownBlob, KnownTensor
from ckpt_formats.universal.index import TYPES
from forged import Change, Forged, both, codec, drop, forge, number, put
from held import arrays, checkpoint, contents, everything, flip, folder, parameter, plain, shapes, tensor

EFFORT = Execution(1, 1 << 20)
PACK = "packs/00000.safetensors"


def write(source: Checkpoint, target: Path, effort: Execution = EFFORT) -> Checkpoint:
    save(source, target, Universal(), resources=effort)
    return Universal().read(target, ReadOptions())


def assert_same(actual: Checkpoint, source: Checkpoint) -> None:
    """Equal in all that is content, and in order."""
    assert contents(actual) == contents(source)
    assert list(actual.parameters) == list(source.parameters)
    for name, expected in source.parameters.items():
        assert (actual.parameters[name].name, actual.parameters[name].role) == (name, expected.role)
        assert list(actual.parameters[name].states) == list(expected.states)
        assert plain(dict(actual.parameters[name].values)) == plain(dict(expected.values))
    assert [(plain(dict(g.options)), g.names) for g in actual.groups] == [
        (plain(dict(g.options)), g.names) for g in source.groups
    ]
    assert plain(dict(actual.extras)) == plain(dict(source.extras))
    assert actual.aliases == source.aliases
    assert actual.origin == source.origin


def content(folder: Path) -> str:
    return manifest.load(folder / manifest.NAME).content


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain_values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), names, st.binary(max_size=5))


@st.composite
def parameters(draw: st.DrawFn, name: str) -> Parameter:
    role = draw(st.sampled_from(["parameter", "frozen", "buffer", "extra"]))
    states = draw(
        st.dictionaries(st.sampled_from(["master", "model", "exp_avg", "a b", "é"]), arrays(), min_size=1, max_size=3)
    )
    if "master" in states and draw(st.booleans()):
        dtype = DTYPES[draw(st.sampled_from(["bfloat16", "float16", "float8_e4m3fn", "float32"]))]
        if states["master"].dtype.name in ("float32", "float64"):
            with np.errstate(all="ignore"):
                states["model"] = states["master"].astype(dtype)
    values = draw(st.dictionaries(names, plain_values, max_size=2))
    return replace(parameter(name, states, role), values=values)


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    drawn = [draw(parameters(name)) for name in draw(st.lists(names, max_size=4, unique=True))]
    groups = tuple(
        Group(draw(st.dictionaries(names, plain_values, max_size=2)), tuple(p.name for p in drawn[i : i + 2]))
        for i in range(draw(st.integers(0, 2)))
    )
    extras = draw(st.dictionaries(names, st.one_of(plain_values, st.lists(plain_values, max_size=3)), max_size=3))
    aliases = {f"alias of {p.name}": p.name for p in drawn[:1]}
    origin = Origin(draw(names), draw(st.none() | names), draw(st.none() | st.integers(0, 9)), {"tp": 1, "x": (1, 2)})
    return checkpoint(drawn, groups, extras, aliases, origin)


@given(checkpoints())
def test_written_checkpoint_is_read_back_the_same(source: Checkpoint) -> None:
    with folder() as at:
        reopened = write(source, at / "target")
        assert_same(reopened, source)
        assert {finding.kind for finding in find_problems(reopened, EFFORT)} <= {"copy"}
        again = write(reopened, at / "again")
        assert_same(again, source)
        assert {f.name: f.read_bytes() for f in (at / "target").rglob("*.*") if f.is_file()} == {
            f.name: f.read_bytes() for f in (at / "again").rglob("*.*") if f.is_file()
        }


@given(checkpoints())
def test_every_file_is_safetensors_or_json_with_the_right_values(source: Checkpoint) -> None:
    """As the library of the format itself reads it. What is derived from a master is not in its file."""
    with folder() as at:
        reopened = write(source, at / "target")
        stored = {
            f"{name}/{to_stored(state)}": tensor
            for name, state, tensor in (
                (p.name, s, t) for p in reopened.parameters.values() for s, t in p.states.items()
            )
            if isinstance(tensor.fragments[0].blob, FileBlob)
        }
        for file in (at / "target").rglob("*"):
            if file.is_file() and file.name == manifest.NAME:
                json.loads(file.read_text())
            elif file.is_file() and file.name == manifest.INDEX:
                assert load_file(file)["parameter.ends"].numel() == len(source.parameters)
            elif file.is_file():
                for entry, values in load_file(file).items():
                    expected = stored.pop(entry)
                    assert str(values.dtype) == f"torch.{expected.dtype.name}"
                    assert tuple(values.shape) == expected.shape
                    assert values.reshape(-1).view(torch.uint8).numpy().tobytes() == read(expected).tobytes()
        assert stored == {}


def test_a_copy_with_a_nan_is_stored_since_machines_round_those_differently(tmp_path: Path) -> None:
    master = np.array([1.0, np.nan, 2.0], np.float32)
    lazy = Tensor.of(DerivedBlob(Rounded(), tensor(master), DTYPES["bfloat16"]))
    reopened = write(
        checkpoint([Parameter("w", "parameter", {"master": tensor(master), "model": lazy})]), tmp_path / "made"
    )
    assert set(load_file(tmp_path / "made" / PACK)) == {"w/fp32", "w/param"}
    assert read(reopened.parameters["w"].states["model"]).tobytes() == master.astype(DTYPES["bfloat16"]).tobytes()


@given(arrays([DTYPES["float32"]]), st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]))
def test_a_copy_that_is_its_master_rounded_takes_no_bytes(master: np.ndarray, name: str) -> None:
    assume(name == "float32" or not np.isnan(master).any())
    with np.errstate(all="ignore"):
        rounded = master.astype(DTYPES[name])
    with folder() as at:
        reopened = write(checkpoint([parameter("w", {"model": rounded, "master": master})]), at / "derived")
        assert isinstance(reopened.parameters["w"].states["model"].fragments[0].blob, DerivedBlob)
        assert set(load_file(at / "derived" / PACK)) == {"w/fp32"}
        lazy = Tensor.of(DerivedBlob(Rounded(), tensor(master), DTYPES[name]))
        source = checkpoint([Parameter("w", "parameter", {"master": tensor(master), "model": lazy})])
        assert contents(write(source, at / "lazy")) == contents(reopened)


@given(
    arrays([DTYPES["float32"]]).filter(lambda a: a.size and not np.isnan(a).any()),
    st.sampled_from(["bfloat16", "float16", "float8_e5m2"]),
    st.sampled_from([{}, {"codec": "auto"}]),
    st.sampled_from(["target", "target.ucp"]),
    st.integers(0, 7),
)
def test_a_master_is_recognised_by_its_values_among_the_states_of_any_optimizer(
    master: np.ndarray, name: str, options: dict[str, str], target: str, bit: int
) -> None:
    """First a state that has other values, and one with which others are decoded; all zeros say nothing."""
    with np.errstate(all="ignore"):
        rounded = np.ascontiguousarray(master.astype(DTYPES[name]))
    differing = rounded.copy()
    differing.reshape(-1).view(np.uint8)[-1] ^= 1 << bit
    others = {"exp_avg": master, "velocity": np.ones_like(master), "master_param": master}
    for model, derived in ((rounded, bool(master.reshape(-1)[:256].any())), (differing, False)):
        source = checkpoint([parameter("w", {"model": model, **others})])
        with folder() as at:
            save(source, at / target, Universal(**options), resources=Execution(1, 1 << 20))
            reopened = open_checkpoint(at / target)
            blob = reopened.parameters["w"].states["model"].fragments[0].blob
            assert isinstance(blob, DerivedBlob) == derived or (model == np.ones_like(model)).all()
            assert contents(reopened) == contents(source)
            assert find_problems(reopened, EFFORT) == []


def test_a_copy_in_integers_is_stored_though_it_has_the_masters_values(tmp_path: Path) -> None:
    values = np.array([1.0, -2.0, 3.0], np.float32)
    source = checkpoint([parameter("w", {"model": values.astype(np.int8), "master": values})])
    reopened = write(source, tmp_path / "target")
    assert isinstance(reopened.parameters["w"].states["model"].fragments[0].blob, FileBlob)
    assert contents(reopened) == contents(source)


LOST = TensorName("lost")


@pytest.mark.parametrize(
    "value",
    [
        LOST,
        [LOST],
        (1, [LOST]),
        {"a": LOST},
        Record(Global("a", "B"), (LOST,)),
        Record(Global("a", "B"), (), state={"b": LOST}),
    ],
    ids=["itself", "list", "tuple", "dict", "argument", "state"],
)
def test_extras_that_name_a_tensor_which_is_not_there_are_damage(value: Value, tmp_path: Path) -> None:
    with suppress(CkptError):
        write(
            checkpoint([parameter("w", {"model": np.ones(2, np.float32)})], extras={"rng": value}), tmp_path / "target"
        )
    with pytest.raises(CorruptError, match="lost"):
        Universal().read(tmp_path / "target", ReadOptions())


def test_value_that_two_places_of_the_extras_share_is_read_as_one(tmp_path: Path) -> None:
    shared = [torch.arange(3.0)]
    torch.save({"model": {"w": torch.ones(2)}, "rng": {"a": shared, "b": {"c": shared}}}, tmp_path / "saved.pt")
    places = open_checkpoint(tmp_path / "saved.pt").extras["rng"]
    assert places["a"] is places["b"]["c"]


@given(st.data())
def test_a_copy_that_differs_in_one_bit_is_stored(data: st.DataObject) -> None:
    master = data.draw(arrays([DTYPES["float32"]]).filter(lambda a: a.size))
    with np.errstate(all="ignore"):
        differing = np.ascontiguousarray(master.astype(DTYPES["bfloat16"]))
    flat = differing.reshape(-1).view(np.uint8)
    bit = data.draw(st.integers(0, 8 * flat.size - 1))
    flat[bit // 8] ^= 1 << bit % 8
    source = checkpoint([parameter("w", {"master": master, "model": differing})])
    with folder() as at:
        reopened = write(source, at / "target", Execution(1, 1))
        assert isinstance(reopened.parameters["w"].states["model"].fragments[0].blob, FileBlob)
        assert contents(reopened) == contents(source)


def test_a_copy_that_differs_only_at_its_end_is_stored_whole(tmp_path: Path) -> None:
    """What shows only in the last slab: the file's header was laid out long before."""
    master = np.arange(100_000, dtype=np.float32)
    differing = master.astype(DTYPES["bfloat16"])
    differing[-1] = 1
    source = checkpoint([parameter("w", {"master": master, "model": differing, "exp_avg": master})])
    reopened = write(source, tmp_path / "target", Execution(1, 1))
    assert contents(reopened) == contents(source)
    assert find_problems(reopened, EFFORT)[0].kind == "copy"


def test_names_of_parameters_are_no_names_of_files(tmp_path: Path) -> None:
    tricky = [
        "../../escape",
        "/etc/passwd",
        "a/b",
        "a_b",
        "A_b",
        "",
        ".",
        "..",
        "\0",
        "x" * 5000,
        "a\nb",
        "ünï",
        "con",
        "é\u202e",
    ]
    source = checkpoint([parameter(name, {"model": np.float32(i).reshape(())}) for i, name in enumerate(tricky)])
    assert_same(write(source, tmp_path / "target"), source)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {f"target/{name}" for name in (manifest.NAME, manifest.INDEX, PACK)}
    assert set(load_file(tmp_path / "target" / PACK)) == {f"{name}/param" for name in tricky}


def test_names_that_are_equal_in_a_pack_belong_to_different_states(tmp_path: Path) -> None:
    """The parameter and its state are joined in the header of a pack, which only other programs read."""
    names = [("a", "b/c"), ("a/b", "c"), ("a/b/c_", "x"), ("\ud800", "model"), ("", "__metadata__"), ("d", "\ud800")]
    states: dict[str, dict[str, np.ndarray]] = {}
    for i, (name, state) in enumerate(names):
        states[name] = {state: np.full(2, i)}
    source = checkpoint([parameter(name, one) for name, one in states.items()])
    reopened = write(source, tmp_path / "target")
    assert_same(reopened, source)
    opened = load_file(tmp_path / "target" / PACK)
    assert sorted(values[0].item() for values in opened.values()) == list(range(len(names)))
    assert find_problems(reopened, EFFORT) == []


def test_a_name_with_half_a_character_leaves_a_valid_safetensors_file(tmp_path: Path) -> None:
    source = checkpoint([parameter("w\ud800", {"model": np.arange(3.0)})])
    reopened = write(source, tmp_path / "target")
    assert_same(reopened, source)
    (values,) = load_file(tmp_path / "target" / PACK).values()
    assert values.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        parameter("w", {"model": np.zeros(2, np.complex128)}),
    ],
    ids=["complex128"],
)
def test_write_refuses_what_safetensors_cannot_hold_before_it_begins(bad: Parameter, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        Universal().plan(checkpoint([bad]))


@given(checkpoints(), st.randoms())
def test_the_content_id_does_not_depend_on_order_origin_or_storage(source: Checkpoint, random: Any) -> None:
    shuffled = list(source.parameters.items())
    random.shuffle(shuffled)
    other = replace(source, parameters=dict(shuffled), origin=Origin("other"), path=Path("/elsewhere"))
    with folder() as at:
        first = write(source, at / "first")
        write(other, at / "second")
        write(first, at / "third", Execution(2, 1))
        assert content(at / "first") == content(at / "second") == content(at / "third")


CHANGES: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "a bit": lambda c: replace(
        c,
        parameters={
            **c.parameters,
            "alone": parameter(
                "alone",
                {
                    "model": _flipped(read(c.parameters["alone"].states["model"])),
                    "exp_avg": read(c.parameters["alone"].states["exp_avg"]),
                },
                step=3,
            ),
        },
    ),
    "a name": lambda c: replace(
        c,
        parameters={
            **{n: p for n, p in c.parameters.items() if n != "frozen"},
            "frozen2": replace(c.parameters["frozen"], name="frozen2"),
        },
    ),
    "a role": lambda c: replace(
        c, parameters={**c.parameters, "frozen": replace(c.parameters["frozen"], role="buffer")}
    ),
    "a parameter less": lambda c: replace(c, parameters={n: p for n, p in c.parameters.items() if n != "frozen"}),
    "a state less": lambda c: replace(
        c,
        parameters={
            **c.parameters,
            "layers.1.w": replace(
                c.parameters["layers.1.w"], states={"master": c.parameters["layers.1.w"].states["master"]}
            ),
        },
    ),
    "a shape": lambda c: replace(
        c, parameters={**c.parameters, "empty": parameter("empty", {"model": np.zeros((4, 0), np.float32)}, "buffer")}
    ),
    "a type": lambda c: replace(
        c, parameters={**c.parameters, "empty": parameter("empty", {"model": np.zeros((0, 4), np.float16)}, "buffer")}
    ),
    "a value": lambda c: replace(
        c, parameters={**c.parameters, "alone": replace(c.parameters["alone"], values={"step": 4})}
    ),
    "the type of a value": lambda c: replace(
        c, parameters={**c.parameters, "alone": replace(c.parameters["alone"], values={"step": 3.0})}
    ),
    "an option": lambda c: replace(
        c, groups=(replace(c.groups[0], options={"lr": 2e-3, "betas": (0.9, 0.95)}), c.groups[1])
    ),
    "the order of a group": lambda c: replace(
        c, groups=(replace(c.groups[0], names=c.groups[0].names[::-1]), c.groups[1])
    ),
    "the order of groups": lambda c: replace(c, groups=c.groups[::-1]),
    "an alias": lambda c: replace(c, aliases={"head.w": "alone"}),
    "an extra": lambda c: replace(c, extras={**c.extras, "epoch": 3}),
    "the type of an extra": lambda c: replace(c, extras={**c.extras, "epoch": True}),
}


def _flipped(values: np.ndarray) -> np.ndarray:
    values.reshape(-1).view(np.uint8)[0] ^= 1
    return values


@pytest.mark.parametrize("kind", CHANGES)
def test_the_content_id_changes_with_everything_that_is_content(kind: str, tmp_path: Path) -> None:
    write(everything(), tmp_path / "before")
    write(CHANGES[kind](everything()), tmp_path / "after")
    assert content(tmp_path / "before") != content(tmp_path / "after")


@pytest.mark.slow
def test_every_changed_byte_of_a_manifest_is_refused(tmp_path: Path) -> None:
    """Every bit flipped, byte removed or doubled, end cut off; in the first line every byte put for every other."""
    write(checkpoint([parameter("w", {"model": np.zeros(1, np.int8)})]), tmp_path / "target")
    path = tmp_path / "target" / manifest.NAME
    good = path.read_bytes()
    first = good.index(b"\n") + 1
    changed = {good[:i] + bytes([good[i] ^ 1 << bit]) + good[i + 1 :] for i in range(len(good)) for bit in range(8)}
    changed |= {good[:i] + bytes([byte]) + good[i + 1 :] for i in range(first) for byte in range(256)}
    changed |= {good[:i] + good[i + 1 :] for i in range(len(good))} | {good[:i] for i in range(len(good))}
    changed |= {good[:i] + good[i : i + 1] + good[i:] for i in range(len(good))} | {
        good + b"\n",
        good + b" ",
        b"\xef\xbb\xbf" + good,
    }
    for place, bad in enumerate(sorted(changed - {good})):
        with pytest.raises(CorruptError):
            sealed_json.parse(bad, path, "a manifest")
        if place % 100 == 0:
            path.write_bytes(bad)
            with pytest.raises(CorruptError):
                Universal().read(tmp_path / "target", ReadOptions())
    path.write_bytes(good)
    Universal().read(tmp_path / "target", ReadOptions())


def test_a_number_that_json_lacks_is_never_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        sealed_json.dump({"values": [float("nan")]})


def test_a_flipped_bit_of_any_byte_of_a_pack_is_found_and_never_copied(tmp_path: Path) -> None:
    master = np.arange(3, dtype=np.float32)
    source = checkpoint(
        [
            parameter(
                "w",
                {"master": master, "model": master.astype(DTYPES["bfloat16"]), "exp_avg": master.astype(np.float16)},
            ),
            parameter("other", {"master": master, "model": np.zeros(3, np.float16)}),
        ]
    )
    reopened = write(source, tmp_path / "target")
    assert [f.kind for f in find_problems(reopened, EFFORT)] == ["copy"]
    (pack,) = reopened.files
    states = {
        byte: (name, state)
        for name, one in reopened.parameters.items()
        for state, tensor in one.states.items()
        for blob in [tensor.fragments[0].blob]
        if isinstance(blob, FileBlob)
        for byte in range(blob.offset, blob.offset + tensor.nbytes)
    }
    data = min(states)
    assert sorted(states) == list(range(data, pack.nbytes))
    for byte in [*range(120), *range(data - 8, pack.nbytes)]:  # between these the header is filled with spaces
        flip(pack.path, byte, byte % 8)
        (problem,) = [finding for finding in find_problems(reopened, EFFORT) if finding.kind == "checksum"]
        assert problem.where == str(pack.path)
        if byte < data:
            assert "header" in problem.what
            assert problem.tensors == ()
        else:
            name, state = states[byte]
            assert problem.tensors == (name,)
            assert f"{name}/{state}" in problem.what
            assert "chunk 0 of 1" in problem.what
            with pytest.raises(CorruptError, match="checksum"):
                save(reopened, tmp_path / "copied", Universal(), resources=EFFORT)
            assert not (tmp_path / "copied").exists()
        flip(pack.path, byte, byte % 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]


def test_files_that_are_missing_or_of_another_size_are_said(tmp_path: Path) -> None:
    write(everything(), tmp_path / "good")
    for damage, kind in (
        (lambda file: file.unlink(), IncompleteError),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), CorruptError),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), CorruptError),
        (lambda file: file.write_bytes(b""), CorruptError),
    ):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        for file in (PACK, manifest.INDEX):
            shutil.copy(tmp_path / "good" / file, tmp_path / "bad" / file)
            damage(tmp_path / "bad" / file)
            with pytest.raises(kind):
                Universal().read(tmp_path / "bad", ReadOptions())
            (tmp_path / "bad" / file).unlink(missing_ok=True)
            shutil.copy(tmp_path / "good" / file, tmp_path / "bad" / file)
    (tmp_path / "bad" / manifest.NAME).unlink()
    assert not Universal().detect(tmp_path / "bad")


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def sizes(state: str, *values: int) -> Change:
    """Give a state of `w` a shape of these sizes."""

    def change(forged: Forged) -> None:
        at, row = forged.dims("w", state), forged.row("w", state)
        dims = forged.columns["state.dims"]
        new = np.array(values, np.uint64)
        forged.columns["state.dims"] = np.concatenate([dims[: at.start], new, dims[at.stop :]])
        forged.columns["state.rank"][row] = len(values)

    return change


def longer(name: str) -> Change:
    """One more row in a column."""

    def change(forged: Forged) -> None:
        column = forged.columns[name]
        forged.columns[name] = np.concatenate([column, np.zeros((1, *column.shape[1:]), column.dtype)])

    return change


def shorter(name: str) -> Change:
    return lambda forged: forged.columns.update({name: forged.columns[name][:-1]})


def rename(*names: str | bytes) -> Change:
    def change(forged: Forged) -> None:
        encoded = [name if isinstance(name, bytes) else name.encode() for name in names]
        forged.columns["parameter.names"] = np.frombuffer(b"".join(encoded), np.uint8)
        forged.columns["parameter.ends"] = np.cumsum([len(name) for name in encoded]).astype(np.uint64)

    return change


def retype(name: str, dtype: str) -> Change:
    return lambda forged: forged.columns.update({name: forged.columns[name].astype(dtype)})


FP32, PARAM, MOMENT = ("w", "fp32"), ("w", "param"), ("w", "exp_avg")
Refusal = tuple[Change, type[CkptError] | tuple[type[CkptError], ...], str]
FIELDS: dict[str, Refusal] = {
    "a version from the future": (put("version", value=4), UnsupportedError, "version 4"),
    "a version before the first": (put("version", value=0), UnsupportedError, "version 0"),
    "a version true": (put("version", value=True), UnsupportedError, "version True"),
    "no version": (drop("version"), UnsupportedError, "version None"),
    "another format": (put("format", value="other"), CorruptError, "not the manifest"),
    "another content id": (put("content", value="forged"), CorruptError, "content"),
    "deep JSON": (put("extras", value={"a": deep(400)}), CorruptError, "nested|deep"),
    "deeper JSON": (put("extras", value={"a": deep(900)}), CorruptError, "nested|deep"),
    "an alias that hides a parameter": (put("aliases", "w", value="other"), CorruptError, "aliases"),
    **{
        f"no {key}": (drop(key), CorruptError, "not the manifest" if key == "format" else key)
        for key in [
            *("format", "content", "origin", "groups", "aliases", "extras", "written_by", "index", "packs"),
            *("states", "dtypes", "codecs", "deltas", "values", "errors"),
        ]
    },
    **{
        f"{key} = {value!r}": (put(key, value=value), CorruptError, key)
        for key in [
            *("origin", "groups", "aliases", "extras", "index", "packs", "states", "dtypes", "codecs", "deltas"),
            *("values", "errors"),
        ]
        for value in [None, 1, "x", True]
    },
    "a group of a number": (put("groups", value=[5]), CorruptError, "options"),
    "a group without parameters": (put("groups", value=[{"options": {}}]), CorruptError, "parameters"),
    **{
        f"a group of {value!r:.30}": (
            put("groups", value=[{"options": {}, "parameters": value}]),
            CorruptError,
            "groups|parameters",
        )
        for value in [
            *([1], ["w"], [[0]], [[0, 0]], [[0, 3]], [[2, 1]], [[-1, 1]], [[0, 1.0]], [[0, True]], [[0, 2], [0, 1]]),
            *([[0, 1 << 40]], [[1 << 70, 1]], "w", {"0": 1}),
        ]
    },
    "an alias of a number": (put("aliases", value={"a": 1}), CorruptError, "aliases"),
    "an origin without engine": (drop("origin", "engine"), CorruptError, "engine"),
    "an origin of an engine that is a list": (put("origin", "engine", value=[]), CorruptError, "engine"),
    "an origin of a version that is a list": (put("origin", "version", value=[]), CorruptError, "version"),
    "an origin of a step below zero": (put("origin", "step", value=-1), CorruptError, "step"),
    "an origin with a hostile layout": (put("origin", "layout", value={"$array": {}}), CorruptError, "typed value"),
    "a layout that is no mapping": (
        put("origin", "layout", value={"$tuple": []}),
        CorruptError,
        "layout is not a mapping",
    ),
    "extras that are no mapping": (put("extras", value={"$tuple": []}), CorruptError, "extras"),
    "options that are no mapping": (
        put("groups", value=[{"options": {"$set": []}, "parameters": []}]),
        CorruptError,
        "options",
    ),
    **{
        f"{table}: {value!r:.30}": (put(table, value=value), CorruptError, table)
        for table, values in {
            "states": [[1], ["fp32", "fp32", "param"], [["fp32"]]],
            "dtypes": [["object"], [1], ["complex128x", "float32", "bfloat16"]],
            "codecs": [
                *([], [{}], [{"codec": {"name": "rounded"}, "base": None}], [{"codec": None, "base": "fp32"}]),
                [{"codec": None, "base": None}, {"codec": {"name": 1}, "base": "fp32"}],
                [{"codec": None, "base": None}, {"codec": {}, "base": "fp32"}],
                [{"codec": None, "base": None}, {"codec": {"name": "rounded"}, "base": 1}],
                [{"codec": None, "base": None}, {"codec": None, "base": None}],
                [5],
            ],
            "deltas": [
                *([5], [{}], [{"codec": {"name": 1}, "states": ["fp32"], "parent_states": []}]),
                [{"codec": {"name": "replay"}, "states": [], "parent_states": []}],
                [{"codec": {"name": "replay"}, "states": ["fp32", "fp32"], "parent_states": []}],
                [{"codec": {"name": "replay"}, "states": ["fp32"], "parent_states": ["param"]}],
                [{"codec": {"name": "replay"}, "states": "fp32", "parent_states": []}],
            ],
            "values": [[], [{"step": 1}], [5], [{}, {"$tuple": []}]],
            "errors": [[], [{"promised": 1.0}], [None, 5], [None, None], [None, {"$tuple": []}]],
            "packs": [
                *([5], [[]], [[1, 2]], [["a", 8, "x"]], [[-1, 16, "xxh3-128:" + "0" * 32]]),
                *([[4096, 5000, "xxh3-128:" + "0" * 32]], [[9000, 8, 5]]),
                [[True, True, "xxh3-128:" + "0" * 32]],
            ],
        }.items()
        for value in values
    },
    "a pack with a checksum of text": (put("packs", 0, 2, value="trust me"), CorruptError, "header is not a checksum"),
    "values that are no typed values": (put("values", 0, value={"$x": 1}), CorruptError, "not a typed value"),
    "a pack more": (lambda f: f.fields["packs"].append(f.fields["packs"][0]), CorruptError, "pack 1"),
    "a pack that is longer": (lambda f: _add(f.fields["packs"][0], 8), CorruptError, "pack 0"),
    "a pack whose header is shorter": (lambda f: _add(f.fields["packs"][0], -8, 1), CorruptError, "pack 0"),
    "an index that is longer": (lambda f: _add(f.fields["index"], 1, "nbytes"), CorruptError, "index"),
    "an index of no length": (put("index", "nbytes", value=-1), CorruptError, "nbytes"),
    "an index of another checksum": (put("index", "checksum", value="xxh3-128:" + "0" * 32), CorruptError, "checksum"),
    "an index with a checksum of text": (put("index", "checksum", value="trust me"), CorruptError, "checksum"),
}
COLUMNS: dict[str, Refusal] = {
    **{f"{name} is missing": (lambda f, name=name: f.columns.pop(name), CorruptError, name) for name in TYPES},
    "a column more": (lambda f: f.columns.update(colour=f.columns["state.rank"]), CorruptError, "colour"),
    **{f"{name} is longer": (longer(name), CorruptError, "index is not valid") for name in TYPES},
    **{
        f"{name} is shorter": (shorter(name), CorruptError, "index is not valid")
        for name in TYPES
        if not name.startswith(("delta.", "coded."))
    },
    **{
        f"{name} of another type": (retype(name, "<u8" if t != "<u8" else "u1"), CorruptError, name)
        for name, t in TYPES.items()
    },
    **{
        f"{name} of signed numbers": (retype(name, "<i8"), CorruptError, name)
        for name in ("state.offset", "state.rank")
    },
    **{
        f"{name} is not within its table": (number(name, 0, 200), CorruptError, "index is not valid")
        for name in (
            "parameter.role",
            "parameter.values",
            "state.parameter",
            "state.name",
            "state.dtype",
            "state.storage",
            "state.codec",
            "state.error",
            "state.pack",
        )
    },
    "a name twice": (rename("w", "w"), CorruptError, "twice"),
    "a name that is not UTF-8": (rename(b"w\xff", "other"), CorruptError, "UTF-8"),
    "ends that fall": (number("parameter.ends", 0, 200), CorruptError, "ends of names"),
    "a state twice": (
        lambda f: f.columns["state.name"].__setitem__(f.row(*MOMENT), f.columns["state.name"][f.row(*FP32)]),
        CorruptError,
        "twice",
    ),
    "a parameter without states": (
        lambda f: f.columns["state.parameter"].__setitem__(slice(None), 0),
        CorruptError,
        "`other`: it has no state",
    ),
    "states out of order": (
        lambda f: f.columns["state.parameter"].__setitem__(slice(None), f.columns["state.parameter"][::-1].copy()),
        CorruptError,
        "order",
    ),
    **{
        f"a shape of {values!r}": (
            sizes("fp32", *values),
            CorruptError,
            "`w` master|length of column|`w` model|64 dimensions",
        )
        for values in [
            *(
                (4,),
                (1, 3),
                (2**63,),
                (2**40, 2**40),
                (0, 2**63),
                (2**32, 2**32, 2**32),
            ),
            (1,) * 65,
        ]
    },
    **{
        f"{column} = {value}": (number(f"state.{column}", FP32, value), CorruptError, "index is not valid")
        for column, values in {
            "offset": [0, 4095, 1 << 40, 2**64 - 1],
            "nbytes": [0, 11, 13, 2**62, 2**64 - 12],
        }.items()
        for value in values
    },
    "states that overlap": (
        lambda f: f.columns["state.offset"].__setitem__(f.row(*MOMENT), f.columns["state.offset"][f.row(*FP32)]),
        CorruptError,
        "pack 0",
    ),
    "a codec of a plain state": (number("state.codec", FP32, 1), CorruptError, "codec"),
    "a derived state without a codec": (number("state.codec", PARAM, 0), CorruptError, "codec"),
    "a derived state with bytes": (number("state.nbytes", PARAM, 6), CorruptError, "`w` model"),
    "a derived state without a base": (codec(*PARAM, {"name": "rounded"}), CorruptError, "base"),
    "a plain state in a delta": (number("state.storage", FP32, 3), CorruptError, "bytes without use"),
    "a plain state that is coded": (
        both(number("state.storage", FP32, 1), codec(*FP32, {"name": "zstd"})),
        CorruptError,
        "coded.nbytes",
    ),
    "a base that is not there": (codec(*PARAM, {"name": "rounded"}, "ghost"), CorruptError, "base"),
    "a base that is the state itself": (codec(*PARAM, {"name": "rounded"}, "param"), CorruptError, "base"),
    "a base of another shape": (sizes("param", 4), CorruptError, "shape|length"),
    "an unknown codec": (codec(*PARAM, {"name": "shiny"}, "fp32"), UnsupportedError, "shiny"),
    "a codec of this name for coded states": (codec(*PARAM, {"name": "../x"}, "fp32"), UnsupportedError, "../x"),
    "a codec with unknown options": (
        codec(*PARAM, {"name": "rounded", "mode": "up"}, "fp32"),
        UnsupportedError,
        "mode",
    ),
}
HOSTILE = {**FIELDS, **COLUMNS}


def _add(item: Any, value: int, key: Any = 0) -> None:
    item[key] += value


def small() -> Checkpoint:
    master = np.arange(3, dtype=np.float32)
    states = {"master": master, "model": master.astype(DTYPES["bfloat16"]), "exp_avg": master}
    return checkpoint([parameter("w", states), parameter("other", {"model": master})], extras={"a": 1})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hostile") / "target"
    write(small(), target)
    return target


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_or_index_is_refused_in_the_right_words(kind: str, written: Path, tmp_path: Path) -> None:
    change, expected, words = HOSTILE[kind]
    target = shutil.copytree(written, tmp_path / "target")
    forge(target)
    read_all(target)  # the change alone makes the difference
    forge(target, change)
    with pytest.raises(expected, match=words):
        read_all(target)


def read_all(target: Path) -> None:
    """What any command does that looks at all parameters."""
    assert [one.name for one in Universal().read(target, ReadOptions()).parameters.values()]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}\n",
        b'{"checksum":"xxh3-128:0"}',
        b"\xff\xfe",
        b"\x80\x02}q\x00.",
        b"PK\x03\x04",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_a_file_that_is_no_manifest_is_corrupt(text: bytes, written: Path, tmp_path: Path) -> None:
    (tmp_path / manifest.NAME).write_bytes(text)
    with pytest.raises(CorruptError):
        Universal().read(tmp_path, ReadOptions())
    body = text + b"\n"
    signed = b'{"checksum":"xxh3-128:%s",\n' % xxhash.xxh3_128_hexdigest(body).encode() + body
    (tmp_path / manifest.NAME).write_bytes(signed)
    with pytest.raises(CorruptError):
        Universal().read(tmp_path, ReadOptions())


@pytest.mark.parametrize("twice", [b'"version": 1,', b'"format": "ckpt-universal",', b'"codec":null,'])
def test_a_key_that_appears_twice_is_corrupt(twice: bytes, written: Path, tmp_path: Path) -> None:
    good = (written / manifest.NAME).read_bytes()
    body = good[good.index(b"\n") + 1 :].replace(twice, twice * 2, 1)
    (tmp_path / manifest.NAME).write_bytes(
        b'{"checksum":"xxh3-128:%s",\n' % xxhash.xxh3_128_hexdigest(body).encode() + body
    )
    with pytest.raises(CorruptError, match="twice"):
        Universal().read(tmp_path, ReadOptions())


@given(st.data())
def test_universal_writes_the_same_files_for_any_slabs_and_workers(data: st.DataObject) -> None:
    source = data.draw(checkpoints())
    with folder() as at:
        for i, effort in enumerate([Execution(1, 1 << 30), Execution(3, 1)]):
            write(source, at / str(i), effort)
        files = [{f.relative_to(at / i): f.read_bytes() for f in (at / i).rglob("*") if f.is_file()} for i in "01"]
        assert files[0] == files[1]


@given(shapes())
def test_read_takes_the_requested_values_only(shape: tuple[int, ...]) -> None:
    """Reading opens the manifest: parameter files may be noise of the right size."""
    with folder() as at:
        reopened = write(checkpoint([parameter("w", {MODEL: np.zeros(shape)})]), at / "target")
        for shard in reopened.files:
            shard.path.write_bytes(b"\xff" * shard.nbytes)
        assert Universal().read(at / "target", ReadOptions()).parameters["w"].states[MODEL].shape == shape


@pytest.mark.parametrize("dtype", ["float32", "int8", "float64"])
def test_a_known_tensor_gives_parts_of_its_chunks(dtype: str) -> None:
    values = np.arange(60, dtype=dtype).reshape(6, 10)
    digest = xxhash.xxh3_128_digest(values.tobytes())
    known = KnownBlob.whole(KnownTensor(tensor(values), digest, "w", "model", "here"))
    assert np.array_equal(read(known.crop(Box((1, 2), (4, 9)))), values[1:4, 2:9])
    other = KnownBlob.whole(KnownTensor(tensor(values + 1), digest, "w", "model", "here"))
    with pytest.raises(CorruptError, match="chunk 0 of 1 of its state `model` is not that of the chain"):
        read(other.crop(Box((1, 2), (4, 9))))
