"""DeepSpeed's universal folders: real ones read as their source, ours read back whole, and what is refused."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.containers.torchfile import open_file
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, InvalidArgumentError, UnsupportedError
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.tensor import read
from ckpt_formats.engines.deepspeed.universal.folder import list_universal
from ckpt_formats.engines.deepspeed.write_layout import with_masters
from ckpt_formats.engines.deepspeed.write_parts import coordinates_of_files
from ckpt_formats.registry import writable
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from damage import SAMPLES, ckpt
from held import checkpoint, parameter

ZERO1, ZERO3 = "zero1-bf16-dp2", "zero3-bf16-dp4-tied-frozen"
PIPELINE = "bf16opt-tp2-pp2"


def source(name: str) -> Checkpoint:
    return open_checkpoint(next(SAMPLES.glob(f"deepspeed-*-{name}")))


def theirs(name: str) -> Path:
    """What DeepSpeed's own converter made of a sample."""
    return next(SAMPLES.glob(f"ds_to_universal-*-{name}"))


def step_in(folder: Path) -> Path:
    return next(folder.glob("*_universal/"))


def write(checkpoint: Checkpoint, folder: Path, **degrees: Any) -> Checkpoint:
    save(checkpoint, folder, writable("deepspeed-universal", **degrees))
    return open_checkpoint(folder)


def contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """Every bit of every tensor of the model, and every plain value, by name."""
    return {
        p.name: (
            p.role,
            dict(p.values),
            {s: (t.dtype.name, t.shape, read(t).tobytes()) for s, t in p.states.items()},
        )
        for p in checkpoint.parameters.values()
        if p.role != "extra"
    }


def assert_same(actual: Checkpoint, expected: Checkpoint) -> None:
    assert contents(actual) == contents(expected)
    assert list(actual.parameters) == list(expected.parameters)
    assert actual.groups == expected.groups
    assert actual.aliases == expected.aliases
    assert actual.extras.keys() == expected.extras.keys() - {"ranks"}


# Material


def trained(*names: str) -> Checkpoint:
    """A small model in memory, all of it trained by Adam."""
    random = np.random.default_rng(1)

    def values() -> np.ndarray:
        return random.standard_normal((4, 6)).astype(np.float32)

    parameters = []
    for name in names:
        master = values()
        states = {"master": master, "model": master, "exp_avg": values(), "exp_avg_sq": values()}
        parameters.append(parameter(name, states, step=3))
    groups = (Group({"lr": 1.0, "betas": (0.9, 0.95)}, names),)
    return checkpoint(parameters, groups, origin=Origin("held", "1.0", 3, {}))


def plan(original: Checkpoint, tmp_path: Path, **degrees: Any) -> tuple[Any, ...]:
    return writable("deepspeed-universal", **degrees).plan(original).files


def copied(tmp_path: Path, round_robin: bool = False) -> Path:
    """A copy of the folder of their step, which claims to come from round-robin gradients if asked to."""
    folder = tmp_path / "step_universal"
    shutil.copytree(step_in(theirs(ZERO1)), folder)
    if round_robin:

        def claim(root: dict) -> None:
            root["ds_config"]["zero_optimization"]["round_robin_gradients"] = True

        change(folder / "mp_rank_00_model_states.pt", claim)
    return folder


def change(file: Path, how: Callable[[Any], Any]) -> None:
    """Change what a file holds."""
    root = torch.load(file, weights_only=False)
    how(root)
    torch.save(root, file)


def exchange(folder: Path, layer: str) -> None:
    """Give two parameters each other's master."""
    one, other = (folder / "zero" / f"blocks.{i}.{layer}.weight" / "fp32.pt" for i in (0, 1))
    one.rename(folder / "held")
    other.rename(one)
    (folder / "held").rename(other)


# Reading theirs


@pytest.mark.parametrize("name", [ZERO1, ZERO3])
def test_deepspeed_universal_reads_the_converters_folder_as_its_source(name: str) -> None:
    actual, expected = open_checkpoint(theirs(name)), source(name)
    assert_same(actual, expected)
    assert actual.origin == expected.origin
    assert find_problems(actual, Execution()) == []


def test_deepspeed_universal_detects_the_step_and_the_folder_above(tmp_path: Path) -> None:
    above = tmp_path / "run"
    shutil.copytree(theirs(ZERO1), above)
    assert detect(above).name == detect(step_in(above)).name == "deepspeed-universal"
    shutil.copytree(next(SAMPLES.glob(f"deepspeed-*-{ZERO1}")), above, dirs_exist_ok=True)
    assert detect(above).name == "deepspeed"  # the run's own checkpoints hold more
    assert detect(step_in(above)).name == "deepspeed-universal"


def test_deepspeed_universal_reads_buffers_despite_their_copies() -> None:
    restored = open_checkpoint(theirs(ZERO1))
    assert (step_in(theirs(ZERO1)) / "zero" / "places").is_dir()
    assert restored.parameters["places"].role == "buffer"
    assert restored.parameters["places"].weight.dtype == np.int64
    assert any("places" in notice for notice in restored.notices)
    assert not open_checkpoint(theirs(ZERO3)).notices


def test_deepspeed_universal_names_states_that_the_converter_lost(tmp_path: Path) -> None:
    folder = copied(tmp_path)

    def amsgrad(root: dict) -> None:
        root["param_groups"][0]["amsgrad"] = True

    change(folder / "zero" / "optimizer_state.pt", amsgrad)
    assert any("max_exp_avg_sq" in notice for notice in open_checkpoint(folder).notices)


# Writing ours


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [ZERO1, ZERO3, PIPELINE])
def test_deepspeed_universal_reads_back_what_it_writes(name: str, tmp_path: Path) -> None:
    expected = source(name)
    reopened = write(expected, tmp_path / "u")
    assert_same(reopened, expected)
    assert reopened.origin.layout["dp"] == expected.origin.layout["dp"]
    assert reopened.origin.layout.get("pipeline") == expected.origin.layout.get("pipeline")
    assert find_problems(reopened, Execution()) == []
    assert (tmp_path / "u" / "latest_universal").read_text() == step_in(tmp_path / "u").name


def test_deepspeed_universal_reads_back_tensor_parallel_cuts(tmp_path: Path) -> None:
    expected = source(PIPELINE)
    reopened = write(expected, tmp_path / "u", tp=2)
    assert len(list(step_in(tmp_path / "u").glob("mp_rank_*"))) == 2
    assert contents(reopened) == contents(expected)


def test_reshard_there_and_back_changes_nothing(tmp_path: Path) -> None:
    first = write(source(ZERO1), tmp_path / "a")
    save(first, tmp_path / "b", writable("deepspeed", dp=3, zero=3))
    last = write(open_checkpoint(tmp_path / "b"), tmp_path / "c", zero=2)
    assert_same(last, source(ZERO1))


def test_deepspeed_universal_has_folders_of_trained_parameters_only(tmp_path: Path) -> None:
    expected = source(ZERO3)
    write(expected, tmp_path / "u")
    held = {path.name for path in (step_in(tmp_path / "u") / "zero").iterdir()}
    trained = {name for name, p in expected.parameters.items() if p.role == "parameter"}
    assert expected.aliases
    assert {p.role for p in expected.parameters.values()} >= {"frozen", "buffer"}
    assert held == trained | {"optimizer_state.pt"}


def test_universal_folder_has_no_tensors_but_parameters(tmp_path: Path) -> None:
    write(source(ZERO3), tmp_path / "u")
    step = step_in(tmp_path / "u")
    assert (step / "zero" / "optimizer_state.pt").stat().st_size < 10_000
    assert (step / "zero_pp_rank_0_mp_rank_00_model_states.pt").stat().st_size < 20_000
    with_weights = torch.load(step / "mp_rank_00_model_states.pt", weights_only=False)
    assert with_weights["module"]["position.weight"].shape == source(ZERO3).parameters["position.weight"].weight.shape


def test_stage_3_target_has_the_options_that_all_groups_share(tmp_path: Path) -> None:
    write(source(ZERO1), tmp_path / "u")
    saved = torch.load(step_in(tmp_path / "u") / "zero" / "optimizer_state.pt", weights_only=False)
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.1, 0.0]
    for group in saved["optimizer_state_dict"]["param_groups"]:
        assert "weight_decay" not in group
        assert group["betas"] == (0.9, 0.95)
    assert saved["optimizer_state_dict"]["state"][0]["step"] == 5


@pytest.mark.parametrize("name", ["a/b.weight", "café [0] *", "x" * 200, "tensor.with.dots", "a\\b", "-"])
def test_deepspeed_universal_takes_odd_names(name: str, tmp_path: Path) -> None:
    expected = trained(name, "plain")
    assert contents(write(expected, tmp_path / "u")) == contents(expected)


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/x", "a//b", "", ".", "..", "./x", "fp32.pt", "optimizer_state.pt", "a\0b", "x" * 300],
)
def test_deepspeed_universal_refuses_names_that_lead_elsewhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="name of a folder"):
        plan(trained(name, "plain"), tmp_path)


def test_deepspeed_universal_refuses_state_names_that_lead_elsewhere(tmp_path: Path) -> None:
    original = trained("w")
    states = {**original.parameters["w"].states, "../../x": original.parameters["w"].states["exp_avg"]}
    with pytest.raises(UnsupportedError, match="name of a folder"):
        plan(replace(original, parameters={"w": replace(original.parameters["w"], states=states)}), tmp_path)


def _of_other_optimizers() -> dict[str, tuple[Checkpoint, int | None, str]]:
    original = trained("w", "v")
    w, v = original.parameters["w"], original.parameters["v"]
    alone = {s: t for s, t in w.states.items() if s != "exp_avg_sq"}
    counting = {name: replace(p, values={**p.values, "mu_product": 0.5}) for name, p in original.parameters.items()}
    one_each = tuple(Group({"lr": 1.0}, (name,)) for name in ("w", "v"))
    return {
        "Muon": (replace(original, groups=(Group({"lr": 1.0, "use_muon": True}, ("w", "v")),)), None, "Muon"),
        "a scalar that is no step": (replace(original, parameters=counting), None, "no place"),
        "no groups": (replace(original, groups=()), None, "group"),
        "two steps at stage 3": (
            replace(original, parameters={"w": w, "v": replace(v, values={"step": 4})}, groups=one_each),
            3,
            "stage 3: it knows one step",
        ),
        "one moment at stage 3": (
            replace(trained("w"), parameters={"w": replace(w, states=alone)}),
            3,
            "stage 3: it needs exactly",
        ),
    }


@pytest.mark.parametrize("name", _of_other_optimizers())
def test_write_refuses_what_deepspeed_could_not_load(name: str, tmp_path: Path) -> None:
    original, zero, says = _of_other_optimizers()[name]
    with pytest.raises(UnsupportedError, match=says):
        plan(original, tmp_path, zero=zero)


def test_stage_0_is_no_universal_checkpoint_of_deepspeed() -> None:
    with pytest.raises(InvalidArgumentError, match="zero must be a whole number from 1 to 3 or None, not 0"):
        writable("deepspeed-universal", zero=0)


def test_stage_3_is_refused_without_moments_of_adam(tmp_path: Path) -> None:
    original = trained("w")
    states = {s: t for s, t in original.parameters["w"].states.items() if s != "exp_avg_sq"}
    sgd = replace(original, parameters={"w": replace(original.parameters["w"], states=states)})
    files = [Path(part.file).name for part in plan(sgd, tmp_path)]
    assert "mp_rank_00_model_states.pt" in files
    assert not any(file.startswith("zero_pp_rank") for file in files)


def test_deepspeed_universal_writes_rules_in_deepspeeds_terms(tmp_path: Path) -> None:
    original = trained("row", "qkv", "swiglu", "word", "norm", "column")
    rules = (
        Rule("row", axis=1),
        Rule("qkv", fused=(2, 1, 1)),
        Rule("swiglu", fused=2),
        Rule("word", vocabulary=4),
        Rule("norm", "replicated"),
        Rule("column"),
    )
    save(original, tmp_path / "u", writable("deepspeed-universal", rules=rules))
    trees = {file.parent.name: open_file(file).root for file in (tmp_path / "u").glob("**/fp32.pt")}
    entries = {name: {k: v for k, v in tree.items() if k != "param"} for name, tree in trees.items()}
    sub_shape = entries["qkv"].pop("sub_param_shape")
    assert (sub_shape.cls.name, sub_shape.get("shape"), sub_shape.get("partition_dim")) == (
        "SubparamShape", ((2, 1, 1), 6), 0,
    )  # fmt: skip
    assert entries == {
        "row": {"cat_dim": 1},
        "qkv": {},
        "swiglu": {"cat_dim": 0, "param_n_sub_params": 2},
        "word": {"cat_dim": 0, "vocab_tensor": True},
        "norm": {},
        "column": {"cat_dim": 0},
    }


def test_convert_writes_deepspeed_universal_and_names_what_is_dropped(tmp_path: Path) -> None:
    done = ckpt("convert", next(SAMPLES.glob(f"deepspeed-*-{ZERO1}")), tmp_path / "u", "--to", "deepspeed-universal")
    assert done.code == 0, done.err
    assert ckpt("verify", tmp_path / "u").code == 0
    original = trained("w")
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    (dropped,) = writable("deepspeed-universal").plan(replace(original, extras={"ds_config": config})).dropped
    assert "round_robin_gradients" in dropped


# Round-robin gradients


def test_deepspeed_universal_recognises_round_robin_gradients(tmp_path: Path) -> None:
    folder = copied(tmp_path, round_robin=True)
    exchange(folder, "norm1")
    with pytest.raises(
        CorruptError, match="made by DeepSpeed's converter from a run with round_robin_gradients"
    ) as caught:
        open_checkpoint(folder)
    assert "masters of 2 parameters (`blocks.0.norm1.weight`, `blocks.1.norm1.weight`)" in caught.value.what
    assert "Convert the original checkpoint" in (caught.value.hint or "")
    for command in (("verify", folder), ("convert", folder, tmp_path / "out")):
        done = ckpt(*command)
        assert done.code == 20
        assert "round_robin_gradients" in done.err
    assert not (tmp_path / "out").exists()


def test_deepspeed_universal_accepts_a_right_folder_of_a_round_robin_run(tmp_path: Path) -> None:
    folder = copied(tmp_path, round_robin=True)
    assert contents(open_checkpoint(folder)) == contents(source(ZERO1))
    written = tmp_path / "ours"
    assert contents(write(open_checkpoint(folder), written)) == contents(source(ZERO1))
    # Ours keeps the order of the groups, though the configuration still speaks of round robin.
    assert open_checkpoint(written).groups == open_checkpoint(folder).groups


def test_masters_without_weights_to_hold_them_against_are_refused_of_such_a_run(tmp_path: Path) -> None:
    folder = copied(tmp_path, round_robin=True)

    def drop(root: dict) -> None:
        root["module"] = None

    change(folder / "mp_rank_00_model_states.pt", drop)
    for name in ("drift", "places", "seen"):
        shutil.rmtree(folder / "zero" / name)
    with pytest.raises(CorruptError, match="no weights here to check it"):
        open_checkpoint(folder)


def test_deepspeed_universal_tells_damage_from_round_robin(tmp_path: Path) -> None:
    folder = copied(tmp_path, round_robin=True)
    file = folder / "zero" / "norm.weight" / "fp32.pt"
    values = torch.load(file, weights_only=False)["param"].detach().numpy().tobytes()
    held = bytearray(file.read_bytes())
    held[held.index(values) + 3] ^= 4
    file.write_bytes(held)
    done = ckpt("verify", folder)
    assert done.code == 20
    assert "crc32" in done.err + done.out
    assert "round_robin" not in done.err + done.out


def test_deepspeed_universal_tells_masters_of_another_run_from_round_robin(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    for file in folder.glob("zero/*/fp32.pt"):
        change(file, lambda root: root["param"].data.add_(1))
    message = r"parameters \(`[^`]+`, `[^`]+`, `[^`]+` and \d+ more\) do not round to the weights in the model's files"
    with pytest.raises(CorruptError, match=message) as caught:
        open_checkpoint(folder)
    assert "mixed" in (caught.value.hint or "")


def test_verify_names_a_few_masters_that_differ(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    exchange(folder, "norm1")
    findings = find_problems(open_checkpoint(folder), Execution())
    assert {(f.kind, f.tensors[0]) for f in findings} == {
        ("copy", "blocks.0.norm1.weight"),
        ("copy", "blocks.1.norm1.weight"),
    }


# Broken and hostile folders


def _remove(name: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return harm


def _save(name: str, value: object) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        torch.save(value, folder / name)

    return harm


def _many_ranks(folder: Path) -> None:
    change(folder / "zero" / "optimizer_state.pt", lambda root: root.update(partition_count=[1 << 60, 1 << 60]))


HARMS: dict[str, tuple[Callable[[Path], None], type[CkptError], str]] = {
    "a parameter's folder is gone": (_remove("zero/norm.weight"), IncompleteError, "`norm.weight` has no folder"),
    "a master is gone": (_remove("zero/norm.weight/fp32.pt"), IncompleteError, "no fp32.pt"),
    "the model's file is gone": (_remove("mp_rank_00_model_states.pt"), IncompleteError, "model files"),
    "a folder that nobody knows": (_save("zero/odd/fp32.pt", {"param": torch.ones(3)}), CorruptError, "`odd`"),
    "another shape": (_save("zero/norm.weight/exp_avg.pt", {"param": torch.ones(3)}), CorruptError, "shape"),
    "flat, but of another size": (_save("zero/norm.weight/fp32.pt", torch.ones(3)), CorruptError, "shape"),
    "a master of no shape": (_save("zero/norm.weight/fp32.pt", {"param": torch.tensor(1.0)}), CorruptError, "shape"),
    "no tensor": (_save("zero/norm.weight/exp_avg.pt", {"param": "text"}), CorruptError, "expected a tensor"),
    "no `param`": (_save("zero/norm.weight/exp_avg.pt", {}), CorruptError, "'param'"),
    "a step that is text": (_save("zero/norm.weight/step.pt", "five"), CorruptError, "expected a tensor"),
    "experts without a number": (
        _save("zero/norm.weight/fp32.pt", {"param": torch.ones(32), "is_expert_param": True}), CorruptError, "shape",
    ),
    "experts of another number": (
        _save("zero/norm.weight/fp32.pt", {"param": torch.ones(32), "is_expert_param": True, "ep_num_experts": 4}),
        CorruptError,
        "4 experts",
    ),
    "the optimizer's file is a list": (_save("zero/optimizer_state.pt", [1]), CorruptError, "entry"),
    "groups are missing": (_save("zero/optimizer_state.pt", {"param_groups": [{}]}), CorruptError, "groups"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMS)
def test_deepspeed_universal_refuses_a_broken_folder(name: str, tmp_path: Path) -> None:
    harm, kind, says = HARMS[name]
    folder = copied(tmp_path)
    harm(folder)
    with pytest.raises(kind, match=says):
        open_checkpoint(folder)


def test_deepspeed_universal_refuses_an_absurd_number_of_ranks(tmp_path: Path) -> None:
    folder = copied(tmp_path, round_robin=True)
    _many_ranks(folder)
    assert open_checkpoint(folder).groups


@pytest.mark.parametrize("tag", ["../elsewhere", "..", "", "a/b", "\0", "gone"])
def test_latest_universal_names_a_folder_beside_it(tag: str, tmp_path: Path) -> None:
    (tmp_path / "latest_universal").write_text(tag)
    with pytest.raises(CkptError):
        open_checkpoint(tmp_path)


def test_deepspeed_universal_follows_no_links_of_parameters(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "zero" / "norm.weight").rename(tmp_path / "outside")
    (folder / "zero" / "norm.weight").symlink_to(tmp_path / "outside")
    with pytest.raises(IncompleteError, match="no folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("unfinished", "hint"), [(True, "convert again"), (False, "Copy them from the checkpoint")])
def test_list_universal_names_model_files_that_are_missing(unfinished: bool, hint: str, tmp_path: Path) -> None:
    (tmp_path / ("tmp" if unfinished else "zero")).mkdir()
    with pytest.raises(IncompleteError, match="which list the groups of parameters, are missing") as refused:
        list_universal(tmp_path)
    assert hint in str(refused.value.hint)


def test_deepspeed_universal_names_a_parameter_in_no_group_or_in_two() -> None:
    both = [parameter(name, {"model": np.ones(2, np.float32)}) for name in "ab"]
    for names, misplaced in ((("a",), "b"), (("a", "b", "a"), "a"), (("a", "b", "c"), "c")):
        with pytest.raises(UnsupportedError, match=f"`{misplaced}` is not in exactly one group"):
            with_masters(checkpoint(both, (Group({"lr": 0.1}, names),)))
    assert "master" in with_masters(checkpoint(both, (Group({"lr": 0.1}, ("a", "b")),))).parameters["a"].states


def test_files_of_layers_are_planned_in_the_order_of_the_layers() -> None:
    target = SimpleNamespace(pp=1, tp=2, dp=1, stage=1, pipeline=object())
    planned: Any = list(coordinates_of_files(target, SimpleNamespace(names_by_layer={3: [], 0: [], 12: []})))  # type: ignore[arg-type]
    assert [(one.tp, one.layer) for one in planned[-6:]] == [(tp, layer) for tp in (0, 1) for layer in (0, 3, 12)]
