"""`ckpt average`, `ckpt merge` and `ckpt merge-lora`: what the commands write, print and refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_formats.core.checkpoint import MODEL
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from damage import SAMPLES, ckpt

ZERO1 = next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2"))
SHAPE = (6, 4)
NAME = "model.layers.0.self_attn.q_proj.weight"


def write_model(folder: Path, seed: int, **more: Any) -> Path:
    """A folder of Hugging Face's with two weights."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    rng = np.random.default_rng(seed)
    folder.mkdir()
    tensors = {NAME: rng.standard_normal(SHAPE).astype(np.float32), "model.norm.weight": np.ones(4, np.float32)}
    save_file({**tensors, **more}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    return folder


def write_adapter(folder: Path, **config: Any) -> Path:
    """A LoRA adapter of rank 2 for one weight, as PEFT saves it."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    rng = np.random.default_rng(9)
    folder.mkdir()
    prefix = f"base_model.model.{NAME.removesuffix('.weight')}"
    a, b = rng.standard_normal((2, SHAPE[1])), rng.standard_normal((SHAPE[0], 2))
    tensors = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    save_file({name: x.astype(np.float32) for name, x in tensors.items()}, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def tensor(path: Path, name: str = NAME) -> Any:
    return read(open_checkpoint(path).parameters[name].weight)


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [write_model(tmp_path / f"m{i}", i) for i in range(3)]


# ckpt average


@pytest.mark.parametrize(
    ("options", "weights"),
    [((), (1, 1, 1)), (("--weights", "1,2,1"), (1, 2, 1)), (("--ema", "0.5"), (0.25, 0.25, 0.5))],
)
def test_the_average_is_written(
    options: tuple[str, ...], weights: tuple[float, ...], models: list[Path], tmp_path: Path
) -> None:
    done = ckpt("average", *models, tmp_path / "mean", "--to", "hf", *options)
    assert done.code == 0, done.err
    assert done.out.startswith("wrote ")
    arrays = [tensor(model).astype(np.float64) for model in models]
    total = arrays[0] * weights[0] + arrays[1] * weights[1] + arrays[2] * weights[2]
    assert tensor(tmp_path / "mean").tobytes() == (total / sum(weights)).astype(np.float32).tobytes()
    assert json.loads((tmp_path / "mean" / "config.json").read_text())["model_type"] == "llama"
    assert ckpt("verify", tmp_path / "mean").code == 0


def test_the_target_may_be_a_single_file_or_of_another_format(models: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "mean.safetensors"
    assert ckpt("average", *models[:2], file, "--to", "safetensors").code == 0
    assert file.is_file()
    folder = tmp_path / "universal"
    assert ckpt("average", models[0], file, folder).code == 0
    assert open_checkpoint(folder).origin.engine
    weight = tmp_path / "mean.pt"
    assert ckpt("average", models[0], models[0], weight).code == 0
    assert tensor(weight).tobytes() == tensor(models[0]).tobytes()


def test_the_states_of_a_chain_are_averaged_by_their_paths(tmp_path: Path) -> None:
    chain = tmp_path / "run.chain"
    for step in (1, 2):
        assert ckpt("append", chain, write_model(tmp_path / str(step), step), "--step", step).code == 0
    assert ckpt("average", f"{chain}@1", f"{chain}@last", tmp_path / "mean").code == 0
    arrays = [tensor(tmp_path / str(step)).astype(np.float64) for step in (1, 2)]
    assert tensor(tmp_path / "mean").tobytes() == ((arrays[0] + arrays[1]) / 2).astype(np.float32).tobytes()


def test_notes_name_what_is_not_in_the_average(tmp_path: Path) -> None:
    done = ckpt("average", ZERO1, ZERO1, tmp_path / "mean")
    assert done.code == 0, done.err
    assert "optimizer's states are not in the result" in done.err
    shown = json.loads(ckpt("average", ZERO1, ZERO1, tmp_path / "again", "--json").out)
    assert any("not in the result" in note["text"] for note in shown["notes"])
    assert shown["files"] == len(list((tmp_path / "again").glob("packs/*.safetensors")))
    for name, parameter in open_checkpoint(tmp_path / "mean").parameters.items():
        assert list(parameter.states) == [MODEL], name
        assert tensor(tmp_path / "mean", name).tobytes() == tensor(ZERO1, name).tobytes()


def test_average_takes_selected_tensors_only(models: list[Path], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", 5, **{"extra.ids": np.arange(3)})
    done = ckpt("average", other, models[0], tmp_path / "mean")
    assert (done.code, "lacks 1 tensors" in done.err) == (20, True)
    changed = write_model(tmp_path / "changed", 6, **{"extra.ids": np.arange(3)[::-1].copy()})
    done = ckpt("average", other, changed, tmp_path / "mean")
    assert (done.code, "--skip" in done.err) == (22, True)
    assert not (tmp_path / "mean").exists()
    assert ckpt("average", other, changed, tmp_path / "mean", "--skip", r"^extra\.").code == 0
    assert set(open_checkpoint(tmp_path / "mean").parameters) == {NAME, "model.norm.weight"}


def test_models_of_hugging_face_in_another_format_are_spoken_of(models: list[Path], tmp_path: Path) -> None:
    words = "with --to hf, it is a folder that transformers loads"
    assert words in ckpt("average", *models[:2], tmp_path / "a").err
    assert words not in ckpt("average", *models[:2], tmp_path / "b", "--to", "hf").err
    assert words not in ckpt("average", *models[:2], tmp_path / "c.safetensors").err
    assert words in ckpt("merge-lora", models[0], write_adapter(tmp_path / "adapter"), tmp_path / "d").err


def test_a_chain_alone_stands_for_all_its_states(models: list[Path], tmp_path: Path) -> None:
    chain = tmp_path / "run.chain"
    for step, model in enumerate(models, 1):
        assert ckpt("append", chain, model, "--step", step).code == 0
    done = ckpt("average", f"{chain}/", tmp_path / "ema", "--ema", "0.9")
    assert done.code == 0, done.err
    assert "3 stored states of the chain are read: 1, 2, 3" in done.err
    x = [tensor(model).astype(np.float64) for model in models]
    weights = [0.9**2, (1 - 0.9) * 0.9, 1 - 0.9]
    expected = (weights[0] * x[0] + weights[1] * x[1] + weights[2] * x[2]) / (weights[0] + weights[1] + weights[2])
    assert tensor(tmp_path / "ema").tobytes() == expected.astype(np.float32).tobytes()
    done = ckpt("average", f"{chain}@2", tmp_path / "one")
    assert (done.code, "needs several checkpoints" in done.err) == (2, True)
    other = write_model(tmp_path / "other", 5, more=np.ones(2, np.float32))
    assert ckpt("append", chain, other, "--step", 4).code == 0
    assert f"it lacks 1 tensors of {chain}@4: more\nwhere: {chain}@1" in ckpt("average", chain, tmp_path / "ema2").err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weights", "1,2"), "--weights has 2 numbers for 3 checkpoints"),
        (("--weights", "1,x,2"), "is not a list of numbers like 1,2,1"),
        (("--weights", "1,inf,2"), "is not a list of numbers like 1,2,1"),
        (("--weights", "1,1,-2"), "the sum of --weights must be above zero"),
        (("--weights", "1,1,1", "--ema", "0.5"), "give one of them"),
        (("--ema", "1"), "--ema"),
        (("--ema", "nan"), "--ema"),
    ],
)
def test_wrong_weights_are_wrong_usage(
    options: tuple[str, ...], message: str, models: list[Path], tmp_path: Path
) -> None:
    done = ckpt("average", *models, tmp_path / "mean", *options)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "mean").exists()


def test_a_target_alone_is_wrong_usage(tmp_path: Path) -> None:
    done = ckpt("average", tmp_path / "mean")
    assert done.code == 2
    assert "CKPT..." in done.err


def test_no_source_is_overwritten(models: list[Path]) -> None:
    done = ckpt("average", *models[:2], models[1])
    assert done.code == 30, done.err
    assert tensor(models[1]).shape == SHAPE


# ckpt merge


def test_models_are_merged_by_their_differences(models: list[Path], tmp_path: Path) -> None:
    base, *tuned = models
    done = ckpt("merge", *tuned, tmp_path / "sum", "--to", "hf", "--base", base, "--method", "task-arithmetic",
                "--weights", "0.5,-1", "--scale", "2", "--where", "norm", "weights=0,0")  # fmt: skip
    assert done.code == 0, done.err
    first, second, third = (tensor(model).astype(np.float64) for model in models)
    expected = ((second - first) * 0.5 + (third - first) * -1.0) * 2 + first
    assert tensor(tmp_path / "sum").tobytes() == expected.astype(np.float32).tobytes()
    assert tensor(tmp_path / "sum", "model.norm.weight").tolist() == [1, 1, 1, 1]
    assert json.loads((tmp_path / "sum" / "config.json").read_text())["model_type"] == "llama"


def test_each_option_of_a_merge_reaches_the_library(models: list[Path], tmp_path: Path) -> None:
    def written(name: str, *options: object) -> bytes:
        target = tmp_path / f"{name}.safetensors"
        done = ckpt("merge", models[1], models[2], target, "--skip", "norm", *options)
        assert done.code == 0, done.err
        assert list(open_checkpoint(target)) == [NAME]
        return bytes(tensor(target).tobytes())

    draws = ("--method", "dare-ties", "--base", models[0], "--density", "0.5")
    slerp = ("--method", "slerp", "--t", "0.2")
    others = [(), ("--seed", 1), ("--rescale", "none"), ("--rescale", "l1"), ("--normalize",)]
    options = [*((*draws, *more) for more in others), ("--method", "linear"), ("--method", "linear", "--no-normalize")]
    options += [slerp, (*slerp, "--where", "attn", "t=0.3")]
    different = {written(str(number), *one) for number, one in enumerate(options)}
    assert len(different) == 9
    assert written("again", *draws, "--seed", 0, "--workers", 1) in different


def test_a_setting_is_given_once_for_a_pattern(models: list[Path], tmp_path: Path) -> None:
    twice = ("--where", "q", "t=0.1", "--where", "q", "t=0.2")
    done = ckpt("merge", *models[:2], tmp_path / "out", "--method", "slerp", "--t", "0.2", *twice)
    assert (done.code, "gives t twice for 'q'" in done.err) == (2, True)


# ckpt merge-lora


@pytest.mark.parametrize("scale", [None, 0.5])
def test_the_merged_model_is_written(scale: float | None, models: list[Path], tmp_path: Path) -> None:
    adapter, target = write_adapter(tmp_path / "adapter"), tmp_path / "merged"
    options = () if scale is None else ("--scale", scale)
    done = ckpt("merge-lora", models[0], adapter, target, "--to", "hf", *options)
    assert done.code == 0, done.err
    assert "without its base model" in ckpt("inspect", adapter).err
    assert "without its base model" not in done.err  # MODEL is its base
    prefix = f"base_model.model.{NAME.removesuffix('.weight')}"
    a, b = (tensor(adapter, f"{prefix}.lora_{x}.weight").astype(np.float64) for x in "AB")
    expected = tensor(models[0]) + 2 * (scale or 1) * (b @ a)
    assert np.allclose(tensor(target), expected, rtol=1e-6, atol=1e-6)
    assert tensor(target, "model.norm.weight").tolist() == [1, 1, 1, 1]
    assert (target / "config.json").exists()
    assert not (target / "adapter_config.json").exists()


def test_a_part_of_the_merged_model_is_written(models: list[Path], tmp_path: Path) -> None:
    adapter, target = write_adapter(tmp_path / "adapter"), tmp_path / "part.safetensors"
    done = ckpt("merge-lora", models[0], adapter, target, "--only", "norm")
    assert (done.code, "leave out" in done.err) == (0, True)
    assert set(open_checkpoint(target)) == {"model.norm.weight"}


def test_an_adapter_that_cannot_be_merged_is_refused(models: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "merged"
    done = ckpt("merge-lora", models[0], write_adapter(tmp_path / "a", peft_type="IA3"), target)
    assert (done.code, "only LORA" in done.err) == (22, True)
    done = ckpt("merge-lora", models[0], models[1], target)
    assert (done.code, "adapter_config.json" in done.err) == (10, True)
    done = ckpt("merge-lora", write_adapter(tmp_path / "c"), models[0], target)
    assert (done.code, "the base model comes first" in done.err) == (2, True)
    done = ckpt("merge-lora", models[0], write_adapter(tmp_path / "b"), target, "--scale", "nan")
    assert (done.code, "--scale is a number" in done.err) == (2, True)
    assert ckpt("merge-lora", models[0], tmp_path / "b").code == 2
    assert not target.exists()


# Both


@pytest.mark.parametrize("command", ["average", "merge-lora"])
def test_a_dry_run_writes_nothing_and_json_is_one_object(command: str, models: list[Path], tmp_path: Path) -> None:
    other = models[1] if command == "average" else write_adapter(tmp_path / "adapter")
    before = sorted(tmp_path.rglob("*"))
    done = ckpt(command, models[0], other, tmp_path / "out", "--dry-run", "--json")
    assert done.code == 0, done.err
    shown = json.loads(done.out)
    assert (shown["format"], shown["target"]) == ("universal", str(tmp_path / "out"))
    assert sorted(name for file in shown["files"] for name in file["tensors"]) == sorted([NAME, "model.norm.weight"])
    assert "nothing was written" in ckpt(command, models[0], other, tmp_path / "out", "--dry-run").out
    assert sorted(tmp_path.rglob("*")) == before
    shown = json.loads(ckpt(command, models[0], other, tmp_path / "out", "--json").out)
    assert (shown["target"], shown["resumed_files"]) == (str(tmp_path / "out"), 0)
    assert ckpt("verify", tmp_path / "out").code == 0


@pytest.mark.parametrize("command", ["average", "merge-lora"])
def test_a_wrong_option_of_a_format_is_named(command: str, models: list[Path], tmp_path: Path) -> None:
    other = models[1] if command == "average" else write_adapter(tmp_path / "adapter")
    done = ckpt(command, models[0], other, tmp_path / "out", "--to", "hf", "--zero", "1")
    assert (done.code, "format hf has no option --zero" in done.err) == (2, True)


def test_damage_in_any_source_is_reported(models: list[Path], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(models[1], damaged)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    done = ckpt("average", models[0], damaged, tmp_path / "mean")
    assert done.code == 20
    assert str(damaged) in done.err
    assert not (tmp_path / "mean").exists()


# ckpt convert --expert-lora


def test_updates_of_experts_are_written_in_another_layout(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    adapter, target = write_adapter(tmp_path / "adapter", target_parameters=["experts.gate_up_proj"]), tmp_path / "new"
    module = "base_model.model.layers.0.mlp.experts"
    a, b = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(24, dtype=np.float32).reshape(6, 4)
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    done = ckpt("convert", adapter, target, "--to", "hf", "--expert-lora", "per-expert")
    assert "State it: --gate-up in-turn for GPT-OSS" in done.err
    assert done.code != 0
    assert ckpt("convert", adapter, target, "--to", "hf", "--gate-up", "halves").code == 2
    done = ckpt("convert", adapter, target, "--to", "hf", "--expert-lora", "per-expert", "--gate-up", "in-turn")
    assert done.code == 0, done.err
    assert tensor(target, f"{module}.1.up_proj.lora_B.weight").tolist() == b[1::2, 1::2].tolist()
    assert tensor(target, f"{module}.1.up_proj.lora_A.weight").tolist() == a[2:].tolist()
