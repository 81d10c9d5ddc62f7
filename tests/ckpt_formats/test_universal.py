"""The universal format: what is written is what is read, is safetensors and JSON, and no changed bit passes."""

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Resources
from ckpt_codecs import Rounded
from ckpt_formats.containers import sealed_json
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Group, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, Corrupt, Incomplete, Unsupported
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import DerivedBlob, FileBlob, Tensor, read
from ckpt_formats.core.values import Global, Record, TensorName, Value
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal, manifest
from held import arrays, checkpoint, contents, everything, flip, folder, parameter, plain, shapes, tensor

EFFORT = Resources(1, 1 << 20)


def write(source: Checkpoint, target: Path, effort: Resources = EFFORT) -> Checkpoint:
    save(source, target, Universal(), effort)
    return Universal().read(target, ReadOptions())


def assert_same(made: Checkpoint, source: Checkpoint) -> None:
    """Equal in all that is content, and in order."""
    assert contents(made) == contents(source)
    assert list(made.parameters) == list(source.parameters)
    for name, expected in source.parameters.items():
        assert (made.parameters[name].name, made.parameters[name].role) == (name, expected.role)
        assert list(made.parameters[name].states) == list(expected.states)
        assert plain(dict(made.parameters[name].values)) == plain(dict(expected.values))
    assert [(plain(dict(g.options)), g.names) for g in made.groups] == [
        (plain(dict(g.options)), g.names) for g in source.groups
    ]
    assert plain(dict(made.extras)) == plain(dict(source.extras))
    assert made.aliases == source.aliases
    assert made.origin == source.origin


def content(folder: Path) -> str:
    return manifest.load(folder / manifest.NAME).content


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain_values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), names, st.binary(max_size=5))


@st.composite
def parameters(draw: st.DrawFn, name: str) -> Parameter:
    role = draw(st.sampled_from(["parameter", "frozen", "buffer", "extra"]))
    states = draw(
        st.dictionaries(st.sampled_from(["fp32", "param", "exp_avg", "a b", "é"]), arrays(), min_size=1, max_size=3)
    )
    if "fp32" in states and draw(st.booleans()):
        dtype = DTYPES[draw(st.sampled_from(["bfloat16", "float16", "float8_e4m3fn", "float32"]))]
        if states["fp32"].dtype.name in ("float32", "float64"):
            with np.errstate(all="ignore"):
                states["param"] = states["fp32"].astype(dtype)
    values = draw(st.dictionaries(names, plain_values, max_size=2))
    return replace(parameter(name, states, role), values=values)


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    made = [draw(parameters(name)) for name in draw(st.lists(names, max_size=4, unique=True))]
    groups = tuple(
        Group(draw(st.dictionaries(names, plain_values, max_size=2)), tuple(p.name for p in made[i : i + 2]))
        for i in range(draw(st.integers(0, 2)))
    )
    extras = draw(st.dictionaries(names, st.one_of(plain_values, st.lists(plain_values, max_size=3)), max_size=3))
    aliases = {f"alias of {p.name}": p.name for p in made[:1]}
    origin = Origin(draw(names), draw(st.none() | names), draw(st.none() | st.integers(0, 9)), {"tp": 1, "x": (1, 2)})
    return checkpoint(made, groups, extras, aliases, origin)


@given(checkpoints())
def test_what_is_written_is_what_is_read(source: Checkpoint) -> None:
    with folder() as at:
        made = write(source, at / "target")
        assert_same(made, source)
        assert {finding.kind for finding in find_problems(made, EFFORT)} <= {"copy"}
        again = write(made, at / "again")
        assert_same(again, source)
        assert {f.name: f.read_bytes() for f in (at / "target").rglob("*.*") if f.is_file()} == {
            f.name: f.read_bytes() for f in (at / "again").rglob("*.*") if f.is_file()
        }


@given(checkpoints())
def test_every_file_is_safetensors_or_json_with_the_right_values(source: Checkpoint) -> None:
    """As the library of the format itself reads it. What is derived from a master is not in its file."""
    with folder() as at:
        made = write(source, at / "target")
        for file in (at / "target").rglob("*"):
            if file.is_file() and file.name == manifest.NAME:
                json.loads(file.read_text())
            elif file.is_file():
                with safetensors.safe_open(file, "pt") as opened:
                    held = made.parameters[opened.metadata()["parameter"]]
                    stored = {s for s, t in held.states.items() if isinstance(t.fragments[0].blob, FileBlob)}
                    assert set(opened.keys()) == stored
                for state, values in load_file(file).items():
                    expected = held.states[state]
                    assert str(values.dtype) == f"torch.{expected.dtype.name}"
                    assert tuple(values.shape) == expected.shape
                    assert values.reshape(-1).view(torch.uint8).numpy().tobytes() == read(expected).tobytes()


def test_a_copy_with_a_nan_is_stored_since_machines_round_those_differently(tmp_path: Path) -> None:
    master = np.array([1.0, np.nan, 2.0], np.float32)
    lazy = Tensor.of(DerivedBlob(Rounded(), tensor(master), DTYPES["bfloat16"]))
    made = write(checkpoint([Parameter("w", "parameter", {"fp32": tensor(master), "param": lazy})]), tmp_path / "made")
    (file,) = (tmp_path / "made/parameters").iterdir()
    assert set(load_file(file)) == {"fp32", "param"}
    assert read(made.parameters["w"].states["param"]).tobytes() == master.astype(DTYPES["bfloat16"]).tobytes()


@given(arrays([DTYPES["float32"]]), st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]))
def test_a_copy_that_is_its_master_rounded_takes_no_bytes(master: np.ndarray, name: str) -> None:
    assume(name == "float32" or not np.isnan(master).any())
    with np.errstate(all="ignore"):
        rounded = master.astype(DTYPES[name])
    with folder() as at:
        made = write(checkpoint([parameter("w", {"param": rounded, "fp32": master})]), at / "derived")
        assert isinstance(made.parameters["w"].states["param"].fragments[0].blob, DerivedBlob)
        (file,) = (at / "derived/parameters").iterdir()
        assert set(load_file(file)) == {"fp32"}
        lazy = Tensor.of(DerivedBlob(Rounded(), tensor(master), DTYPES[name]))
        source = checkpoint([Parameter("w", "parameter", {"fp32": tensor(master), "param": lazy})])
        assert contents(write(source, at / "lazy")) == contents(made)


def test_a_copy_in_integers_is_stored_though_it_has_the_masters_values(tmp_path: Path) -> None:
    values = np.array([1.0, -2.0, 3.0], np.float32)
    source = checkpoint([parameter("w", {"param": values.astype(np.int8), "fp32": values})])
    made = write(source, tmp_path / "target")
    assert isinstance(made.parameters["w"].states["param"].fragments[0].blob, FileBlob)
    assert contents(made) == contents(source)


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
            checkpoint([parameter("w", {"param": np.ones(2, np.float32)})], extras={"rng": value}), tmp_path / "target"
        )
    with pytest.raises(Corrupt, match="lost"):
        Universal().read(tmp_path / "target", ReadOptions())


def test_what_two_places_of_the_extras_share_is_read_as_one(tmp_path: Path) -> None:
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
    source = checkpoint([parameter("w", {"fp32": master, "param": differing})])
    with folder() as at:
        made = write(source, at / "target", Resources(1, 1))
        assert isinstance(made.parameters["w"].states["param"].fragments[0].blob, FileBlob)
        assert contents(made) == contents(source)


def test_a_copy_that_differs_only_at_its_end_is_stored_whole(tmp_path: Path) -> None:
    """What shows only in the last slab: the file's header was laid out long before."""
    master = np.arange(100_000, dtype=np.float32)
    differing = master.astype(DTYPES["bfloat16"])
    differing[-1] = 1
    source = checkpoint([parameter("w", {"fp32": master, "param": differing, "exp_avg": master})])
    made = write(source, tmp_path / "target", Resources(1, 1))
    assert contents(made) == contents(source)
    assert find_problems(made, EFFORT)[0].kind == "copy"


def test_names_become_files_that_stay_inside_and_apart(tmp_path: Path) -> None:
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
    source = checkpoint([parameter(name, {"param": np.float32(i).reshape(())}) for i, name in enumerate(tricky)])
    assert_same(write(source, tmp_path / "target"), source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]
    files = [path.name for path in (tmp_path / "target/parameters").iterdir()]
    assert len({name.lower() for name in files}) == len(tricky)
    assert all(name.isascii() and len(name) < 130 for name in files)


def test_a_name_with_half_a_character_leaves_a_valid_safetensors_file(tmp_path: Path) -> None:
    source = checkpoint([parameter("w\ud800", {"param": np.arange(3.0)})])
    made = write(source, tmp_path / "target")
    assert_same(made, source)
    (file,) = (tmp_path / "target/parameters").iterdir()
    assert load_file(file)["param"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        parameter("w", {"param": np.zeros(2, np.complex128)}),
        parameter("w", {"__metadata__": np.zeros(2)}),
        parameter("w", {"\ud800": np.zeros(2)}),
    ],
    ids=["complex128", "a state called __metadata__", "a state with half a character"],
)
def test_what_safetensors_cannot_hold_is_refused_before_anything_is_written(bad: Parameter, tmp_path: Path) -> None:
    with pytest.raises(Unsupported):
        Universal().plan(checkpoint([bad]))


@given(checkpoints(), st.randoms())
def test_the_content_id_does_not_depend_on_order_origin_or_storage(source: Checkpoint, random: Any) -> None:
    shuffled = list(source.parameters.items())
    random.shuffle(shuffled)
    other = replace(source, parameters=dict(shuffled), origin=Origin("other"), path=Path("/elsewhere"))
    with folder() as at:
        first = write(source, at / "first")
        write(other, at / "second")
        write(first, at / "third", Resources(2, 1))
        assert content(at / "first") == content(at / "second") == content(at / "third")


CHANGES: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "a bit": lambda c: replace(
        c,
        parameters={
            **c.parameters,
            "alone": parameter(
                "alone",
                {
                    "param": _flipped(read(c.parameters["alone"].states["param"])),
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
                c.parameters["layers.1.w"], states={"fp32": c.parameters["layers.1.w"].states["fp32"]}
            ),
        },
    ),
    "a shape": lambda c: replace(
        c, parameters={**c.parameters, "empty": parameter("empty", {"param": np.zeros((4, 0), np.float32)}, "buffer")}
    ),
    "a type": lambda c: replace(
        c, parameters={**c.parameters, "empty": parameter("empty", {"param": np.zeros((0, 4), np.float16)}, "buffer")}
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
    write(checkpoint([parameter("w", {"param": np.zeros(1, np.int8)})]), tmp_path / "target")
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
    for bad in changed - {good}:
        path.write_bytes(bad)
        with pytest.raises(Corrupt):
            Universal().read(tmp_path / "target", ReadOptions())
    path.write_bytes(good)
    Universal().read(tmp_path / "target", ReadOptions())


def test_a_number_that_json_lacks_is_never_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        sealed_json.dump({"values": [float("nan")]})


def test_a_flipped_bit_of_any_byte_of_a_parameter_file_is_found_and_never_copied(tmp_path: Path) -> None:
    master = np.arange(3, dtype=np.float32)
    source = checkpoint(
        [
            parameter(
                "w", {"fp32": master, "param": master.astype(DTYPES["bfloat16"]), "exp_avg": master.astype(np.float16)}
            ),
            parameter("other", {"fp32": master, "param": np.zeros(3, np.float16)}),
        ]
    )
    made = write(source, tmp_path / "target")
    assert [f.kind for f in find_problems(made, EFFORT)] == ["copy"]
    for shard in made.files:
        name = next(p.name for p, _, t in made.tensors() for raw in t.sources() if raw.path == shard.path)
        data = min(raw.offset for t in made.parameters[name].states.values() for raw in t.sources())
        for byte in range(shard.nbytes):
            flip(shard.path, byte, byte % 8)
            (found,) = [finding for finding in find_problems(made, EFFORT) if finding.kind == "checksum"]
            assert found.where == str(shard.path)
            assert found.tensors == ((name,) if byte >= data else ())
            if byte >= data:
                with pytest.raises(Corrupt, match="checksum"):
                    save(made, tmp_path / "copied", Universal(), EFFORT)
                assert not (tmp_path / "copied").exists()
            flip(shard.path, byte, byte % 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]


def test_files_that_are_missing_or_of_another_size_are_said(tmp_path: Path) -> None:
    write(everything(), tmp_path / "good")
    for damage, kind in (
        (lambda file: file.unlink(), Incomplete),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), Corrupt),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), Corrupt),
        (lambda file: file.write_bytes(b""), Corrupt),
    ):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        damage(sorted((tmp_path / "bad/parameters").iterdir())[1])
        with pytest.raises(kind):
            Universal().read(tmp_path / "bad", ReadOptions())
    (tmp_path / "bad" / manifest.NAME).unlink()
    assert not Universal().detect(tmp_path / "bad")


def identity(said: Any) -> str:
    """The content id, by its definition in docs/format.md."""
    content = {
        "parameters": sorted(
            [
                p["name"],
                p["role"],
                sorted([k, t["dtype"], t["shape"], t["values"]] for k, t in p["states"].items()),
                p["values"],
            ]
            for p in said["parameters"]
        ),
        "groups": said["groups"],
        "aliases": said["aliases"],
        "extras": said["extras"],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "blake2b-256:" + hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def sign(said: Any) -> bytes:
    """A manifest of any JSON with the right checksum and content id: an attacker can compute them too."""
    with suppress(KeyError, TypeError, AttributeError):
        if said["content"] != "forged":
            said["content"] = identity(said)
    body = json.dumps(said, indent=1).encode().removeprefix(b"{\n") + b"\n"
    return b'{"checksum":"xxh3-128:%s",\n' % xxhash.xxh3_128_hexdigest(body).encode() + body


def deep(levels: int) -> Any:
    made: Any = []
    for _ in range(levels):
        made = [made]
    return made


Edit = Callable[[dict[str, Any]], object]


def entry(edit: Edit) -> Edit:
    return lambda said: edit(said["parameters"][0])


def state(name: str, **fields: Any) -> Edit:
    return lambda said: said["parameters"][0]["states"][name].update(fields)


def without(*keys: str) -> Edit:
    def edit(said: dict[str, Any]) -> None:
        for key in keys[:-1]:
            said = said[key]
        del said[keys[-1]]

    return edit


HOSTILE: dict[str, tuple[Edit, type[CkptError] | tuple[type[CkptError], ...]]] = {
    **{
        f"a file name {name!r:.30}": (entry(lambda e, name=name: e.update(file=name)), Corrupt)
        for name in [
            "../x.safetensors",
            "/etc/passwd",
            "parameters/../../x.safetensors",
            "parameters/a/b.safetensors",
            "parameters/.safetensors",
            "parameters/..safetensors",
            "x.safetensors",
            "parameters/A.safetensors",
            "parameters/a.safetensors\n",
            "parameters/a\0.safetensors",
            "parameters/" + "a" * 200 + ".safetensors",
            "extras/../parameters/a.safetensors",
            "",
            "parameters\\a.safetensors",
            "other/a.safetensors",
        ]
    },
    "no file": (entry(lambda e: e.update(file="parameters/a.safetensors")), Incomplete),
    **{
        f"{key} = {value!r:.25}": (entry(lambda e, key=key, value=value: e.update({key: value})), Corrupt)
        for key, values in {
            "nbytes": [-1, 1.5, "9", None, True, 2**70, 10**30, [1]],
            "name": [1, None, ["a"]],
            "role": ["x", 1, None, []],
            "header": ["", "xxh3-128:zz", 5, "crc32:00000000"],
            "states": [{}, [], None, {"a": 1}, {"a": {}}],
            "values": [[], {"$x": 1}, None],
        }.items()
        for value in values
    },
    **{
        f"state {key} = {value!r:.25}": (state("fp32", **{key: value}), Corrupt)
        for key, values in {
            "dtype": ["complex128x", 1, None, [], "object"],
            "shape": [[-1], [2**70], "3", [1.5], [True], None, [1] * 65, [2**40, 2**40]],
            "offset": [-1, 2**70, "0", None, 1.5, 10**30],
            "nbytes": [-1, 11, 13, 2**62, "12", None],
            "stored": ["", None, 1],
            "values": ["", None, 1],
            "base": [1, [], "nothing", "fp32"],
            "codec": [1, [], {}, {"name": 1}],
        }.items()
        for value in values
    },
    "an unknown codec": (state("fp32", codec={"name": "zstd", "level": 3}), Unsupported),
    "an unknown codec of a copy": (state("param", codec={"name": "shiny"}), Unsupported),
    "a codec with unknown options": (state("param", codec={"name": "rounded", "mode": "up"}), Unsupported),
    "a base that is itself a copy": (state("param", base="param"), Corrupt),
    "a base of another shape": (state("param", shape=[4]), Corrupt),
    "a copy without base": (without("parameters", 0, "states", "param", "base"), Corrupt),  # type: ignore[arg-type]
    "states that overlap": (
        lambda s: s["parameters"][0]["states"]["exp_avg"].update(offset=s["parameters"][0]["states"]["fp32"]["offset"]),
        Corrupt,
    ),
    "states with a hole": (lambda s: s["parameters"][0]["states"].pop("exp_avg"), Corrupt),
    "a state in the header": (state("fp32", offset=0), Corrupt),
    "a name twice": (lambda s: s["parameters"][1].update(name=s["parameters"][0]["name"]), Corrupt),
    "a file twice": (lambda s: s["parameters"][1].update(file=s["parameters"][0]["file"]), Corrupt),
    "a version from the future": (lambda s: s.update(version=4), Unsupported),
    "a version before the first": (lambda s: s.update(version=0), Unsupported),
    "a version true": (lambda s: s.update(version=True), Unsupported),
    "no version": (without("version"), Unsupported),
    "another format": (lambda s: s.update(format="other"), Corrupt),
    "another content id": (lambda s: s.update(content="forged"), Corrupt),
    "deep JSON": (lambda s: s.update(extras={"a": deep(400)}), Corrupt),
    "deeper JSON": (lambda s: s.update(extras={"a": deep(900)}), Corrupt),
    "an alias that hides a parameter": (lambda s: s["aliases"].update(w="other"), Corrupt),
    **{
        f"no {key}": (without(key), Corrupt)
        for key in ["format", "content", "origin", "groups", "aliases", "extras", "parameters", "written_by"]
    },
    **{
        f"{key} = {value!r}": (lambda s, key=key, value=value: s.update({key: value}), Corrupt)
        for key in ["origin", "groups", "aliases", "extras", "parameters"]
        for value in [None, 1, "x", True]
    },
    "a group of a number": (lambda s: s.update(groups=[5]), Corrupt),
    "a group without parameters": (lambda s: s.update(groups=[{"options": {}}]), Corrupt),
    "a group of numbers": (lambda s: s.update(groups=[{"options": {}, "parameters": [1]}]), Corrupt),
    "an alias of a number": (lambda s: s.update(aliases={"a": 1}), Corrupt),
    "an origin without engine": (without("origin", "engine"), Corrupt),
    "an origin of an engine that is a list": (lambda s: s["origin"].update(engine=[]), Corrupt),
    "an origin of a version that is a list": (lambda s: s["origin"].update(version=[]), Corrupt),
    "an origin of a step below zero": (lambda s: s["origin"].update(step=-1), Corrupt),
    "an origin with a hostile layout": (lambda s: s["origin"].update(layout={"$array": {}}), Corrupt),
    "a layout that is no mapping": (lambda s: s["origin"].update(layout={"$tuple": []}), Corrupt),
    "extras that are no mapping": (lambda s: s.update(extras={"$tuple": []}), Corrupt),
    "options that are no mapping": (lambda s: s.update(groups=[{"options": {"$set": []}, "parameters": []}]), Corrupt),
    "values that are no mapping": (entry(lambda e: e.update(values={"$tuple": []})), Corrupt),
}


def small() -> Checkpoint:
    master = np.arange(3, dtype=np.float32)
    states = {"fp32": master, "param": master.astype(DTYPES["bfloat16"]), "exp_avg": master}
    return checkpoint([parameter("w", states), parameter("other", {"param": master})], extras={"a": 1})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hostile") / "target"
    write(small(), target)
    return target


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_refused_in_the_right_words(kind: str, written: Path, tmp_path: Path) -> None:
    edit, expected = HOSTILE[kind]
    target = tmp_path / "target"
    shutil.copytree(written, target)
    path = target / manifest.NAME
    said = json.loads(path.read_text())
    del said["checksum"]
    assert said["content"] == identity(said)
    path.write_bytes(sign(said))
    Universal().read(target, ReadOptions())  # the edit alone makes the difference
    edit(said)
    path.write_bytes(sign(said))
    with pytest.raises(expected):
        Universal().read(target, ReadOptions())


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
    with pytest.raises(Corrupt):
        Universal().read(tmp_path, ReadOptions())
    body = text + b"\n"
    signed = b'{"checksum":"xxh3-128:%s",\n' % xxhash.xxh3_128_hexdigest(body).encode() + body
    (tmp_path / manifest.NAME).write_bytes(signed)
    with pytest.raises(Corrupt):
        Universal().read(tmp_path, ReadOptions())


@pytest.mark.parametrize("twice", [b'"version": 1,', b'"format": "ckpt-universal",', b'"name":"w",'])
def test_a_key_that_appears_twice_is_corrupt(twice: bytes, written: Path, tmp_path: Path) -> None:
    good = (written / manifest.NAME).read_bytes()
    body = good[good.index(b"\n") + 1 :].replace(twice, twice * 2, 1)
    (tmp_path / manifest.NAME).write_bytes(
        b'{"checksum":"xxh3-128:%s",\n' % xxhash.xxh3_128_hexdigest(body).encode() + body
    )
    with pytest.raises(Corrupt, match="twice"):
        Universal().read(tmp_path, ReadOptions())


@given(st.data())
def test_slabs_and_workers_do_not_show_in_the_files(data: st.DataObject) -> None:
    source = data.draw(checkpoints())
    with folder() as at:
        for i, effort in enumerate([Resources(1, 1 << 30), Resources(3, 1)]):
            write(source, at / str(i), effort)
        files = [{f.relative_to(at / i): f.read_bytes() for f in (at / i).rglob("*") if f.is_file()} for i in "01"]
        assert files[0] == files[1]


@given(shapes())
def test_only_what_is_asked_for_is_read(shape: tuple[int, ...]) -> None:
    """Reading opens the manifest: parameter files may be noise of the right size."""
    with folder() as at:
        made = write(checkpoint([parameter("w", {MODEL: np.zeros(shape)})]), at / "target")
        for shard in made.files:
            shard.path.write_bytes(b"\xff" * shard.nbytes)
        assert Universal().read(at / "target", ReadOptions()).parameters["w"].states[MODEL].shape == shape
