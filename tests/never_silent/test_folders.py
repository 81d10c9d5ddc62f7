"""Folders of weights: what lies in them is read, refused, or spoken of."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from damage import BROKEN, NOT_FOUND, SAMPLES, UNSUPPORTED, ckpt

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.arange(2.0)}
OTHER = {"b.weight": torch.full((3, 3), 7.0)}
CONFIG = {"model_type": "new", "hidden_size": 3}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer after a step, a scheduler."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """The checkpoint's weights are these and no others, bit for bit."""
    actual = {n: read(p.weight) for n, p in open_checkpoint(path).parameters.items() if p.role != "extra"}
    assert actual.keys() == expected.keys()
    assert all(np.array_equal(actual[name], tensor.numpy()) for name, tensor in expected.items())


def put(folder: Path, **files: Any) -> Path:
    """A folder with these files, by name with `__` for a point: tensors, JSON or bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        file = folder / name.replace("__", ".")
        if file.suffix == ".safetensors":
            save_file(value, file, {"format": "pt"})
        elif file.suffix in (".pt", ".pth", ".bin", ".ckpt"):
            torch.save(value, file)
        else:
            file.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return folder


def sample(pattern: str, target: Path) -> Path:
    shutil.copytree(next(SAMPLES.glob(pattern)), target, ignore=shutil.ignore_patterns("truth.safetensors"))
    return target


# Nothing in a folder is passed over


@pytest.mark.parametrize("more", [{}, {"config__json": CONFIG}], ids=["safetensors", "hf"])
def test_notes_name_every_file_and_folder_that_was_not_read(more: dict[str, Any], tmp_path: Path) -> None:
    folder = put(tmp_path / "m", model__safetensors=WEIGHTS, pytorch_model__bin=OTHER, **more)
    if not more:
        (folder / "pytorch_model.bin").unlink()  # with it the folder is Hugging Face's
    put(folder, tf_model__h5=b"x", README__md=b"x", model__fp16__safetensors=OTHER)
    put(folder / "inner", model__safetensors=OTHER)
    (folder / "gone.json").symlink_to(tmp_path / "nowhere")
    done = ckpt("verify", folder)
    assert done.code == 0
    named = ["tf_model.h5", "inner/", "gone.json", "model.fp16.safetensors", *(["pytorch_model.bin"] if more else [])]
    assert "not read" in done.err
    assert all(name in done.err for name in named)
    assert "README" not in done.err
    holds(folder, WEIGHTS)


@pytest.mark.parametrize(
    "pattern",
    ["dcp-2.13-fsdp2-w2", "deepspeed-*-zero1*", "megatron-*-dist", "megatron-*-legacy", "ds_to_universal*zero1*"],
)
def test_notes_name_other_files_beside_those_of_an_engine(pattern: str, tmp_path: Path) -> None:
    folder = sample(pattern, tmp_path / "c")
    before = " ".join(map(str, open_checkpoint(folder).notices))
    assert "not read" not in before
    inner = next(shard.path.parent for shard in open_checkpoint(folder).files)
    put(inner, ema__safetensors=OTHER)
    (folder / "second").mkdir()
    after = ckpt("verify", folder)
    assert after.code == 0
    assert "ema.safetensors" in after.err
    assert "second/" in after.err


def test_notes_name_other_steps_of_a_run(tmp_path: Path) -> None:
    folder = sample("deepspeed-*-zero1*", tmp_path / "c")
    shutil.copytree(folder / "global_step5", folder / "global_step4")
    assert "other checkpoints of the folder, which are not read: global_step4/" in ckpt("verify", folder).err


# Several models in a folder


def test_two_models_without_an_index_are_refused_and_listed(tmp_path: Path) -> None:
    folder = put(tmp_path / "m", a__safetensors=WEIGHTS, b__safetensors=OTHER)
    listed = ckpt("inspect", folder).out
    assert all(f"\n{name} " in listed for name in ("a.safetensors", "b.safetensors"))
    for command in (("verify", folder), ("convert", folder, tmp_path / "out")):
        done = ckpt(*command)
        assert done.code == NOT_FOUND
        assert "2 models" in done.err
        assert "a.safetensors, b.safetensors" in done.err
    put(folder, config__json=CONFIG)
    assert ckpt("verify", folder).code == NOT_FOUND


def test_numbered_files_without_an_index_are_one_model_and_a_note_says_so(tmp_path: Path) -> None:
    for suffix, stem in (("safetensors", "model"), ("bin", "pytorch_model")):
        first, second = (f"{stem}-0000{i}-of-00002__{suffix}" for i in (1, 2))
        folder = put(tmp_path / suffix, **{first: WEIGHTS, second: OTHER})
        holds(folder, WEIGHTS | OTHER)
        assert "index that states the file of each tensor" in ckpt("verify", folder).err
        (folder / second.replace("__", ".")).unlink()
        done = ckpt("verify", folder)
        assert done.code == BROKEN
        assert second.replace("__", ".") in done.err


def indexed(folder: Path, total: int = 68) -> Path:
    where = dict.fromkeys(WEIGHTS, "model-00001-of-00002.safetensors")
    where |= dict.fromkeys(OTHER, "model-00002-of-00002.safetensors")
    put(folder, **{"model-00001-of-00002__safetensors": WEIGHTS, "model-00002-of-00002__safetensors": OTHER})
    index = {"metadata": {"total_size": total}, "weight_map": where}
    return put(folder, model__safetensors__index__json=index)


def test_notes_name_an_index_that_states_another_size(tmp_path: Path) -> None:
    assert "bytes" not in ckpt("inspect", indexed(tmp_path / "good")).err
    assert "states 99 bytes for all tensors, but they have 68" in ckpt("inspect", indexed(tmp_path / "m", 99)).err


def test_notes_name_a_file_that_the_index_lacks(tmp_path: Path) -> None:
    folder = put(indexed(tmp_path / "m"), **{"model-00003-of-00003__safetensors": {"c": torch.ones(1)}})
    assert "not read: model-00003-of-00003.safetensors" in ckpt("inspect", folder).err


# One file of several


@pytest.mark.parametrize("with_index", [True, False])
def test_shard_of_a_model_is_read_with_a_note(with_index: bool, tmp_path: Path) -> None:
    folder = indexed(tmp_path / "m")
    if not with_index:
        (folder / "model.safetensors.index.json").unlink()
    done = ckpt("convert", folder / "model-00001-of-00002.safetensors", tmp_path / "out")
    assert done.code == 0
    assert "file 1 of 2 of a model; the tensors of the other files are not read" in done.err
    torch.save(WEIGHTS, folder / "pytorch_model-00001-of-00002.bin")
    assert "file 1 of 2" in ckpt("inspect", folder / "pytorch_model-00001-of-00002.bin").err


def test_a_file_that_an_index_names_among_others_is_said_to_be_one_of_them(tmp_path: Path) -> None:
    index = {"weight_map": {**dict.fromkeys(WEIGHTS, "x.safetensors"), "b.weight": "y.safetensors"}}
    folder = put(tmp_path / "m", x__safetensors=WEIGHTS, y__safetensors=OTHER, model__safetensors__index__json=index)
    holds(folder, WEIGHTS | OTHER)
    assert "one of 2 files of a model" in ckpt("inspect", folder / "x.safetensors").err


@pytest.mark.parametrize(
    ("pattern", "file"),
    [
        ("deepspeed-*-zero1*", "*/mp_rank_00_model_states.pt"),
        ("deepspeed-*-zero1*", "*/*zero_pp_rank_0*optim_states.pt"),
        ("deepspeed-*-zero3*", "*/zero_pp_rank_0*model_states.pt"),
        ("deepspeed-*-tp2-pp2", "*/layer_00-model_00-model_states.pt"),
        ("megatron-*-legacy", "*/mp_rank_00_000/model_optim_rng.pt"),
    ],
)
def test_a_file_of_one_rank_alone_is_refused_and_the_folder_named(pattern: str, file: str, tmp_path: Path) -> None:
    rank_file = next(next(SAMPLES.glob(pattern)).glob(file))
    for command in (("inspect", rank_file), ("verify", rank_file), ("convert", rank_file, tmp_path / "out")):
        done = ckpt(*command)
        assert done.code == UNSUPPORTED
        assert "one of several files" in done.err
        assert "Name the folder" in done.err


def test_a_file_that_a_rank_wrote_by_its_name_is_said_to_be_one(tmp_path: Path) -> None:
    folder = put(tmp_path / "m", model_rank0__pt=WEIGHTS, model_rank1__pt=WEIGHTS)
    assert "one rank of several wrote this file" in ckpt("inspect", folder / "model_rank0.pt").err


def test_meta_file_of_several_is_refused_and_the_hint_names_the_folder(tmp_path: Path) -> None:
    folder = put(tmp_path / "m", consolidated__00__pth=WEIGHTS, params__json={})
    holds(folder, WEIGHTS)
    put(folder, consolidated__01__pth=WEIGHTS)
    done = ckpt("verify", folder / "consolidated.00.pth")
    assert done.code == UNSUPPORTED
    assert "tensor parallelism" in done.err
    assert str(folder) in done.err
    assert "no rule states how tensor `a.weight` is sharded" in ckpt("verify", folder).err


@pytest.mark.parametrize("as_file", [True, False])
def test_meta_file_is_incomplete_when_the_others_are_missing(as_file: bool, tmp_path: Path) -> None:
    weights = {"tok_embeddings.weight": torch.ones(8, 2), "norm.weight": torch.ones(4)}
    folder = put(tmp_path / "m", consolidated__00__pth=weights)
    done = ckpt("verify", folder / "consolidated.00.pth" if as_file else folder)
    assert done.code == BROKEN
    assert "one of several files" in done.err


@pytest.mark.parametrize("more", [{}, {"config__json": CONFIG}], ids=["safetensors", "hf"])
def test_the_sharded_state_of_vllm_is_read_if_one_rank_wrote_it(more: dict[str, Any], tmp_path: Path) -> None:
    folder = put(tmp_path / "m", **more)
    for part, weights in enumerate((WEIGHTS, OTHER)):
        save_file(weights, folder / f"model-rank-0-part-{part}.safetensors")
    holds(folder, WEIGHTS | OTHER)
    assert "vLLM's files do not state how many there are" in ckpt("inspect", folder).err
    done = ckpt("inspect", folder / "model-rank-0-part-0.safetensors")
    assert (done.code, str(folder) in done.err) == (UNSUPPORTED, True)
    (folder / "model-rank-0-part-1.safetensors").rename(folder / "model-rank-0-part-2.safetensors")
    assert "part 1 of rank 0 is missing" in ckpt("inspect", folder).err
    (folder / "model-rank-0-part-2.safetensors").rename(folder / "model-rank-1-part-0.safetensors")
    done = ckpt("convert", folder, tmp_path / "out")
    assert (done.code, "over 2 tensor-parallel ranks" in done.err) == (UNSUPPORTED, True)


def test_numbered_files_of_two_models_are_not_joined(tmp_path: Path) -> None:
    names = [f"model-0000{i}-of-0000{n}__safetensors" for n in (2, 3) for i in range(1, n + 1)]
    folder = put(tmp_path / "m", **{name: {str(i): torch.ones(2)} for i, name in enumerate(names)})
    done = ckpt("verify", folder)
    assert done.code == BROKEN
    assert "two different counts of files" in done.err


# Files of torch in a folder


def test_a_folder_of_model_optimizer_and_scheduler_is_read_as_one(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained()
    folder = put(
        tmp_path / "m",
        model__pt=model.state_dict(),
        optim__pt=optimizer.state_dict(),
        scheduler__pt=scheduler.state_dict(),
        trainer_state__pt={"step": 7},
        rng__pt=torch.get_rng_state(),
        config__json={"a": 1},
    )
    holds(folder, model.state_dict())
    checkpoint = open_checkpoint(folder)
    assert not [notice for notice in checkpoint.notices if "not read" in notice]
    state = optimizer.state_dict()["state"]
    for number, name in enumerate(model.state_dict()):
        held = checkpoint.parameters[name].states
        assert all(np.array_equal(read(held[s]), state[number][s].numpy()) for s in ("exp_avg", "exp_avg_sq"))
    assert checkpoint.origin.step == 7
    assert {"scheduler", "rng", "hf/config.json"} <= checkpoint.extras.keys()
    assert checkpoint.extras["scheduler"]["last_epoch"] == scheduler.last_epoch
    assert ckpt("convert", folder, tmp_path / "out", "--to", "universal").code == 0


def test_an_optimizer_under_a_key_of_its_own_is_read(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    parts = {"weights__pth": {"model": model.state_dict()}, "opt__pth": {"optimizer": optimizer.state_dict()}}
    checkpoint = open_checkpoint(put(tmp_path / "m", **parts))
    assert {"exp_avg", "exp_avg_sq"} <= checkpoint.parameters["0.weight"].states.keys()


def test_open_reads_the_one_file_of_a_folder(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    folder = put(tmp_path / "m", last__ckpt=saved)
    holds(folder, model.state_dict())
    assert open_checkpoint(folder).extras["epoch"] == 3


def test_further_models_beside_the_model_are_extras_and_a_note_says_so(tmp_path: Path) -> None:
    folder = put(tmp_path / "m", model__pt=WEIGHTS, ema__pt=OTHER)
    checkpoint = open_checkpoint(folder)
    assert np.array_equal(read(checkpoint.parameters["ema/b.weight"].weight), OTHER["b.weight"].numpy())
    assert "read as extras" in ckpt("verify", folder).err


@pytest.mark.parametrize(
    ("files", "code", "message"),
    [
        (("epoch_1", "epoch_2", "epoch_10"), NOT_FOUND, "3 models: epoch_1.pt, epoch_2.pt, epoch_10.pt"),
        (("gen", "disc"), NOT_FOUND, "2 models"),
        (("model", "model_2"), NOT_FOUND, "2 models"),
    ],
)
def test_files_of_several_models_or_steps_are_refused(
    files: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    folder = put(tmp_path / "m", **{f"{name}__pt": WEIGHTS for name in files})
    if files == ("model", "model_2"):
        put(folder, model_3__pt=WEIGHTS)
        message = "3 models"
    done = ckpt("convert", folder, tmp_path / "out")
    assert done.code == code
    assert message in done.err


def test_an_optimizer_without_its_model_is_incomplete(tmp_path: Path) -> None:
    _, optimizer, scheduler = trained()
    folder = put(tmp_path / "m", optimizer__pt=optimizer.state_dict(), scheduler__pt=scheduler.state_dict())
    done = ckpt("verify", folder)
    assert done.code == BROKEN
    assert "no file contains a model" in done.err
    assert ckpt("verify", put(tmp_path / "t", trainer_state__json={})).code == BROKEN


# Runs of Hugging Face's trainer


def test_a_run_without_its_optimizer_is_read_with_a_note(tmp_path: Path) -> None:
    folder = put(
        tmp_path / "m", model__safetensors=WEIGHTS, config__json=CONFIG, trainer_state__json={"global_step": 5}
    )
    done = ckpt("verify", folder)
    assert done.code == 0
    assert "no file of the optimizer" in done.err
    holds(folder, WEIGHTS)
    put(folder, optimizer__pt=trained()[1].state_dict())
    assert "no file of the optimizer" not in ckpt("verify", folder).err


def around(folder: Path) -> Path:
    """What the trainer leaves around a checkpoint of DeepSpeed's."""
    return put(
        folder,
        config__json=CONFIG,
        trainer_state__json={"global_step": 5, "epoch": 1.5},
        scheduler__pt=trained()[2].state_dict(),
        rng_state_0__pth={"cpu": torch.get_rng_state()},
        tokenizer__json={"a": "b"},
    )


@pytest.mark.parametrize("target", ["universal", "torch", "dcp"])
def test_trainer_files_around_deepspeed_are_carried(target: str, tmp_path: Path) -> None:
    folder = around(sample("deepspeed-*-zero1*", tmp_path / "run"))
    carried = {"hf/config.json", "hf/trainer_state.json", "hf/scheduler.pt", "hf/rng_state_0.pth", "hf/tokenizer.json"}
    assert detect(folder).name == "deepspeed"
    checkpoint = open_checkpoint(folder)
    assert carried <= checkpoint.extras.keys()
    assert {key.removeprefix("hf/") for key in carried} <= {shard.path.name for shard in checkpoint.files}
    out = tmp_path / ("out.pt" if target == "torch" else "out")
    done = ckpt("convert", folder, out, "--to", target)
    assert done.code == 0, done.err
    again = open_checkpoint(out).extras
    assert all(key in again or key in done.err for key in carried)
    if target == "universal":
        assert again["hf/trainer_state.json"] == {"global_step": 5, "epoch": 1.5}


def test_trainer_files_around_deepspeed_survive_a_reshard(tmp_path: Path) -> None:
    folder = around(sample("deepspeed-*-zero1*", tmp_path / "run"))
    assert ckpt("reshard", folder, tmp_path / "out", "--dp", "1").code == 0
    again = open_checkpoint(tmp_path / "out").extras
    assert again["hf/trainer_state.json"] == {"global_step": 5, "epoch": 1.5}
    assert again["hf/scheduler.pt"]["last_epoch"] == 0


# What is left of an engine's checkpoint is never read as something more general


def _gone(*names: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        for name in names:
            for file in list(folder.rglob(name)):
                file.unlink()

    return harm


@pytest.mark.parametrize(
    ("pattern", "harm", "message"),
    [
        ("dcp-2.13-fsdp2-w2", _gone(".metadata"), "PyTorch Distributed Checkpoint"),
        ("megatron-*-dist", _gone("metadata.json"), "Megatron core"),
        ("megatron-*-dist", _gone("common.pt"), "Megatron core"),
        ("megatron-*-legacy", _gone("model_optim_rng.pt"), "Megatron"),
        ("deepspeed-*-zero1*", _gone("latest"), "DeepSpeed"),
        ("deepspeed-*-tp2-pp2", _gone("mp_rank*", "*zero_pp_rank*"), "DeepSpeed"),
        ("ds_to_universal*zero1*", _gone("optimizer_state.pt"), "DeepSpeed"),
        ("universal-1-coded", _gone("manifest.json"), "manifest.json is missing"),
    ],
)
def test_remains_of_a_checkpoint_of_an_engine_are_incomplete(
    pattern: str, harm: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = sample(pattern, tmp_path / "c")
    step = next((one for one in folder.glob("*") if one.is_dir() and message != "DeepSpeed"), folder)
    place = step if "megatron" in pattern else folder
    if pattern.endswith("tp2-pp2") or pattern.startswith("ds_to"):
        place = next(one for one in folder.iterdir() if one.is_dir())
    harm(folder)
    put(place, config__json=CONFIG, model__safetensors=WEIGHTS)  # which Hugging Face's reader would take
    for command in (("inspect", place), ("verify", place), ("convert", place, tmp_path / "out")):
        done = ckpt(*command)
        assert done.code == BROKEN
        assert "incomplete checkpoint" in done.err
        assert message in done.err


def test_a_run_of_megatron_without_its_metadata_is_not_read_as_dcp(tmp_path: Path) -> None:
    folder = sample("megatron-*-dist", tmp_path / "c")
    _gone("metadata.json")(folder)
    assert ckpt("verify", folder).code == BROKEN


# Folders of checkpoints


def test_the_one_checkpoint_of_a_folder_is_read_and_the_rest_named(tmp_path: Path) -> None:
    put(tmp_path / "run" / "final", model__safetensors=WEIGHTS)
    put(tmp_path / "run", train__csv=b"1")
    done = ckpt("verify", tmp_path / "run")
    assert done.code == 0
    assert "final is read, the only checkpoint in the folder" in done.err
    assert "train.csv" in done.err
    holds(tmp_path / "run", WEIGHTS)


def test_run_is_read_at_the_checkpoint_that_a_pointer_names(tmp_path: Path) -> None:
    for step in (5, 20):
        put(tmp_path / "run" / f"step_{step}", model__safetensors=WEIGHTS if step == 5 else OTHER)
    done = ckpt("verify", tmp_path / "run")
    assert done.code == NOT_FOUND
    assert "step_5, step_20" in done.err
    (tmp_path / "run" / "latest").write_text("step_5")
    holds(tmp_path / "run", WEIGHTS)
    done = ckpt("verify", tmp_path / "run")
    assert "step_5 is read, because `latest` names it" in done.err
    assert "step_20/" in done.err
    (tmp_path / "run" / "latest").unlink()
    (tmp_path / "run" / "latest").symlink_to("step_20")
    holds(tmp_path / "run", OTHER)
    (tmp_path / "run" / "latest").unlink()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    assert ckpt("verify", tmp_path / "run").code == BROKEN


def test_run_of_a_trainer_is_read_at_its_newest_checkpoint_with_a_note(tmp_path: Path) -> None:
    for step, weights in ((5, WEIGHTS), (10, OTHER)):
        put(tmp_path / "run" / f"checkpoint-{step}", model__safetensors=weights, config__json=CONFIG)
    put(tmp_path / "run", trainer_state__json={})
    holds(tmp_path / "run", OTHER)
    done = ckpt("verify", tmp_path / "run")
    assert "checkpoint-10 is read, the newest" in done.err
    assert "checkpoint-5/" in done.err


# Other frameworks


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("tf_model.h5", "Keras"),
        ("model.onnx", "ONNX"),
        ("weights.npz", "NumPy"),
        ("model.pdparams", "PaddlePaddle"),
        ("model.nemo", "NeMo"),
        ("model.keras", "Keras"),
        ("model.ckpt.index", "TensorFlow"),
        ("checkpoint.tar.gz", "archive"),
    ],
)
def test_checkpoints_of_other_frameworks_are_refused_for_what_they_are(file: str, message: str, tmp_path: Path) -> None:
    folder = put(tmp_path / "m", config__json=CONFIG)
    if file.endswith(".npz"):
        with zipfile.ZipFile(folder / file, "w", zipfile.ZIP_BZIP2) as archive:
            archive.writestr("a.npy", bytes(200))
    else:
        (folder / file).write_bytes(b"PK\3\4" if file.endswith("keras") else b"x")
    for path in (folder, folder / file):
        done = ckpt("convert", path, tmp_path / "out")
        assert done.code == UNSUPPORTED
        assert message in done.err


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older"])
def test_a_file_of_torch_that_is_called_an_archive_is_read(zipped: bool, tmp_path: Path) -> None:
    path = put(tmp_path / "run") / "model_best.pth.tar"
    torch.save({"state_dict": {"w": torch.ones(2)}}, path, _use_new_zipfile_serialization=zipped)
    for source, target in ((path, "of the file"), (path.parent, "of the folder")):
        assert ckpt("convert", source, tmp_path / target).code == 0


# Folders of several models


def pipeline(folder: Path) -> Path:
    index = {
        "_class_name": "DDPMPipeline",
        "unet": ["diffusers", "UNet2DModel"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "scheduler": ["diffusers", "DDPMScheduler"],
        "safety_checker": [None, None],
        "requires_safety_checker": False,
    }
    put(folder, model_index__json=index)
    put(folder / "unet", diffusion_pytorch_model__safetensors=WEIGHTS, config__json={"_class_name": "UNet2DModel"})
    put(folder / "text_encoder", model__safetensors=OTHER, config__json=CONFIG)
    put(folder / "scheduler", scheduler_config__json={"steps": 10})
    return folder


def test_the_components_of_a_pipeline_are_read_under_their_names(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "p")
    unet = {f"unet.{name}": tensor for name, tensor in WEIGHTS.items()}
    holds(folder, unet | {f"text_encoder.{name}": tensor for name, tensor in OTHER.items()})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.extras["hf/scheduler/scheduler_config.json"] == {"steps": 10}
    assert not checkpoint.notices
    out = tmp_path / "unet.safetensors"
    assert ckpt("convert", folder, out, "--only", r"^unet\.", "--to", "safetensors").code == 0
    assert load_file(out).keys() == unet.keys()


def test_notes_name_what_a_pipeline_has_twice_or_besides(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "p")
    put(folder / "unet", diffusion_pytorch_model__fp16__safetensors=WEIGHTS)
    put(folder / "vae", diffusion_pytorch_model__safetensors=WEIGHTS)
    done = ckpt("verify", folder)
    assert done.code == 0
    assert "unet/diffusion_pytorch_model.fp16.safetensors" in done.err
    assert "vae/" in done.err


@pytest.mark.parametrize("harm", ["a folder", "the weights"])
def test_a_pipeline_without_a_component_is_incomplete(harm: str, tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "p")
    if harm == "a folder":
        shutil.rmtree(folder / "unet")
    else:
        next((folder / "unet").glob("*.safetensors")).unlink()
    done = ckpt("verify", folder)
    assert done.code == BROKEN
    assert "unet" in done.err


def test_a_component_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = put(pipeline(tmp_path / "p"), model_index__json={"../x": ["diffusers", "UNet2DModel"]})
    assert ckpt("verify", folder).code == 21


def test_the_modules_of_sentence_transformers_are_read(tmp_path: Path) -> None:
    types = ("models.Transformer", "models.Pooling", "models.Dense")
    paths = ("", "1_Pooling", "2_Dense")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(zip(paths, types, strict=True))
    ]
    folder = put(tmp_path / "m", model__safetensors=WEIGHTS, config__json=CONFIG, modules__json=modules)
    put(folder / "1_Pooling", config__json={"dim": 3})
    put(folder / "2_Dense", model__safetensors=OTHER, config__json={"in": 3})
    holds(folder, WEIGHTS | {f"2_Dense.{name}": tensor for name, tensor in OTHER.items()})
    assert not open_checkpoint(folder).notices
    (folder / "2_Dense" / "model.safetensors").unlink()
    assert ckpt("verify", folder).code == BROKEN


def test_notes_name_an_adapter(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "org/base", "peft_type": "LORA"}
    folder = put(tmp_path / "m", adapter_model__safetensors=WEIGHTS, adapter_config__json=config)
    put(folder / "second", adapter_model__safetensors=WEIGHTS, adapter_config__json=config)
    done = ckpt("verify", folder)
    assert "an adapter of PEFT, without its base model (org/base)" in done.err
    assert "second/" in done.err


# torchtune


HEADS, GROUPS = 2, 1


def tuned(names: bool) -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer, dict[str, Any]]:
    """A Llama's weights under torchtune's names, its optimizer after a step, and what that saves."""
    shapes = {"tok_embeddings.weight": (8, 4)}
    layer = {"attn.q_proj": (8, 4), "attn.k_proj": (4, 4), "attn.v_proj": (4, 4), "attn.output_proj": (4, 8)}
    layer |= {"mlp.w1": (6, 4), "mlp.w2": (4, 6), "mlp.w3": (6, 4)}
    for i in range(2):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        shapes |= {f"layers.{i}.{name}.scale": (4,) for name in ("sa_norm", "mlp_norm")}
    shapes |= {"norm.scale": (4,), "output.weight": (8, 4)}
    torch.manual_seed(0)
    held = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW(held.values())
    sum((one * torch.randn(one.shape)).sum() for one in held.values()).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    if names:
        order = list(held)
        groups = [{**group, "params": [order[i] for i in group["params"]]} for group in saved["param_groups"]]
        saved = {"state": {order[i]: state for i, state in saved["state"].items()}, "param_groups": groups}
    return {name: one.detach() for name, one in held.items()}, optimizer, saved


def as_files_have_it(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of torchtune as it writes them for transformers."""
    new = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    inner = {"attn.output_proj": "self_attn.o_proj", "mlp.w1": "mlp.gate_proj", "mlp.w2": "mlp.down_proj"}
    inner |= {"mlp.w3": "mlp.up_proj", "sa_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    renamed = {}
    for name, tensor in held.items():
        stem = name.rpartition(".")[0]
        if stem.startswith("layers."):
            _, number, own = stem.split(".", 2)
            if own in ("attn.q_proj", "attn.k_proj"):
                heads = HEADS if "q_proj" in own else GROUPS
                tensor = tensor.view(heads, -1, 2, 4).transpose(1, 2).reshape(tensor.shape)
            stem = f"model.layers.{number}.{inner.get(own, own.replace('attn.', 'self_attn.'))}"
        renamed[f"{new.get(stem, stem)}.weight"] = tensor.contiguous()
    return renamed


@pytest.mark.parametrize("names", [True, False], ids=["names", "numbers"])
def test_the_state_of_torchtunes_recipe_is_read_with_the_weights(names: bool, tmp_path: Path) -> None:
    held, optimizer, saved = tuned(names)
    config = LLAMA | {"num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
    weights = as_files_have_it(held)
    for epoch in (0, 1):
        put(tmp_path / "run" / f"epoch_{epoch}", model__safetensors=weights, config__json=config)
    state = {"optimizer": saved, "seed": 7, "epochs_run": 1, "total_epochs": 3, "dataloader": {"at": 5}}
    put(tmp_path / "run" / "recipe_state", recipe_state__pt=state)
    checkpoint = open_checkpoint(tmp_path / "run")
    holds(tmp_path / "run", weights)
    own = dict(zip(held, optimizer.state.values(), strict=True))
    for moment in ("exp_avg", "exp_avg_sq"):
        for name, tensor in as_files_have_it({name: state[moment] for name, state in own.items()}).items():
            assert np.array_equal(read(checkpoint.parameters[name].states[moment]), tensor.numpy()), name
    assert (checkpoint.extras["seed"], checkpoint.extras["epochs_run"], checkpoint.extras["dataloader"]) == (
        7,
        1,
        {"at": 5},
    )
    done = ckpt("convert", tmp_path / "run", tmp_path / "out")
    assert done.code == 0
    assert "newer weights, without their state: epoch_1" in done.err
    assert "name the parent folder" in ckpt("verify", tmp_path / "run" / "epoch_0").err
    shutil.rmtree(tmp_path / "run" / "epoch_0")
    assert ckpt("verify", tmp_path / "run").code == BROKEN


def test_an_optimizer_that_torchtune_keeps_otherwise_is_carried_and_said_to_be(tmp_path: Path) -> None:
    held, _, saved = tuned(False)
    config = {"model_type": "phi3", "num_hidden_layers": 2}
    put(tmp_path / "run" / "epoch_0", model__safetensors=as_files_have_it(held), config__json=config)
    put(tmp_path / "run" / "recipe_state", recipe_state__pt={"optimizer": saved, "epochs_run": 1})
    done = ckpt("verify", tmp_path / "run")
    assert done.code == 0
    assert "optimizer states could not be matched to parameters" in done.err
    old = put(tmp_path / "old", hf_model_0001_0__pt=as_files_have_it(held), recipe_state__pt={"optimizer": saved})
    assert "read as extras" in ckpt("verify", old).err


# A configuration that is not the model's


def llama() -> dict[str, torch.Tensor]:
    sizes = {"q": (4, 4), "k": (2, 4), "v": (2, 4), "o": (4, 4)}
    layer = {f"self_attn.{name}_proj": shape for name, shape in sizes.items()}
    layer |= {"mlp.gate_proj": (6, 4), "mlp.up_proj": (6, 4), "mlp.down_proj": (4, 6)}
    layer |= {"input_layernorm": (4,), "post_attention_layernorm": (4,)}
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4)}
    return {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(shapes.items())}


GENERAL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2}
"""What is checked of every model."""
KNOWN = {**GENERAL, "intermediate_size": 12, "num_key_value_heads": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [*(("llama", *pair) for pair in KNOWN.items()), *(("new", *pair) for pair in GENERAL.items())],
)
def test_a_configuration_of_another_model_is_refused(model_type: str, key: str, value: int, tmp_path: Path) -> None:
    source = put(tmp_path / "m", model__safetensors=llama())
    config = LLAMA | {"model_type": model_type, "head_dim": 2}
    (tmp_path / "good.json").write_text(json.dumps(config))
    (tmp_path / "bad.json").write_text(json.dumps(config | {key: value}))
    bad = ckpt("convert", source, tmp_path / "bad", "--to", "hf", "--config", tmp_path / "bad.json")
    assert bad.code == UNSUPPORTED
    assert key in bad.err
    assert not (tmp_path / "bad").exists()
    good = ckpt("convert", source, tmp_path / "good", "--to", "hf", "--config", tmp_path / "good.json")
    assert good.code == 0, good.err
    holds(tmp_path / "good", llama())


def test_a_head_that_is_not_there_is_refused_unless_the_configuration_ties_it(tmp_path: Path) -> None:
    held = {name: tensor for name, tensor in llama().items() if name != "lm_head.weight"}
    source = put(tmp_path / "m", model__safetensors=held)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    done = ckpt("convert", source, tmp_path / "out", "--to", "hf", "--config", tmp_path / "config.json")
    assert done.code == UNSUPPORTED
    assert "tie_word_embeddings" in done.err


def test_a_model_without_a_configuration_is_no_folder_of_transformers(tmp_path: Path) -> None:
    source = put(tmp_path / "m", model__safetensors=WEIGHTS)
    done = ckpt("convert", source, tmp_path / "out", "--to", "hf")
    assert done.code == UNSUPPORTED
    assert "--config" in done.err
    assert not (tmp_path / "out").exists()


# What lies beside a pipeline


@pytest.mark.parametrize("names", [["flux1-dev.safetensors"], ["flux1-dev.safetensors", "ae.safetensors"]])
def test_models_beside_a_pipeline_are_named_and_not_merged(names: list[str], tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "p")
    parts = set(open_checkpoint(folder).parameters)
    for name in names:
        save_file({"single.weight": torch.ones(3)}, folder / name)
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.parameters) == parts
    assert all(any(name in one.names for one in checkpoint.notices) for name in names)
    assert set(open_checkpoint(folder / names[0]).parameters) == {"single.weight"}
    assert ckpt("inspect", folder).out.count("checkpoints") == 0


def test_a_model_that_modules_json_does_not_list_is_named_and_not_merged(tmp_path: Path) -> None:
    folder = put(tmp_path / "s", modules__json=[{"path": "0_Transformer", "type": "models.Transformer"}])
    put(folder / "0_Transformer", model__safetensors=WEIGHTS, config__json=CONFIG)
    put(folder, export__safetensors=OTHER, config__json=CONFIG)
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.parameters) - {"hf/modules.json"} == {f"0_Transformer.{name}" for name in WEIGHTS}
    assert any("export.safetensors" in one.names for one in checkpoint.notices)


@pytest.mark.parametrize(
    ("pattern", "pointer", "stray"),
    [
        ("megatron-0.16-tp2-pp2-dist", "latest_checkpointed_iteration.txt", "model_rank0__pt"),
        ("megatron-0.16-tp2-pp2-dist", "latest_checkpointed_iteration.txt", "none"),
        ("megatron-0.16-tp2-pp2-legacy", "latest_checkpointed_iteration.txt", "model__safetensors"),
        ("megatron-0.16-tp2-pp2-legacy", "latest_checkpointed_iteration.txt", "stray__pt"),
        ("deepspeed-0.19-zero1-bf16-dp2", "latest", "model__safetensors"),
        ("ds_to_universal-0.19-zero1-bf16-dp2", "latest_universal", "stray__safetensors"),
    ],
)
def test_a_damaged_pointer_is_damage_whatever_is_beside_the_steps(
    pattern: str, pointer: str, stray: str, tmp_path: Path
) -> None:
    for entry in (SAMPLES / pattern).iterdir():
        if entry.is_dir():
            (tmp_path / entry.name).symlink_to(entry)
    if stray != "none":
        put(tmp_path, **{stray: OTHER})
    text = (SAMPLES / pattern / pointer).read_bytes()
    for damaged in (bytes([text[0] ^ 0x40]) + text[1:], b"", bytes(len(text)), text[:-1] + b"9"):
        (tmp_path / pointer).write_bytes(damaged)
        with pytest.raises((CorruptError, IncompleteError, NotFoundError), match=f"`{pointer}`"):
            open_checkpoint(tmp_path)
    assert ckpt("convert", tmp_path, tmp_path / "out").code == (BROKEN if "megatron" in pattern else NOT_FOUND)
    (tmp_path / pointer).unlink()
    if stray == "none":
        assert open_checkpoint(tmp_path).notices[0].text.startswith("iter_0000002 is read, the only checkpoint")
    else:
        with pytest.raises(IncompleteError, match=f"no `{pointer}`"):
            open_checkpoint(tmp_path)
