"""Families of models: each comes back bit for bit, stored against the model that it is most like."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import ckpt as library
from ckpt.chains.append import append
from ckpt.chains.chain import Chain
from ckpt.chains.compact import Retention
from ckpt.chains.write import DeltaPolicy
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.containers import sealed_json
from ckpt_formats.core.checkpoint import Checkpoint, Origin
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, CorruptError, NotFoundError, UnsupportedError
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import Array
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.stores.location import source_path
from ckpt_formats.universal.chain import chain_file
from damage import BROKEN, NOT_FOUND, UNSUPPORTED, ckpt
from held import checkpoint, contents, parameter
from object_stores import BUCKET, StoreServer
from page_codecs import decode, decode_delta
from universal_decoder import ChainReader

BF16 = DTYPES["bfloat16"]
GOLDEN = Path(__file__).resolve().parents[1] / "golden_family"
SHAPES = {"embed.weight": (500, 96), "layer.weight": (300, 200), "head.weight": (500, 96), "norm.bias": (96,)}
Weights = Mapping[str, Array]


def weights(seed: int) -> Weights:
    generator = np.random.default_rng(seed)
    return {name: (0.02 * generator.standard_normal(shape)).astype(BF16) for name, shape in SHAPES.items()}


def tuned(before: Weights, seed: int, rate: float = 1e-4, only: str = "") -> Weights:
    """Weights after a fine-tuning: all moved a little, or those whose name contains a text."""
    generator = np.random.default_rng(seed)
    return {
        name: (x.astype(np.float32) + rate * generator.standard_normal(x.shape)).astype(BF16) if only in name else x
        for name, x in before.items()
    }


def model(values: Weights) -> Checkpoint:
    return checkpoint((parameter(name, {"model": x}) for name, x in values.items()), origin=Origin("held", None, None))


BASE = weights(0)
MATH = tuned(BASE, 1)
MODELS = {
    "base": BASE,
    "math": MATH,
    "code": tuned(BASE, 2),
    "math-dpo": tuned(MATH, 3, 3e-5),
    "lora": tuned(BASE, 4, 1e-3, only="layer"),
    "other": weights(5),
}
PARENTS = {"base": None, "math": "base", "code": "base", "math-dpo": "math", "lora": "base", "other": None}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose parents were found by content. Tests read it only."""
    run = tmp_path_factory.mktemp("family") / "models.chain"
    for name, values in MODELS.items():
        Chain(run).append(model(values), name=name)
    return run


def copy(family: Path, target: Path) -> Path:
    return Path(shutil.copytree(family, target / "models.chain"))


def parents(run: Path) -> dict[str, str | None]:
    chain = chain_file.read(run)
    return {m.name or "": None if (p := chain.parent_of(m)) is None else p.name for m in chain.members}


def assert_whole(run: Path, names: "list[str] | tuple[str, ...]") -> None:
    """Each model has its bits, by the library, and by the reader that was written from the page alone."""
    assert list(Chain(run).models) == list(names)
    assert not Chain(run).verify().findings
    independent = ChainReader(run, decode, decode_delta)
    for name, number in Chain(run).models.items():
        assert contents(open_checkpoint(run.with_name(f"{run.name}@{name}"))) == contents(model(MODELS[name]))
        for one, expected in MODELS[name].items():
            assert independent.checkpoints[number].values(one, to_stored("model")) == expected.tobytes()


@pytest.mark.slow
def test_models_are_deltas_of_the_most_similar_one(family: Path) -> None:
    assert parents(family) == PARENTS
    assert_whole(family, tuple(MODELS))
    stored = {m.name: m.stored_nbytes for m in chain_file.read(family).members}
    assert stored["math-dpo"] < 0.8 * stored["math"] < 0.4 * stored["base"]
    assert stored["lora"] < 0.4 * stored["base"]


@pytest.mark.slow
def test_removal_keeps_every_bit_of_the_models_that_stay(family: Path, tmp_path: Path) -> None:
    expected = {
        ("math",): {**PARENTS, "math-dpo": "base"},
        ("base",): {**PARENTS, "math": None, "code": "math", "lora": "math"},
        ("base", "math", "other"): {"code": None, "math-dpo": "code", "lora": "code"},
        ("base", "math", "code", "other", "lora"): {"math-dpo": None},
        ("lora", "other"): PARENTS,
    }
    for number, (removed, after) in enumerate(expected.items()):
        run = copy(family, tmp_path / str(number))
        Chain(run).compact(Retention(remove=removed))
        kept = [name for name in MODELS if name not in removed]
        assert parents(run) == {name: after[name] for name in kept}
        assert_whole(run, kept)
        folders = {one.name for one in run.iterdir() if one.is_dir()}
        listed = chain_file.read(run)
        assert folders == {m.folder for m in listed.members} | set(listed.shared_packs())


@pytest.mark.slow
def test_damage_is_named_with_the_models_that_need_it(family: Path, tmp_path: Path) -> None:
    run = copy(family, tmp_path)
    pack = next((run / chain_file.read(run).members[1].folder / "packs").iterdir())
    data = bytearray(pack.read_bytes())
    data[-100] ^= 1
    pack.write_bytes(data)
    report = json.loads(ckpt("verify", run, "--json").out)
    assert report["damaged_models"] == ["math", "math-dpo"]
    assert "models that cannot be restored: math, math-dpo" in ckpt("verify", run).out
    failed = ckpt("restore", f"{run}@math-dpo", tmp_path / "out")
    assert failed.code == BROKEN
    assert "These models do not need it: `base`, `code`, `lora` and 1 more" in failed.err
    assert ckpt("restore", f"{run}@code", tmp_path / "out").code == 0
    assert contents(open_checkpoint(tmp_path / "out")) == contents(model(MODELS["code"]))


@pytest.mark.slow
def test_tensors_that_fit_no_model_are_stored_in_full_and_named(family: Path, tmp_path: Path) -> None:
    run = copy(family, tmp_path)
    resized = {**tuned(MATH, 6), "embed.weight": np.zeros((501, 96), BF16), "value_head.weight": np.ones((1, 96), BF16)}
    retyped = {name: x.astype(np.float32) for name, x in MATH.items()}
    prefixed = {f"model.{name}": x for name, x in MATH.items()}
    for name, values, parent, words in (
        ("resized", resized, "math", ("of another shape than in math", "embed.weight", "not in math", "value_head")),
        ("retyped", retyped, None, ("4 tensors of another type than in base",)),
        ("empty", {}, None, ("no model of the family has a tensor of the same name",)),
        ("prefixed", prefixed, None, ("no model of the family has a tensor of the same name", r"--rename '^model\.='")),
    ):
        written = Chain(run).append(model(values), name=name)
        assert parents(run)[name] == parent
        notes = " ".join(note.shown(99) for note in written.notes)
        assert not [word for word in words if word not in notes]
        assert contents(Chain(run)[name]) == contents(model(values))
    with pytest.raises(UnsupportedError, match="no tensor has the same name, shape and type as in math"):
        Chain(run).append(model(prefixed), name="again", parent="math")
    assert not Chain(run).verify().findings


@pytest.mark.slow
def test_model_that_the_family_has_is_refused(family: Path, tmp_path: Path) -> None:
    run = copy(family, tmp_path)
    before = sorted(run.rglob("*"))
    with pytest.raises(UnsupportedError, match="already, as code"):
        Chain(run).append(model(MODELS["code"]), name="same")
    with pytest.raises(UnsupportedError, match="a model called code already"):
        Chain(run).append(model(tuned(BASE, 9)), name="code")
    for name in ("last", "7", "a/b", "", "none"):
        with pytest.raises(CkptError, match="cannot be the name"):
            Chain(run).append(model(tuned(BASE, 9)), name=name)
    assert sorted(run.rglob("*")) == before


@pytest.mark.slow
def test_commands_choose_show_and_restore_models(tmp_path: Path) -> None:
    run = tmp_path / "models.chain"
    for name in ("base", "math", "code"):
        save(model(MODELS[name]), tmp_path / f"{name}.safetensors")
    assert ckpt("append", run, tmp_path / "base.safetensors", "--family").code == 0
    plan = json.loads(ckpt("append", run, tmp_path / "math.safetensors", "--dry-run", "--json").out)
    assert (plan["name"], plan["parent"], [one["name"] for one in plan["candidates"]]) == ("math", "base", ["base"])
    assert list(Chain(run).models) == ["base"]
    assert plan["stored_nbytes"] < plan["alone_nbytes"] / 2
    written = json.loads(ckpt("append", run, tmp_path / "math.safetensors", "--json").out)
    assert abs(written["stored_nbytes"] - plan["stored_nbytes"]) < 0.15 * written["stored_nbytes"]
    assert ckpt("append", run, tmp_path / "code.safetensors", "--parent", "math").code == 0
    assert parents(run) == {"base": None, "math": "base", "code": "math"}
    shown = ckpt("inspect", run).out
    assert shown == ckpt("log", run).out
    listed = json.loads(ckpt("inspect", run, "--json").out)
    assert [one["name"] for one in listed["checkpoints"]] == [
        f"models.chain@{name}" for name in ("base", "math", "code")
    ]
    assert "    code" in shown
    assert ckpt("restore", f"{run}@math", tmp_path / "again.safetensors").code == 0
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "math.safetensors").read_bytes()
    assert "different: 4 of 4 tensors" in ckpt("diff", f"{run}@math", f"{run}@code").out
    assert ckpt("diff", f"{run}@base", tmp_path / "math.safetensors", "-o", tmp_path / "delta", "--step", 1).code == 0
    assert contents(open_checkpoint(tmp_path / "delta")) == contents(model(MATH))
    assert ckpt("verify", run, "--quick").code == 0
    for code, words, arguments in (
        (NOT_FOUND, "the path names none of them", ("restore", run, tmp_path / "x")),
        (NOT_FOUND, "no model nothing in this family", ("inspect", f"{run}@nothing")),
        (
            NOT_FOUND,
            "no model nothing",
            ("append", run, tmp_path / "math.safetensors", "--name", "b", "--parent", "nothing"),
        ),
        (NOT_FOUND, "no model nothing", ("compact", run, "--remove", "nothing")),
        (UNSUPPORTED, "no steps", ("compact", run, "--keep", "last:1")),
        (UNSUPPORTED, "no model would stay", ("compact", run, *(f"--remove={name}" for name in parents(run)))),
        (2, "--step is about the steps of a run", ("append", run, tmp_path / "math.safetensors", "--step", 4)),
    ):
        ran = ckpt(*arguments)
        assert (ran.code, words in ran.err) == (code, True), (ran, words)


@pytest.mark.slow
def test_other_chains_have_no_models_and_families_no_steps(family: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.chain"
    append(run, model(BASE), 1, DeltaPolicy(), Execution())
    with pytest.raises(UnsupportedError, match="no models with names"):
        Chain(run).append(model(MATH), name="math")
    with pytest.raises(UnsupportedError, match="no models with names"):
        Chain(run).compact(Retention(remove=("math",)))
    with pytest.raises(NotFoundError, match="has steps, and no model called math"):
        open_checkpoint(tmp_path / "run.chain@math")
    with pytest.raises(UnsupportedError, match="a family of models, which has no steps"):
        append(copy(family, tmp_path), model(MATH), 9, DeltaPolicy(), Execution())
    for retention in (Retention(("last:1",)), Retention(upto=1), Retention(gradients=0)):
        with pytest.raises(UnsupportedError, match="a family of models, which has no steps"):
            Chain(family).compact(retention)
    for policy in (
        DeltaPolicy(tip=True),
        DeltaPolicy(base_every=2),
        DeltaPolicy(base="coded"),
        DeltaPolicy(partial=0.5),
    ):
        with pytest.raises(CkptError, match="is about the steps of a run"):
            Chain(family).append(model(MATH), policy, name="x")


def _set(key: str, number: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["members"][number].__setitem__(key, value)


def test_list_of_a_family_is_checked() -> None:
    family = GOLDEN / "family-1.chain"
    content = (family / "chain.json").read_bytes()
    members = chain_file.read(family).members
    for words, change in (
        ("name", _set("name", 1, "last")),
        ("name", _set("name", 1, "../x")),
        ("name", _set("name", 1, "math/../../x")),
        ("name", _set("name", 1, "math\n")),
        ("a name twice", _set("name", 1, "base")),
        ("number 3 after number 3", _set("step", 1, 3)),
        ("is not an earlier member", _set("parent", 1, members[3].content)),
        ("is not an earlier member", _set("parent", 1, members[1].content)),
        ("is not an earlier member", _set("parent", 0, members[1].content)),
        ("content of math-dpo twice", _set("content", 2, members[1].content)),
        ("a folder twice", _set("folder", 2, members[1].folder)),
        ("not a family", lambda fields: fields.update(family=False)),
        ("not a family", lambda fields: fields.update(segments=[1])),
        ("there are none", lambda fields: fields.update(members=[])),
        ("parent of", lambda fields: fields.update(version=1)),
    ):
        fields = json.loads(json.dumps(sealed_json.parse(content, family, "x")))
        del fields["checksum"]
        change(fields)
        with pytest.raises(CorruptError, match=words):
            chain_file.parse(sealed_json.dump(fields), family / "chain.json")
    assert sealed_json.parse(content, family, "x")["version"] == 3


def test_list_that_names_another_parent_loses_no_model(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GOLDEN / "family-1.chain", tmp_path / "models.chain"))
    path = run / chain_file.NAME
    fields = sealed_json.parse(path.read_bytes(), path, "x")
    del fields["checksum"]
    fields["members"][2]["parent"] = fields["members"][0]["content"]  # math-dpo is a delta of math
    path.write_bytes(sealed_json.dump(fields))
    for use in (lambda: Chain(run)["math-dpo"], lambda: Chain(run).compact(Retention(remove=("math",)))):
        with pytest.raises(CorruptError, match="stored against another model than the list says"):
            use()
    assert (run / "step-0000000002").is_dir()
    assert json.loads(ckpt("verify", run, "--json").out)["damaged_models"] == ["math-dpo"]


def test_golden_family_has_every_bit_of_every_model() -> None:
    """`tests/golden_family/make.py` wrote it; no test does."""
    run = GOLDEN / "family-1.chain"
    expected = json.loads((GOLDEN / "family-1.expected.json").read_text())
    members = {m.name: m for m in chain_file.read(run).members}
    assert list(members) == list(expected)
    assert [name for name, m in members.items() if m.shared] == ["embed"]
    assert members["again"].folder == "step-0000000005.1"
    independent = ChainReader(run, decode, decode_delta)
    for name, hashes in expected.items():
        values = contents(open_checkpoint(run.with_name(f"{run.name}@{name}")))
        assert {key: xxhash.xxh3_128_hexdigest(data) for (key, _), (_, _, data) in values.items()} == hashes
        decoded = independent.checkpoints[members[name].step]
        assert {key: xxhash.xxh3_128_hexdigest(decoded.values(key, to_stored("model"))) for key in hashes} == hashes


@pytest.mark.slow
def test_family_in_a_bucket_is_changed_and_copied(user: StoreServer, family: Path, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/a/models.chain"
    library.copy(family, url)
    run = Chain(url)
    with pytest.raises(UnsupportedError, match="already, as code"):
        run.append(model(MODELS["code"]), name="same")
    run.compact(Retention(remove=("math", "base")))
    stays = ["code", "math-dpo", "lora", "other"]
    library.copy(url, tmp_path / "back.chain")
    assert_whole(tmp_path / "back.chain", stays)
    assert contents(open_checkpoint(source_path(f"{url}@lora"))) == contents(model(MODELS["lora"]))
    Chain(tmp_path / "back.chain").append(model(MATH), name="math")
    library.update_copy(tmp_path / "back.chain", url)
    assert list(run.models) == [*stays, "math"]
    assert "math-dpo" in ckpt("inspect", url).out
    begun = ckpt("append", f"{url}-2", f"{tmp_path / 'back.chain'}@other", "--name", "first")
    assert f"{url}-2: first, base" in begun.out, begun.err
