# ruff: noqa: E501 -- a table is read along its lines
"""Checkpoints of engines whose files contradict each other, lack something, or hold what no reader asks for.

Each is a real one, changed in one place: it is refused, or what is special about it is said.
"""

import io
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Record
from ckpt_formats.registry.opening import open_checkpoint
from damage import SAMPLES, Ran, ckpt, drop, in_file, put, remove, tree
from dcp_states import loaded, save
from rank_files import being, edit, rows

DAMAGED, INCOMPLETE = 20, 20

Harm = Callable[[Path], object]


@dataclass(frozen=True)
class Change:
    """A change of a good checkpoint, with the exit code and the words that must follow."""

    sample: str
    harm: Harm
    code: int
    says: tuple[str, ...]


def rename(old: str, new: str) -> Harm:
    """Rename a file or folder, and what `latest` says with it."""

    def harm(root: Path) -> None:
        path = next(root.rglob(old))
        path.rename(path.with_name(new))
        for pointer in root.glob("latest*"):
            if pointer.read_text() == old:
                pointer.write_text(new)

    return harm


def in_all(pattern: str, *changes: Callable[[Path], object]) -> Harm:
    def harm(root: Path) -> None:
        for path in sorted(root.rglob(pattern)):
            for change in changes:
                change(path)

    return harm


def beside(pattern: str, name: str) -> Harm:
    """Another file in the folder of the files that fit the pattern."""
    return lambda root: (next(root.rglob(pattern)).parent / name).write_bytes(b"something")


def copied(pattern: str, name: str) -> Harm:
    def harm(root: Path) -> None:
        path = next(root.rglob(pattern))
        shutil.copyfile(path, path.with_name(name))

    return harm


def both(*harms: Harm) -> Harm:
    def harm(root: Path) -> None:
        for one in harms:
            one(root)

    return harm


ZERO1, ZERO3 = "deepspeed-0.19-zero1-bf16-dp2", "deepspeed-0.19-zero3-bf16-dp4-tied-frozen"
PIPE, UCP, UCP3 = (
    "deepspeed-0.19-bf16opt-tp2-pp2",
    "ds_to_universal-0.19-zero1-bf16-dp2",
    "ds_to_universal-0.19-zero3-bf16-dp4-tied-frozen",
)
LEGACY, DIST = "megatron-0.16-tp2-pp2-legacy", "megatron-0.16-tp2-pp2-dist"
_OPTIM0, _OPTIM1, _MODEL = "*rank_0_*optim_states.pt", "*rank_1_*optim_states.pt", "mp_rank_00_model_states.pt"
_INNER = "optimizer_state_dict"


def metadata(change: Callable[[Any], object]) -> Harm:
    """Change `.metadata` as torch itself reads and writes it."""

    def harm(root: Path) -> None:
        path = next(root.rglob(".metadata"))
        stated = pickle.loads(path.read_bytes())
        change(stated)
        path.write_bytes(pickle.dumps(stated))

    return harm


def _forget(stated: Any, name: str) -> None:
    """Whatever the metadata say of a tensor or object."""
    del stated.state_dict_metadata[name]
    for index in [index for index in stated.storage_data if index.fqn == name]:
        del stated.storage_data[index]


def _iteration(number: int) -> Harm:
    def harm(root: Path) -> None:
        folder = next(root.glob("iter_*"))
        folder.rename(root / f"iter_{number:07}")
        (root / "latest_checkpointed_iteration.txt").write_text(str(number))

    return harm


def _exchanged(one: str, other: str) -> Harm:
    def harm(root: Path) -> None:
        a, b = next(root.rglob(one)), next(root.rglob(other))
        a.rename(a.with_name("draft"))
        b.rename(a)
        a.with_name("draft").rename(b)

    return harm


def _argument(name: str, value: Any) -> Callable[[Any], object]:
    return lambda root: root["args"].state.update({name: value})


def _stepped(root: Any) -> None:
    for group in root["optimizer"]["optimizer"]["param_groups"]:
        group["step"] = 9


def moved_group(root: Any) -> None:
    """A second state of a third group, which no shapes list."""
    base = root[_INNER]["base_optimizer_state"]
    base["state"][2] = base["state"][1]


def third_master(root: Any) -> None:
    masters = root[_INNER]["single_partition_of_fp32_groups"]
    masters.append(masters[0])


# fmt: off
REFUSED: dict[str, Change] = {
    # DeepSpeed: what several places state
    "a step in the folder's name": Change(ZERO1, rename("global_step5", "global_step7"), DAMAGED, ("`global_steps` is 5 in mp_rank_00_model_states.pt", "7 in the name of the folder global_step7")),
    "another ZeRO stage in the configuration": Change(ZERO1, in_file(_MODEL, tree(put("ds_config", "zero_optimization", "stage", value=2))), DAMAGED, ("ZeRO stage is 2", "1 in")),
    "another ZeRO stage in one rank's optimizer": Change(ZERO1, in_file(_OPTIM1, tree(put(_INNER, "zero_stage", value=2))), DAMAGED, ("ZeRO stage is 1", "rank_1", "but 2")),
    "another version in one rank's optimizer": Change(ZERO1, in_file(_OPTIM1, tree(put("ds_version", value="0.9.1"))), DAMAGED, ("`ds_version` is 0.19.8", "0.9.1", "rank_1")),
    "another precision in one rank's optimizer": Change(ZERO1, in_file(_OPTIM1, tree(put("ds_config", "bf16", "enabled", value=False))), DAMAGED, ("`bf16`", "rank_1")),
    "more data-parallel ranks than files": Change(ZERO1, in_file(_MODEL, tree(put("dp_world_size", value=3))), INCOMPLETE, ("zero_pp_rank_2_mp_rank_00_optim_states.pt is missing", "`dp_world_size` is 3")),
    "fewer data-parallel ranks than files": Change(ZERO1, in_file(_MODEL, tree(put("dp_world_size", value=1))), DAMAGED, ("`dp_world_size` is 1", "files of 2")),
    "more model-parallel ranks than files": Change(ZERO1, in_file(_MODEL, tree(put("mp_world_size", value=2))), INCOMPLETE, ("mp_rank_01_model_states.pt is missing", "`mp_world_size` is 2")),
    "another number of ranks in one file": Change(ZERO3, in_file("*rank_2_*model*", tree(put("mp_world_size", value=2))), DAMAGED, ("`mp_world_size` is 1", "rank_2")),
    "another count of samples in one file": Change(PIPE, in_file("mp_rank_02_model*", tree(put("global_samples", value=61))), DAMAGED, ("`global_samples` is 60", "mp_rank_02")),
    "other shapes in one rank's file": Change(ZERO3, in_file("*rank_3_*model*", tree(lambda root: root["param_shapes"].reverse())), DAMAGED, ("`param_shapes`", "rank_3")),
    "other buffers in one rank's file": Change(ZERO3, in_file("*rank_3_*model*", tree(put("buffer_names", value=["seen"]))), DAMAGED, ("`buffer_names`", "rank_3")),
    "another rank's file, renamed": Change(ZERO3, copied(_OPTIM0, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), DAMAGED, ("rank_1_mp_rank_00_optim_states.pt was saved as", "rank_0")),
    "another learning rate on one rank": Change(ZERO1, in_file(_OPTIM1, tree(put(_INNER, "base_optimizer_state", "param_groups", 0, "lr", value=0.5))), DAMAGED, ("lr of group 0", "0.5", "rank_1")),
    "another learning rate on one rank, stage 3": Change(ZERO3, in_file(_OPTIM1, tree(put(_INNER, _INNER, "param_groups", 1, "lr", value=0.5))), DAMAGED, ("lr of group 1", "0.5", "rank_1")),
    "another learning rate on one tensor-parallel rank": Change(PIPE, in_file("*mp_rank_01_optim*", tree(put(_INNER, "base_optimizer_state", "param_groups", 0, "lr", value=0.5))), DAMAGED, ("in two groups of the optimizer", "lr")),
    # DeepSpeed: more or less than is listed
    "a state of a group that no shapes list": Change(ZERO1, in_all("*optim_states.pt", tree(moved_group)), DAMAGED, ("state of group 2", "`param_shapes` lists 2")),
    "a master of a group that no shapes list": Change(ZERO1, in_all("*optim_states.pt", tree(third_master)), DAMAGED, ("masters of 3 groups", "lists 2")),
    "a master of a sub-group that no shapes list": Change(ZERO3, in_all("*optim_states.pt", tree(lambda root: root[_INNER]["fp32_flat_groups"].append(root[_INNER]["fp32_flat_groups"][0]))), DAMAGED, ("masters of 3 groups", "lists 2")),
    "the model and layers of a pipeline": Change(PIPE, in_file(_MODEL, tree(lambda root: root.update(module={"a": root["param_shapes"][0]}))), DAMAGED, ("layer_*", "mp_rank_00")),
    # Megatron
    "megatron: an iteration in the folder's name": Change(LEGACY, _iteration(7), DAMAGED, ("`iteration` is 2 in mp_rank_00_000", "7 in the name of the folder iter_0000007")),
    "megatron, torch_dist: an iteration in the folder's name": Change(DIST, _iteration(7), DAMAGED, ("the iteration is 2 in common.pt", "7 in the name of the folder iter_0000007")),
    "megatron: folders of two ranks exchanged": Change(LEGACY, _exchanged("mp_rank_00_001", "mp_rank_01_000"), DAMAGED, ("mp_rank_01_000 was written by rank 2", "tensor-parallel rank 0, not 1")),
    "megatron: folders of two stages exchanged": Change(LEGACY, _exchanged("mp_rank_00_000", "mp_rank_00_001"), DAMAGED, ("was written by rank 2", "pipeline-parallel rank 1, not 0")),
    "megatron: another world in one rank's arguments": Change(LEGACY, in_file("mp_rank_01_001/model_optim_rng.pt", tree(_argument("world_size", 8))), DAMAGED, ("`world_size` is 4", "8 in mp_rank_01_001")),
    "megatron: another number of chunks in the arguments": Change(LEGACY, in_all("model_optim_rng.pt", tree(_argument("virtual_pipeline_model_parallel_size", 2))), DAMAGED, ("`virtual_pipeline_model_parallel_size` is 2", "has 1 model chunks")),
    "megatron: a model and a chunk": Change(LEGACY, in_all("model_optim_rng.pt", tree(lambda root: root.update(model1=root["model"]))), DAMAGED, ("has the model chunks model", "and also model1")),
    "megatron: chunks with a gap": Change(LEGACY, in_all("model_optim_rng.pt", tree(lambda root: root.update(model0=root["model"], model2=root.pop("model")))), DAMAGED, ("has the model chunks model0", "and also model2")),
    "megatron: no optimizer on one rank": Change(LEGACY, both(in_file("mp_rank_00_001/model_optim_rng.pt", tree(drop("optimizer"))), in_all("distrib_optim.pt", remove)), INCOMPLETE, ("no optimizer in mp_rank_00_001",)),
    "megatron: another step on one stage": Change(LEGACY, in_all("mp_rank_0?_001/model_optim_rng.pt", tree(_stepped)), DAMAGED, ("the optimizer's step is 2.0 in mp_rank_00_000", "9 in mp_rank_00_001")),
    "megatron, torch_dist: no common.pt": Change(DIST, in_file("common.pt", remove), INCOMPLETE, ("common.pt missing",)),
    "megatron, torch_dist: no metadata.json": Change(DIST, in_file("metadata.json", remove), INCOMPLETE, ("metadata.json missing",)),
    "megatron, torch_dist: no .metadata": Change(DIST, in_file(".metadata", remove), INCOMPLETE, (".metadata missing",)),
    "megatron, torch_dist: no common.pt, no metadata.json": Change(DIST, both(in_file("common.pt", remove), in_file("metadata.json", remove)), INCOMPLETE, ("common.pt", "missing", "Megatron")),
    "megatron, torch_dist: two encodings": Change(DIST, in_file("common.pt", tree(put("content_metadata", "distrib_optim_sharding_type", value="dp_reshardable"))), DAMAGED, ("encoding of the distributed optimizer is dp_reshardable", "fully_reshardable")),
    "megatron, torch_dist: other degrees": Change(DIST, in_file("common.pt", tree(_argument("pipeline_model_parallel_size", 4)), tree(_argument("world_size", 8))), DAMAGED, ("(pp, tp)", "(4, 2)", "rng_state/shard")),
    "megatron, torch_dist: fewer layers than stated": Change(DIST, in_file("common.pt", tree(_argument("num_layers", 6))), INCOMPLETE, ("layer 4 is missing", "`num_layers` is 6")),
    "megatron, torch_dist: random states of one rank lost": Change(DIST, metadata(lambda stated: _forget(stated, "rng_state/shard_0.1_2.2")), INCOMPLETE, ("random states of 3 ranks", "states 4")),
    "megatron, torch_dist: a moment of one parameter lost": Change(DIST, metadata(lambda stated: _forget(stated, "optimizer.state.exp_avg.output_layer.weight")), INCOMPLETE, ("`output_layer.weight` has no `exp_avg`",)),
    # DeepSpeed's universal checkpoint
    "universal: a step in the folder's name": Change(UCP, rename("global_step5_universal", "global_step6_universal"), DAMAGED, ("`global_steps` is 5", "global_step6_universal")),
    "universal: a parameter's moment is gone": Change(UCP, in_file("blocks.0.mlp.up.weight/exp_avg.pt", remove), INCOMPLETE, ("`blocks.0.mlp.up.weight` has no `exp_avg`",)),
    "universal: a parameter's step is gone": Change(UCP, in_file("blocks.0.mlp.up.weight/step.pt", remove), INCOMPLETE, ("`blocks.0.mlp.up.weight` has no `step`",)),
    "universal: all states of a parameter are gone": Change(UCP3, in_all("blocks.0.mlp.up.weight/exp*.pt", remove), INCOMPLETE, ("`blocks.0.mlp.up.weight` has no `exp_avg`",)),
    "universal: a parameter is at another step": Change(UCP, in_file("blocks.0.mlp.up.weight/step.pt", tree(lambda root: None), lambda path: _rewrite(path, 9)), DAMAGED, ("step of optimizer group 0 is 5", "9 in", "mlp.up.weight")),
}

SAID: dict[str, Change] = {
    "a folder that the user renamed": Change(ZERO1, rename("global_step5", "backup_global_step5"), 0, ()),
    "a folder with a tag of the user's": Change(ZERO1, rename("global_step5", "epoch3"), 0, ()),
    "the training script's own count": Change(ZERO1, in_file(_MODEL, tree(put("iteration", value=7))), 0, ("the step is 5", "`iteration`", "7")),
    "another file in the folder": Change(ZERO1, beside(_MODEL, "ema_rank_0.pt"), 0, ("not read", "ema_rank_0.pt")),
    "megatron: another file in a rank's folder": Change(LEGACY, beside("mp_rank_00_000/distrib_optim.pt", "ema.pt"), 0, ("not read", "mp_rank_00_000/ema.pt")),
    "megatron, torch_dist: another file": Change(DIST, beside("common.pt", "train_state.pt"), 0, ("not read", "train_state.pt")),
    "megatron, torch_dist: leftovers of more ranks": Change(DIST, copied("__0_0.distcp", "__9_0.distcp"), 0, ("not read", "__9_0.distcp")),
    "megatron, torch_dist: all states of one parameter lost": Change(DIST, metadata(lambda stated: [_forget(stated, f"optimizer.state.{state}.output_layer.weight") for state in ("param", "exp_avg", "exp_avg_sq")]), 0, ("no state", "output_layer.weight")),
    "megatron, torch_dist: a container of another version": Change(DIST, in_file("metadata.json", lambda path: path.write_text(path.read_text().replace('"sharded_backend_version": 1', '"sharded_backend_version": 2'))), 0, ("version 2",)),
    "universal: another file in the folder": Change(UCP, beside(_MODEL, "layer_00.bin"), 0, ("not read", "layer_00.bin")),
    "universal: another file beside a parameter's": Change(UCP, beside("exp_avg.pt", "exp_avg.bin"), 0, ("not read", "exp_avg.bin")),
    "an optimizer in the model's file, too": Change(ZERO1, in_file(_MODEL, tree(put("optimizer", value={"state": {0: 1}}))), 0, ("not read", "mp_rank_00_model_states.pt")),
    "a layer that no optimizer knows": Change(PIPE, both(*(lambda root, tp=tp: _as_layer(root, tp) for tp in (0, 1))), 0, ("no optimizer has these parameters", "9.")),
    "moments of one group gone in all files": Change(ZERO1, in_all("*optim_states.pt", tree(drop(_INNER, "base_optimizer_state", "state", 1, "exp_avg"))), 0, ("optimizer group 1 lacks", "exp_avg")),
    "states of a shape of their own": Change(ZERO1, in_all("*optim_states.pt", tree(lambda root: _with_errors(root, 7))), 0, ("match no parameter", "0.worker_error")),
    "states of a shape of their own, stage 3": Change(ZERO3, in_all("*optim_states.pt", tree(lambda root: _with_errors3(root))), 0, ("match no parameter", "0.worker_error")),
}
# fmt: on


def _rewrite(path: Path, value: Any) -> None:
    torch.save(value, path)


def _as_layer(root: Path, tp: int) -> None:
    """A layer file that is saved under its own name."""
    old = next(root.rglob(f"layer_01-model_{tp:02}-model_states.pt"))
    torch.save(torch.load(old), old.with_name(f"layer_09-model_{tp:02}-model_states.pt"))


def _with_errors(root: Any, size: int) -> None:
    """What 1-bit Adam keeps of its communication."""
    state = root[_INNER]["base_optimizer_state"]["state"][0]
    state["worker_error"] = root[_INNER]["single_partition_of_fp32_groups"][1]
    state["server_error"] = root[_INNER]["single_partition_of_fp32_groups"][1]


def _with_errors3(root: Any) -> None:
    root[_INNER][_INNER]["state"][0]["worker_error"] = root[_INNER]["fp32_flat_groups"][1]


def of(table: dict[str, Change]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("change", table.values(), ids=list(table))


@pytest.fixture
def changed(change: Change, tmp_path: Path) -> Path:
    copy = tmp_path / change.sample
    shutil.copytree(SAMPLES / change.sample, copy, ignore=shutil.ignore_patterns("truth.safetensors"))
    change.harm(copy)
    return copy


def runs(path: Path, target: Path) -> list[Ran]:
    """What each command says of a checkpoint; the first writes it."""
    return [ckpt("convert", path, target, "--to", "universal"), ckpt("verify", path), ckpt("inspect", path)]


@of(REFUSED)
def test_contradictory_or_incomplete_checkpoints_are_refused_by_all_commands(
    change: Change, changed: Path, tmp_path: Path
) -> None:
    for done in runs(changed, tmp_path / "out"):
        assert done.code == change.code, done.out + done.err
        for words in change.says:
            assert words in done.err
    assert not (tmp_path / "out").exists()


@of(SAID)
def test_special_cases_are_noted_by_all_commands(change: Change, changed: Path, tmp_path: Path) -> None:
    for done in runs(changed, tmp_path / "out"):
        assert done.code == 0, done.err
        for words in change.says:
            assert words in done.err
        if not change.says:
            assert "note" not in done.err


# DCP


def test_a_buffer_of_bytes_in_a_dcp_is_carried_and_written_back(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2), "m._extra_state": io.BytesIO(b"amax")},
        "rng": {"cpu": io.BytesIO(b"state")},
        "train_state": {"step": 5},
    }
    source = save(state, tmp_path / "step-5")
    assert ckpt("verify", source).code == 0
    extras = open_checkpoint(source).extras
    held = extras["m._extra_state"]
    assert isinstance(held, Record)
    assert (held.cls.name, held.state[0]) == ("BytesIO", b"amax")
    for target, style in ((tmp_path / "u", "universal"), (tmp_path / "back", "dcp")):
        assert ckpt("convert", source, target, "--to", style).code == 0
        source = target
    again = loaded(tmp_path / "back")
    assert again["model"]["m._extra_state"].getvalue() == b"amax"
    assert again["rng"]["cpu"].getvalue() == b"state"
    assert again["train_state"] == {"step": 5}


# Megatron


def test_keys_that_begin_as_the_models_do_are_carried(tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(SAMPLES / LEGACY, copy)
    more = {"modelopt_state": [1, 2], "optimizer_note": "kept"}
    in_all("model_optim_rng.pt", tree(lambda root: root.update(more)))(copy)
    in_all("distrib_optim.pt", tree(lambda root: root.update(note="of buffers")))(copy)
    extras = open_checkpoint(copy).extras
    assert {key: extras[key] for key in more} == more
    assert extras["distrib_optim"] == {"note": "of buffers"}


# Files of ranks


WEIGHTS = {"w": torch.arange(35.0).reshape(7, 5), "b": torch.arange(3.0), "c": torch.arange(4.0)}


def _of_rank(rank: int, tensor: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """What a script saves in one file: model, optimizer, and a step."""
    state = {i: {"step": torch.tensor(5.0), "exp_avg": tensor(one + 1)} for i, one in enumerate(WEIGHTS.values())}
    groups = [{"lr": 0.1, "params": [0, 1, 2], "param_names": list(WEIGHTS)}]
    model = {name: tensor(one) for name, one in WEIGHTS.items()}
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}, "epoch": 3, "rng": rank}


def _saved(folder: Path, name: str, world: int, tensor: Callable[[torch.Tensor], Any]) -> Path:
    folder.mkdir()
    for rank in range(world):
        with being(rank, world):
            torch.save(_of_rank(rank, tensor), folder / name.format(rank))
    return folder


def is_whole(checkpoint: Checkpoint) -> bool:
    for name, one in WEIGHTS.items():
        states = checkpoint.parameters[name].states
        assert np.array_equal(read(states[MODEL]), one.numpy())
        assert np.array_equal(read(states["exp_avg"]), (one + 1).numpy())
    return {name for name, p in checkpoint.parameters.items() if p.role == "parameter"} == WEIGHTS.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["checkpoint_rank{}.pt", "model_world_size_2_rank_{}.pt", "ckpt.rank-{}.pth"])
@pytest.mark.parametrize("form", ["cut", "whole"])
def test_ranks_that_save_model_and_optimizer_in_one_file_are_put_together(name: str, form: str, tmp_path: Path) -> None:
    tensor = (lambda one: rows(one, 2)) if form == "cut" else (lambda one: one)
    folder = _saved(tmp_path / "run", name, 2, tensor)
    checkpoint = open_checkpoint(folder)
    assert is_whole(checkpoint)
    assert (checkpoint.extras["epoch"], checkpoint.extras["ranks"]) == (3, {"1": {"rng": 1}})
    assert ckpt("verify", folder).code == 0


@pytest.mark.filterwarnings("ignore")
def test_error_names_a_missing_rank(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "run", "checkpoint_rank{}.pt", 4, lambda one: rows(one, 4))
    (folder / "checkpoint_rank1.pt").unlink()
    for done in runs(folder, tmp_path / "out"):
        assert done.code == INCOMPLETE
        assert "checkpoint_rank1.pt" in done.err
    (folder / "checkpoint_rank2.pt").unlink()
    (folder / "checkpoint_rank3.pt").unlink()
    for done in runs(folder, tmp_path / "out"):
        assert done.code in (20, 22), done.err
    done = ckpt("convert", folder / "checkpoint_rank0.pt", tmp_path / "out")
    assert done.code == 22
    assert "checkpoint_rank1.pt, checkpoint_rank2.pt, checkpoint_rank3.pt" in done.err


@pytest.mark.filterwarnings("ignore")
def test_open_refuses_copies_that_differ(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "run", "checkpoint_rank{}.pt", 2, lambda one: one)
    edit(folder / "checkpoint_rank1.pt", lambda root: root["model"].update(b=root["optimizer"]["state"][1]["exp_avg"]))
    assert ckpt("verify", folder).code == DAMAGED
    done = ckpt("convert", folder, tmp_path / "out")
    assert done.code == DAMAGED
    assert "where: tensor b" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_file_of_another_rank_under_a_new_name_is_refused(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "run", "checkpoint_rank{}.pt", 2, lambda one: one)
    shutil.copyfile(folder / "checkpoint_rank0.pt", folder / "checkpoint_rank1.pt")
    for done in runs(folder, tmp_path / "out"):
        assert done.code == DAMAGED
        assert "was saved as checkpoint_rank0" in done.err


@pytest.mark.filterwarnings("ignore")
def test_two_steps_of_ranks_in_one_folder_are_not_chosen_from(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "run", "step5_rank{}.pt", 2, lambda one: one)
    for rank in range(2):
        torch.save(_of_rank(rank, lambda one: one), folder / f"step6_rank{rank}.pt")
    done = ckpt("inspect", folder)
    assert done.code == 22
    assert "step5_rank0.pt" in done.err
    assert "step6_rank0.pt" in done.err


# DCP


def _dcp(folder: Path, **more: Any) -> Path:
    model = {name: one.clone() for name, one in WEIGHTS.items()}
    state = {name: {"exp_avg": one + 1, "step": torch.tensor(5.0)} for name, one in WEIGHTS.items()}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": list(WEIGHTS)}]}
    return save({"model": model, "optim": optim, **more}, folder)


def test_a_dcp_whose_folder_states_another_step_is_refused(tmp_path: Path) -> None:
    for name, code in (
        ("step-5", 0),
        ("backup_step-5", 0),
        ("best", 0),
        ("step-6", DAMAGED),
        ("global_step6", DAMAGED),
    ):
        folder = _dcp(tmp_path / name, train_state={"step": 5})
        for done in runs(folder, tmp_path / f"{name}.out"):
            assert done.code == code, done.err
            assert (
                code == 0
                or f"the step is 5 in the training state that was saved but 6 in the name of the folder {name}"
                in done.err
            )


DCP: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "a tensor that only the places name": (
        metadata(lambda stated: stated.state_dict_metadata.pop("model.b")), DAMAGED, "`model.b` at [0] is stored, but lists no such block",
    ),
    "an object that only the places name": (
        metadata(lambda stated: stated.state_dict_metadata.pop("train_state.step")), DAMAGED, "`train_state.step`",
    ),
    "a tensor that nothing names any more": (
        metadata(lambda stated: _forget(stated, "model.b")), 0, "bytes that belong to no item of .metadata",
    ),
    "a moment that nothing names any more": (
        metadata(lambda stated: _forget(stated, "optim.state.b.exp_avg")), INCOMPLETE, "`b` has no `exp_avg`",
    ),
    "a file that is longer": (
        in_file("__0_0.distcp", lambda path: path.write_bytes(path.read_bytes() + b"more")), DAMAGED, "4 bytes after the last item",
    ),
    "a file that is padded": (
        in_file("__0_0.distcp", lambda path: path.write_bytes(path.read_bytes() + bytes(512))), 0, "",
    ),
    "another version": (metadata(lambda stated: setattr(stated, "version", "2.0.0")), 0, "version 2.0.0"),
    "no planner's data": (metadata(lambda stated: setattr(stated, "planner_data", None)), 0, "names are split"),
    "leftovers of more ranks": (copied("__0_0.distcp", "__1_0.distcp"), 0, "__1_0.distcp"),
}  # fmt: skip


@pytest.mark.parametrize(("harm", "code", "says"), DCP.values(), ids=list(DCP))
def test_metadata_of_a_dcp_are_compared_with_its_files(harm: Harm, code: int, says: str, tmp_path: Path) -> None:
    folder = _dcp(tmp_path / "saved", train_state={"step": 5})
    harm(folder)
    if "names are split" in says:
        assert {n for n, p in open_checkpoint(folder).parameters.items() if p.role != "extra"} <= WEIGHTS.keys()
    for done in runs(folder, tmp_path / "out"):
        assert done.code == code, done.err
        assert says in done.err


def test_notes_name_a_parameter_that_was_never_stepped(tmp_path: Path) -> None:
    state = {name: {"momentum_buffer": one + 1} for name, one in WEIGHTS.items() if name != "b"}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": list(WEIGHTS)}]}
    done = ckpt("verify", save({"model": dict(WEIGHTS), "optim": optim}, tmp_path / "saved"))
    assert done.code == 0
    assert "no state of these parameters: it never updated them, or their states are missing: b" in done.err
