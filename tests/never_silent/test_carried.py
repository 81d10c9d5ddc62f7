"""What a checkpoint carries without reading it is named, whatever its layout; what states a world of ranks, or
another step, is believed."""

import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.state_dicts.files_inside import HOLDS_TENSORS
from damage import BROKEN, NOT_FOUND, ckpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.arange(2.0)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


def saved(tree: Any) -> bytes:
    """The bytes of a file of torch.save."""
    stream = io.BytesIO()
    torch.save(tree, stream)
    return stream.getvalue()


INNER = saved(WEIGHTS)


def model_folder(folder: Path, files: Mapping[str, bytes], config: object = None) -> Path:
    """A folder of transformers with further files."""
    folder.mkdir(parents=True)
    save_file(WEIGHTS, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "new"}))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def notices(path: Path) -> str:
    return "\n".join(one.shown(99) for one in open_checkpoint(path).notices)


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({**WEIGHTS, "x": INNER}, "x"),
        ({"model": WEIGHTS, "x": INNER}, "x"),
        ({"model": WEIGHTS, "x": {"inner": [1, INNER]}}, "x.inner.1"),
        ({"model": WEIGHTS, "x": io.BytesIO(INNER)}, "x"),
        ({"model": WEIGHTS, "x": torch.frombuffer(bytearray(INNER), dtype=torch.uint8)}, "x"),
    ],
    ids=["among tensors", "beside model", "nested", "BytesIO", "a tensor of bytes"],
)
def test_the_bytes_of_a_file_inside_a_file_are_named_wherever_they_are(tree: Any, place: str, tmp_path: Path) -> None:
    torch.save(tree, tmp_path / "m.pt")
    assert f"holds tensors in a file of its own, which is not read; carried as bytes: {place}" in notices(
        tmp_path / "m.pt"
    )


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "value_head.th", "heads.data", "arrays.npz"])
def test_notes_name_a_file_with_tensors_beside_a_model(name: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", {name: INNER, "vocab.txt": b"a\nb\n", "merges.data": b"PKx"})
    assert f"carried as bytes: {name}" in notices(folder)
    assert "vocab.txt" not in notices(folder)
    assert "merges.data" not in notices(folder)


def test_pointers_of_git_lfs_among_small_files_are_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", {"tokenizer.model": POINTER, "tokenizer.json": POINTER, "a.txt": b"version"})
    assert "is a pointer of Git LFS, not the file itself: tokenizer.json, tokenizer.model" in notices(folder)
    (folder / "config.json").write_bytes(POINTER)
    done = ckpt("verify", folder)
    assert (done.code, "pointer of Git LFS" in done.err, "config.json" in done.err) == (BROKEN, True, True)


def test_notes_name_json_that_is_cut_off(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", {"generation_config.json": b'{"a": 1, "b', "list.json": b"[1]"})
    assert "is not valid JSON" in notices(folder)
    assert "generation_config.json" in notices(folder)
    assert "list.json" not in notices(folder)
    (folder / "trainer_state.json").write_bytes(b'{"global_step": 3, "log')
    done = ckpt("verify", folder)
    assert (done.code, "trainer_state.json" in done.err) == (BROKEN, True)


@pytest.mark.parametrize("ending", [".aria2", ".part", ".crdownload", ".incomplete"])
@pytest.mark.parametrize("single", [False, True], ids=["folder", "file"])
def test_a_file_that_is_still_being_downloaded_is_named(single: bool, ending: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", {f"model.safetensors{ending}": b"x", f"other{ending}": b"x"})
    text = notices(folder / "model.safetensors" if single else folder)
    assert f"still being downloaded, and may have holes: model.safetensors{ending}" in text


TENSORRT = {"architecture": "LlamaForCausalLM", "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1}}


@pytest.mark.parametrize("name", ["rank0.safetensors", "model.safetensors"])
def test_rank_of_tensorrt_is_refused_alone(name: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", {}, TENSORRT)
    (folder / "model.safetensors").rename(folder / name)
    done = ckpt("convert", folder, tmp_path / "out")
    assert done.code == BROKEN
    assert "mapping.tp_size` is 2" in done.err
    (folder / "config.json").write_text(json.dumps({**TENSORRT, "mapping": {"world_size": 1, "tp_size": 1}}))
    assert ckpt("verify", folder).code == 0


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("reshard-model_part-0.pt", {"model": WEIGHTS, "cfg": {"model": {"model_parallel_size": 2}}}),
        ("model_tp1.pt", {"model": WEIGHTS, "args": {"tensor_model_parallel_size": 4}}),
        ("model_0_of_2.pt", WEIGHTS),
        ("weights.1of8.pth", WEIGHTS),
    ],
)
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_part_of_a_stated_world_is_not_read_as_a_whole(folder: bool, name: str, tree: Any, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    torch.save(tree, tmp_path / "r" / name)
    done = ckpt("convert", tmp_path / "r" if folder else tmp_path / "r" / name, tmp_path / "out")
    assert (done.code, "one rank of several" in done.err) == (BROKEN, True)


def test_open_reads_copies_of_data_parallel_ranks(tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS, "args": {"world_size": 8, "rank": 0}}, tmp_path / "model.pt")
    torch.save({"model": WEIGHTS, "args": {"tensor_model_parallel_size": 1}}, tmp_path / "model_part-0.pt")
    assert ckpt("verify", tmp_path / "model.pt").code == 0
    assert "by its name, one rank of several" in notices(tmp_path / "model_part-0.pt")


def test_a_step_that_differs_from_the_name_of_the_folder_is_noted(tmp_path: Path) -> None:
    files = {"trainer_state.json": b'{"global_step": 10}'}
    text = "the step is 10 by what was saved, but 20 by the name checkpoint-20"
    assert text in notices(model_folder(tmp_path / "checkpoint-20", files))
    assert "the step is" not in notices(model_folder(tmp_path / "checkpoint-10", files))
    torch.save({"state_dict": WEIGHTS, "global_step": 7}, tmp_path / "epoch=1-step=8.ckpt")
    assert "but 8 by the name" in notices(tmp_path / "epoch=1-step=8.ckpt")


@pytest.mark.parametrize(("name", "step"), [("qwen3", None), ("step-7", 7), ("000012", 12), ("llama-2-7", None)])
def test_the_name_of_a_dcp_folder_states_a_step_only_in_known_forms(
    name: str, step: int | None, tmp_path: Path
) -> None:
    dcp.save({"model": dict(WEIGHTS)}, checkpoint_id=tmp_path / name)
    assert open_checkpoint(tmp_path / name).step == step


def test_a_step_in_a_name_that_the_optimizer_denies_is_noted(tmp_path: Path) -> None:
    state = {name: {"step": torch.tensor(2.0), "exp_avg": torch.zeros_like(one)} for name, one in WEIGHTS.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(WEIGHTS)}]}
    for name in ("step-7", "step-2"):
        dcp.save({"model": dict(WEIGHTS), "optim": optimizer}, checkpoint_id=tmp_path / name)
    assert "the step is 7 by the name step-7, but the optimizer counts 2 steps" in notices(tmp_path / "step-7")
    assert "counts" not in notices(tmp_path / "step-2")


def test_dcp_folders_of_two_models_are_no_steps_of_a_run(tmp_path: Path) -> None:
    for name in ("qwen2", "qwen3"):
        dcp.save({"model": dict(WEIGHTS)}, checkpoint_id=tmp_path / name)
    done = ckpt("convert", tmp_path, tmp_path / "out")
    assert (done.code, "qwen2, qwen3" in done.err) == (NOT_FOUND, True)


def test_old_file_of_torch_inside_a_file_is_named_and_a_pickle_of_an_object_is_not(tmp_path: Path) -> None:
    old = io.BytesIO()
    torch.save({"w": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    values = {"model": {"w": torch.ones(2)}, "old": old.getvalue(), "loader": pickle.dumps({"epoch": 3}, 4)}
    torch.save(values, tmp_path / "a.pt")
    (notice,) = (one for one in open_checkpoint(tmp_path / "a.pt").notices if one.text == HOLDS_TENSORS)
    assert notice.names == ("old",)
