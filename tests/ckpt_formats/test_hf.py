"""Folders of Hugging Face's libraries: what is read and written of them, and damage. The libraries themselves: see
`test_hf_engine`."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt.findings import find_problems
from ckpt.job import Job
from ckpt.job import save as save_checkpoint
from ckpt.pipeline import Execution, check_complete
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Parameter
from ckpt_formats.core.edits import Select
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import ArrayBlob, Tensor, read
from ckpt_formats.core.values import Global, Record, TensorName
from ckpt_formats.engines.hf import side_files as beside
from ckpt_formats.engines.hf.read import numbered_only
from ckpt_formats.registry import writable
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from held import bits, checkpoint, flip, parameter

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "dtype": "float32"}
TIED = LLAMA | {"tie_word_embeddings": True}
EFFORT = Execution(2, 1 << 20)


def names(layers: int = 2, head: bool = True) -> list[str]:
    """Of a Llama, in its order."""
    linear = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    each = [*linear, "input_layernorm", "post_attention_layernorm"]
    inner = [f"model.layers.{i}.{name}.weight" for i in range(layers) for name in each]
    return ["model.embed_tokens.weight", *inner, "model.norm.weight", *(["lm_head.weight"] if head else [])]


def state(layers: int = 2, head: bool = True) -> dict[str, torch.Tensor]:
    """Its tensors: all of one shape, so that shapes tell nothing."""
    return {name: torch.full((2, 3), float(i)) for i, name in enumerate(names(layers, head))}


def numbered(count: int, *groups: int, **more: Any) -> dict[str, Any]:
    """What `state_dict` of an optimizer says, its parameters numbered."""
    states = {i: {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), 100.0 + i)} for i in range(count)}
    ends = [0, *np.cumsum(groups).tolist()]
    listed = [{"lr": 0.1, "params": list(range(a, b)), **more} for a, b in pairwise(ends)]
    return {"state": states, "param_groups": listed}


def save(folder: Path, config: dict[str, Any] | None = TIED, head: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(state(head=head), folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(source: Checkpoint, target: Path, **options: Any) -> tuple[str, str]:
    """Write it; what is dropped, and the notes, as texts."""
    job = Job(source, target, writable("hf", **options))
    plan = job.plan()
    job.run(resources=EFFORT)
    return " ".join(map(str, plan.dropped)), " ".join(map(str, plan.notes))


# What is one


def test_hf_does_not_detect_bare_files_of_safetensors(tmp_path: Path) -> None:
    assert detect(save(tmp_path / "bare", None)).name == "safetensors"
    assert detect(save(tmp_path / "model")).name == "hf"


@pytest.mark.quick(100)
@pytest.mark.parametrize(
    ("file", "beside"),
    [
        ("pytorch_model.bin", None),
        ("pytorch_model_fsdp.bin", None),
        ("adapter_model.safetensors", "adapter_config.json"),
        ("model.safetensors", "trainer_state.json"),
        ("model.safetensors", "random_states_0.pkl"),
        ("consolidated.safetensors", "config.json"),
        ("shard-00001-model-00001-of-00001.safetensors", None),
    ],
)
def test_hf_detects_a_folder_by_its_files(file: str, beside: str | None, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    if beside:
        (tmp_path / beside).touch()
    assert detect(tmp_path).name == "hf"


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_hf_does_not_detect_a_folder_without_weights(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(NotFoundError):
        detect(tmp_path)


def test_folder_with_files_around_a_missing_model_is_incomplete(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    assert detect(tmp_path).name == "hf"
    with pytest.raises(IncompleteError, match="no weights"):
        open_checkpoint(tmp_path)


def test_hf_refuses_a_model_without_tensors(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    save_file({}, folder / "model.safetensors")
    with pytest.raises(IncompleteError, match="no tensors"):
        open_checkpoint(folder)


# Reading


def test_side_files_are_carried_as_values_or_bytes(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    texts = {"merges.txt": b"a b\n", "tokenizer.model": bytes(range(256)), "list.json": b"[1, 2]", "empty": b""}
    for name, data in texts.items():
        (folder / name).write_bytes(data)
    (folder / "tokenizer_config.json").write_text('{"a": [1, 2.5, null, "\\ud83d\\ude00", NaN]}')
    (folder / ".git").mkdir()
    (folder / "runs").mkdir()
    restored = open_checkpoint(folder)
    for name, data in texts.items():
        place = restored.extras[f"hf/{name}"]
        assert isinstance(place, TensorName)
        assert read(restored.parameters[place.name].weight).tobytes() == data
    assert str(restored.extras["hf/tokenizer_config.json"]) == "{'a': [1, 2.5, None, '😀', nan]}"
    assert restored.extras["hf/config.json"] == TIED
    assert [notice for notice in restored.notices if "runs/" in notice]
    assert not any(".git" in notice for notice in restored.notices)
    assert {shard.path.name for shard in restored.files} == {path.name for path in folder.iterdir() if path.is_file()}


def test_files_too_large_to_carry_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "model")
    for name, nbytes in {"a.txt": 50, "b.txt": 101, "c.txt": 60, "d.txt": 40}.items():
        (folder / name).write_bytes(bytes(nbytes))
    monkeypatch.setattr(beside, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(beside, "MAX_TOTAL_BYTES", 100)
    restored = open_checkpoint(folder)
    assert {"hf/a.txt", "hf/d.txt"} <= set(restored.extras)
    assert not {"hf/b.txt", "hf/c.txt"} & set(restored.extras)
    assert all(name in " ".join(map(str, restored.notices)) for name in ("b.txt", "c.txt"))


def test_a_large_json_is_carried_as_bytes_and_written_back_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "model")
    text = '{"vocab":   {"a": 1}}'
    (folder / "tokenizer.json").write_text(text)
    monkeypatch.setattr(beside, "MAX_JSON_BYTES", 10)
    restored = open_checkpoint(folder)
    assert isinstance(restored.extras["hf/tokenizer.json"], TensorName)
    write(restored, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == text


def test_weights_that_are_there_twice_are_read_once_and_the_others_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    torch.save({"other": torch.ones(2)}, folder / "pytorch_model.bin")
    save_file({"other": torch.ones(2)}, folder / "consolidated.safetensors")
    restored = open_checkpoint(folder)
    assert set(restored.parameters) == set(names(head=False))
    assert all(
        name in " ".join(map(str, restored.notices)) for name in ("pytorch_model.bin", "consolidated.safetensors")
    )


def test_the_name_that_files_leave_out_is_an_alias_if_the_configuration_ties_it(tmp_path: Path) -> None:
    assert open_checkpoint(save(tmp_path / "tied")).aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert open_checkpoint(save(tmp_path / "not", LLAMA)).aliases == {}
    assert open_checkpoint(save(tmp_path / "both", TIED, head=True)).aliases == {}
    assert open_checkpoint(save(tmp_path / "none", {"model_type": "new"})).aliases == {}


def test_tied_tensors_of_a_file_of_torch_are_aliases(tmp_path: Path) -> None:
    shared = torch.ones(2, 3)
    torch.save({"a.weight": shared, "b.weight": shared, "c": 5}, tmp_path / "pytorch_model.bin")
    restored = open_checkpoint(tmp_path)
    assert restored.aliases == {"b.weight": "a.weight"}
    assert restored.extras["c"] == 5


def test_block_scales_of_quantised_weights_are_carried_as_they_are(tmp_path: Path) -> None:
    held = {"w.weight": torch.arange(4).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(1, 1)}
    folder = save(tmp_path / "model", LLAMA | {"quantization_config": {"quant_method": "fp8"}})
    save_file(held, folder / "model.safetensors")
    restored = open_checkpoint(folder)
    assert {n: p.weight.dtype.name for n, p in restored.parameters.items()} == {
        "w.weight": "float8_e4m3fn",
        "w.weight_scale_inv": "float32",
    }
    _, remarks = write(restored, tmp_path / "out")
    assert "missing" not in remarks


# Optimizers


def numbers_of(restored: Checkpoint) -> dict[str, float]:
    """The number that each parameter's state was made of."""
    return {
        name: float(read(p.states["exp_avg"]).reshape(-1)[0]) - 100
        for name, p in restored.parameters.items()
        if "exp_avg" in p.states
    }


@pytest.mark.parametrize("layers", [11, 300])
def test_hf_names_numbered_states_in_the_order_of_the_configured_model(layers: int, tmp_path: Path) -> None:
    """The alphabet, which the file keeps, puts the eleventh layer before the third. Three hundred take no longer."""
    order = names(layers, False)
    save_file(state(layers, False), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TIED | {"num_hidden_layers": layers}))
    torch.save(numbered(len(order), len(order)), tmp_path / "optimizer.pt")
    restored = open_checkpoint(tmp_path)
    assert numbers_of(restored) == {name: i for i, name in enumerate(order)}
    assert not restored.notices


def test_hf_takes_the_order_of_a_file_of_torch(tmp_path: Path) -> None:
    held = {f"w{i}": torch.ones(2, 3) for i in (2, 0, 1)}
    torch.save(held, tmp_path / "pytorch_model.bin")
    torch.save(numbered(3, 3), tmp_path / "optimizer.bin")
    assert numbers_of(open_checkpoint(tmp_path)) == {"w2": 0, "w0": 1, "w1": 2}


def test_hf_takes_no_order_from_shards_of_torch(tmp_path: Path) -> None:
    for i in (1, 2):
        torch.save({f"w{i}": torch.ones(2, 3)}, tmp_path / f"pytorch_model-0000{i}-of-00002.bin")
    where = {f"w{i}": f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    torch.save(numbered(2, 2), tmp_path / "optimizer.pt")
    restored = open_checkpoint(tmp_path)
    assert numbers_of(restored) == {}
    assert set(restored.extras["hf/optimizer.pt"]["state"]) == {0, 1}
    assert numbers_of(open_checkpoint(tmp_path, ReadOptions(order=("w2", "w1")))) == {"w2": 0, "w1": 1}


def test_hf_guesses_no_groups_that_shapes_do_not_tell_apart(tmp_path: Path) -> None:
    """Two groups of which either may hold any parameter."""
    folder = save(tmp_path / "run")
    count = len(names(head=False))
    torch.save(numbered(count, 5, count - 5), folder / "optimizer.pt")
    restored = open_checkpoint(folder)
    assert numbers_of(restored) == {}
    assert restored.groups == ()
    assert "--param-order" in " ".join(map(str, restored.notices))
    assert "optimizer" not in restored.extras
    order = tuple(reversed(names(head=False)))
    assert numbers_of(open_checkpoint(folder, ReadOptions(order=order))) == {name: i for i, name in enumerate(order)}


def test_hf_takes_the_names_in_groups(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", None)
    held = numbered(len(names(head=False)), len(names(head=False)))
    order = sorted(names(head=False), key=lambda name: name[::-1])
    held["param_groups"][0]["param_names"] = order
    torch.save(held, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 70}')
    restored = open_checkpoint(folder)
    assert numbers_of(restored) == {name: i for i, name in enumerate(order)}
    assert restored.origin.step == 70


def test_hf_carries_an_optimizer_of_another_model(tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    torch.save(numbered(50, 50), folder / "optimizer.pt")
    restored = open_checkpoint(folder)
    assert numbers_of(restored) == {}
    assert len(restored.extras["hf/optimizer.pt"]["state"]) == 50


@pytest.mark.parametrize("step", [None, -1, "5", True, 2**70])
def test_hf_reads_no_step_that_is_no_number(step: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert open_checkpoint(folder).origin.step is None


# Damage


def test_objects_of_classes_that_we_do_not_know_are_carried(tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    torch.save(torch.nn.Linear(2, 2), folder / "training_args.bin")
    extra = open_checkpoint(folder).extras["hf/training_args.bin"]
    assert isinstance(extra, Record)
    assert extra.cls.name == "Linear"


def shards(at: Path, kind: str) -> dict[str, str]:
    """A folder of three shards with an index; where each tensor is."""
    stem, suffix, keep = (
        ("model", ".safetensors", save_file) if kind == "safetensors" else ("pytorch_model", ".bin", torch.save)
    )
    where = {}
    for i, name in enumerate(names(1, False)):
        where[name] = f"{stem}-{1 + i % 3:05}-of-00003{suffix}"
    for file in set(where.values()):
        keep({name: torch.ones(2) for name, there in where.items() if there == file}, at / file)
    (at / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (at / "config.json").write_text(json.dumps(TIED))
    return where


def say(at: Path, fields: Any) -> None:
    (index,) = at.glob("*.index.json")
    index.write_text(json.dumps(fields))


FIRST = names()[0]
DAMAGE: dict[str, tuple[Callable[[Path, dict[str, str]], object], type[CkptError]]] = {
    "a file is missing": (lambda at, where: (at / where[FIRST]).unlink(), IncompleteError),
    "a tensor is elsewhere": (
        lambda at, where: say(at, {"weight_map": where | {FIRST: where[names()[1]]}}),
        IncompleteError,
    ),
    "a tensor is nowhere": (lambda at, where: say(at, {"weight_map": where | {"more": where[FIRST]}}), IncompleteError),
    "a tensor is not listed": (
        lambda at, where: say(at, {"weight_map": {n: f for n, f in where.items() if n != FIRST}}),
        IncompleteError,
    ),
    "a path out": (lambda at, where: say(at, {"weight_map": where | {FIRST: "../x.bin"}}), UnsafeError),
    "an absolute path": (lambda at, where: say(at, {"weight_map": where | {FIRST: "/etc/passwd"}}), UnsafeError),
    "a number": (lambda at, where: say(at, {"weight_map": where | {FIRST: 3}}), CorruptError),
    "no map": (lambda at, where: say(at, {}), CorruptError),
    "a list": (lambda at, where: say(at, []), CorruptError),
    "a file twice": (
        lambda at, where: (at / where[FIRST]).write_bytes((at / where[names()[1]]).read_bytes()),
        CorruptError,
    ),
    "a file cut short": (lambda at, where: os.truncate(at / where[FIRST], 60), CorruptError),
    "an empty file": (lambda at, where: os.truncate(at / where[FIRST], 0), CorruptError),
    "a configuration that is not JSON": (lambda at, where: (at / "config.json").write_text("{"), CorruptError),
    "a configuration that is a list": (lambda at, where: (at / "config.json").write_text("[]"), CorruptError),
    "a configuration with a key twice": (
        lambda at, where: (at / "config.json").write_text('{"a": 1, "a": 2}'),
        CorruptError,
    ),
    "a configuration nested without end": (
        lambda at, where: (at / "config.json").write_text("[" * 99_999),
        CorruptError,
    ),
}


@pytest.mark.parametrize("container", ["safetensors", "torch"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_hf_refuses_a_damaged_folder(kind: str, container: str, tmp_path: Path) -> None:
    where = shards(tmp_path, container)
    assert len(open_checkpoint(tmp_path).parameters) == len(where)
    damage, expected = DAMAGE[kind]
    damage(tmp_path, where)
    with pytest.raises(expected):
        open_checkpoint(tmp_path)


def test_a_configuration_of_absurd_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    os.truncate(folder / "config.json", 1 << 40)
    with pytest.raises(UnsafeError):
        open_checkpoint(folder)


def test_a_configuration_of_a_million_layers_costs_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", TIED | {"num_hidden_layers": 10**15})
    assert len(open_checkpoint(folder).parameters) == len(names(head=False))


@pytest.mark.parametrize("root", [5, [torch.ones(2)], {"a": 1}, torch.ones(2)])
def test_a_model_that_is_no_dict_of_tensors_is_refused(root: Any, tmp_path: Path) -> None:
    torch.save(root, tmp_path / "pytorch_model.bin")
    with pytest.raises(CorruptError):
        open_checkpoint(tmp_path)


# What ranks write


def ranks(at: Path, *blocks: dict[str, tuple[torch.Tensor, list[int]]]) -> None:
    """Files as PyTorch's HuggingFaceStorageWriter has them, one of each rank."""
    at.mkdir(exist_ok=True)
    for i, held in enumerate(blocks, 1):
        info = {name: {"saved_offsets": offsets} for name, (_, offsets) in held.items()}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
        save_file({n: t for n, (t, _) in held.items()}, at / f"shard-{i:05}-model-00001-of-00001.safetensors", metadata)


WHOLE = torch.arange(24.0).reshape(6, 4)


def test_blocks_are_put_where_their_files_say(tmp_path: Path) -> None:
    ranks(
        tmp_path,
        {"w": (WHOLE[:4, :3].contiguous(), [0, 0]), "s": (torch.tensor(7.0), [])},
        {"w": (WHOLE[:4, 3:].contiguous(), [0, 3])},
        {"w": (WHOLE[4:].contiguous(), [4, 0]), "none": (torch.ones(0, 3), [0, 0])},
    )
    restored = open_checkpoint(tmp_path)
    check_complete(restored)
    assert read(restored.parameters["w"].weight).tolist() == WHOLE.tolist()
    assert read(restored.parameters["s"].weight).tolist() == 7
    assert not any("DCP" in str(value) for value in restored.extras.values()), (
        "where blocks lie is no part of the model"
    )
    assert restored.parameters["none"].weight.shape == (0, 3)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((WHOLE[4:], [4, 0]), "no file holds block"),
        ((WHOLE[2:], [2, 0]), "overlap"),
        ((WHOLE[3:].to(torch.float64), [3, 0]), "float64"),
    ],
    ids=["a hole", "an overlap", "another type"],
)
def test_blocks_that_do_not_fit_are_refused(second: Any, message: str, tmp_path: Path) -> None:
    ranks(tmp_path, {"w": (WHOLE[:3].clone(), [0, 0])}, {"w": (second[0].clone(), second[1])})
    with pytest.raises(IncompleteError, match=message):
        check_complete(open_checkpoint(tmp_path))


@pytest.mark.parametrize("offsets", [[0], [0, 0, 0], [-1, 0], [0, 1.5], [0, "0"], None, [0, 2**60]])
def test_hf_refuses_an_offset_that_is_none(offsets: Any, tmp_path: Path) -> None:
    ranks(tmp_path, {"w": (WHOLE.clone(), offsets)})
    with pytest.raises(CorruptError):
        open_checkpoint(tmp_path)


def test_blocks_of_other_axes_are_refused(tmp_path: Path) -> None:
    ranks(tmp_path, {"w": (WHOLE.clone(), [0, 0])}, {"w": (torch.ones(3), [6])})
    with pytest.raises(CorruptError, match="axes"):
        open_checkpoint(tmp_path)


def test_a_file_that_does_not_say_where_is_refused_beside_others_that_do(tmp_path: Path) -> None:
    ranks(tmp_path, {"w": (WHOLE[:3].clone(), [0, 0])})
    save_file({"w": WHOLE[3:].clone()}, tmp_path / "shard-00002-model-00001-of-00001.safetensors")
    with pytest.raises(CorruptError):
        open_checkpoint(tmp_path)


def test_a_lost_last_rank_is_missed_where_the_whole_files_lie_beside(tmp_path: Path) -> None:
    ranks(tmp_path / "sharded", {"w": (WHOLE[:3].clone(), [0, 0])}, {"w": (WHOLE[3:].clone(), [3, 0])})
    save_file({"w": WHOLE}, tmp_path / "model-00001-of-00001.safetensors")
    restored = open_checkpoint(tmp_path)
    assert read(restored.parameters["w"].weight).tolist() == WHOLE.tolist()
    (tmp_path / "sharded" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(IncompleteError, match="rank"):
        open_checkpoint(tmp_path)


def test_a_lost_file_of_a_rank_is_missed_by_its_number(tmp_path: Path) -> None:
    ranks(tmp_path, {"w": (WHOLE.clone(), [0, 0])})
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").rename(
        tmp_path / "shard-00001-model-00001-of-00002.safetensors"
    )
    with pytest.raises(IncompleteError, match="00002-of-00002"):
        open_checkpoint(tmp_path)


# Writing


def llama(prefix: str = "", head: bool = True, config: dict[str, Any] | None = None, **more: Any) -> Checkpoint:
    """A Llama in memory."""
    held = {f"{prefix}{name}": tensor.numpy() for name, tensor in state(head=head).items()}
    extras = {} if config is None else {"hf/config.json": config}
    return checkpoint([parameter(name, {MODEL: values}) for name, values in held.items()], (), extras | more)


def test_wide_elements_come_first_and_data_begin_aligned(tmp_path: Path) -> None:
    source = checkpoint(
        [
            parameter("a", {MODEL: np.ones(3, np.uint8)}),
            parameter("b", {MODEL: np.ones(3, np.float32)}),
            parameter("c", {MODEL: np.ones(3, np.float16)}),
            parameter("d", {MODEL: np.ones(3, np.int64)}),
        ],
        (),
        {"hf/config.json": {"model_type": "new"}},
    )
    write(source, tmp_path / "out")
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert (8 + length) % 64 == 0
    assert [header[name]["data_offsets"][0] for name in "dbca"] == [0, 24, 36, 42]


def test_shards_have_an_index_as_transformers_writes_it(tmp_path: Path) -> None:
    write(llama(config=LLAMA), tmp_path / "out", shard_nbytes=100)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert index["metadata"] == {"total_size": 24 * len(names())}
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    assert [file.name for file in files] == [f"model-{i:05}-of-00006.safetensors" for i in range(1, 7)]
    assert set(open_checkpoint(tmp_path / "out").parameters) == set(names())


@pytest.mark.parametrize(
    "prefix", ["module.", "model.", "_orig_mod.", "module.model.", "module._orig_mod.module.", "base_model."]
)
def test_wrappers_are_removed_from_names(prefix: str, tmp_path: Path) -> None:
    _, remarks = write(llama(prefix, config=LLAMA), tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(names())
    assert f"`{prefix}{names()[0]}` becomes `{names()[0]}`" in remarks


def test_a_wrapper_is_taken_out_of_the_middle_too(tmp_path: Path) -> None:
    inner = {name: name.replace("layers.1.", "layers.1._orig_mod._checkpoint_wrapped_module.") for name in names()}
    held = [parameter(inner[name], {MODEL: tensor.numpy()}) for name, tensor in state().items()]
    write(checkpoint(held, (), {"hf/config.json": LLAMA}), tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(names())


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "new"},
        LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
    ],
)
def test_names_stay_where_it_is_not_sure_that_others_fit(config: dict[str, Any], tmp_path: Path) -> None:
    write(llama("module.", config=config), tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {f"module.{name}" for name in names()}


def test_names_that_fit_are_left_alone(tmp_path: Path) -> None:
    """All names of a base model without a head begin with nothing that could be taken off."""
    _, remarks = write(llama(config=LLAMA), tmp_path / "out")
    assert remarks == ""


MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 1,
    "num_local_experts": 1,
    "hidden_size": 2,
    "intermediate_size": 3,
}


def running_mixtral(experts: int) -> Checkpoint:
    """As transformers 5 holds it in memory."""
    layer = "model.layers.0."
    linear = {f"{layer}self_attn.{x}_proj.weight": np.ones((2, 2)) for x in "qkvo"}
    norms = {f"{layer}{x}_layernorm.weight": np.ones(2) for x in ("input", "post_attention")}
    ends = {f"{name}.weight": np.ones((2, 2)) for name in ("model.embed_tokens", "lm_head")}
    ends["model.norm.weight"] = np.ones(2)
    stacks = {
        f"{layer}mlp.gate.weight": np.ones((experts, 2)),
        f"{layer}mlp.experts.gate_up_proj": np.arange(experts * 12.0).reshape(experts, 6, 2),
        f"{layer}mlp.experts.down_proj": np.arange(experts * 6.0).reshape(experts, 2, 3),
    }
    held = linear | norms | ends | stacks
    return checkpoint([parameter(name, {MODEL: values}) for name, values in held.items()])


@pytest.mark.parametrize("experts", [1, 3])
def test_stacks_of_experts_are_taken_apart(experts: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"num_local_experts": experts}))
    _, remarks = write(running_mixtral(experts), tmp_path / "out", config=tmp_path / "config.json")
    assert "stacks of experts are divided" in remarks
    held = load_file(tmp_path / "out" / "model.safetensors")
    for e in range(experts):
        place = f"model.layers.0.block_sparse_moe.experts.{e}"
        gate_up = torch.arange(12.0, dtype=torch.float64).reshape(6, 2) + 12 * e
        assert torch.equal(held[f"{place}.w1.weight"], gate_up[:3])
        assert torch.equal(held[f"{place}.w3.weight"], gate_up[3:])
        assert held[f"{place}.w2.weight"].tolist() == (np.arange(6).reshape(2, 3) + 6 * e).tolist()
    assert len(held) == 10 + 3 * experts


def test_a_stack_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"num_local_experts": 2}))
    with pytest.raises(CorruptError, match=r"\[3, 2\], but the model's sizes give \[2, 2\]"):
        write(running_mixtral(3), tmp_path / "out", config=tmp_path / "config.json")


def test_configuration_is_none_when_it_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"no config\.json"):
        write(llama(config=["a"]), tmp_path / "out")


@pytest.mark.parametrize(
    ("groups", "numbered"),
    [
        ([{"params": [0, 1]}], True),
        ([{"params": []}, {"params": [0]}], True),
        ([{"params": [0, 1], "param_names": ["a", "b"]}], False),
        ([{"params": ["a"]}], False),
        ([{"params": 5}, {"lr": 0.1}], False),
        ([5], False),
        (None, False),
    ],
)
def test_whether_an_optimizer_only_numbers_its_parameters(groups: Any, numbered: bool) -> None:
    assert numbered_only({"param_groups": groups}) is numbered


def test_missing_and_surplus_tensors_are_named_before_anything_is_written(tmp_path: Path) -> None:
    source = llama(config=LLAMA | {"num_hidden_layers": 3})
    more = checkpoint([*source.parameters.values(), parameter("value_head", {MODEL: np.ones(2)})], (), source.extras)
    with pytest.raises(UnsupportedError, match=r"2 layers.*num_hidden_layers 3"):
        write(more, tmp_path / "none")
    _, remarks = write(replace(more, history=(Select((), ("x",)),)), tmp_path / "out")
    assert "tensors of the model are missing" in remarks
    assert "`model.layers.2.self_attn.q_proj.weight`" in remarks
    assert "and 6 more" in remarks
    assert "`value_head`" in remarks


def test_buffers_of_old_versions_are_no_surplus(tmp_path: Path) -> None:
    source = llama(config=LLAMA)
    old = parameter("model.layers.0.self_attn.rotary_emb.inv_freq", {MODEL: np.ones(2, np.float32)})
    _, remarks = write(checkpoint([*source.parameters.values(), old], (), source.extras), tmp_path / "out")
    assert remarks == ""


def tied(config: dict[str, Any] | None, kept: str = names()[0]) -> Checkpoint:
    other = ({"lm_head.weight", names()[0]} - {kept}).pop()
    held = {name: p for name, p in llama(config=config).parameters.items() if name != other}
    extras = {} if config is None else {"hf/config.json": config}
    return checkpoint(held.values(), (), extras, {other: kept})


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_have_the_name_that_transformers_expects(kept: str, tmp_path: Path) -> None:
    _, remarks = write(tied(TIED, kept), tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(names(head=False))
    assert remarks == ""


UNKNOWN = {"model_type": "new", "tie_word_embeddings": True}


@pytest.mark.parametrize("config", [LLAMA, UNKNOWN], ids=["untied", "unknown"])
def test_tied_weights_have_both_names_when_the_model_may_not_tie_them(config: dict[str, Any], tmp_path: Path) -> None:
    write(tied(config), tmp_path / "out")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(held["lm_head.weight"], held[names()[0]])
    assert set(held) == set(names())


def test_two_tensors_that_the_configuration_ties_are_both_written_and_remarked(tmp_path: Path) -> None:
    _, remarks = write(llama(config=TIED), tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(names())
    assert "may use one of them for both" in remarks


def test_a_configuration_is_taken_from_where_the_user_says(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", LLAMA)
    (folder / "tokenizer.model").write_bytes(b"\0\1")
    (folder / "trainer_state.json").write_text("{}")
    torch.save({}, folder / "scheduler.pt")
    (folder / "latest").write_text("global_step5")
    write(llama("module."), tmp_path / "out", config=folder)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.model",
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == LLAMA
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"\0\1"
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(names())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(LLAMA | {"vocab_size": 2}))
    write(llama(), tmp_path / "alone", config=other)
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["vocab_size"] == 2


@pytest.mark.parametrize(("dtype", "written"), [("float32", "float16"), ("auto", "auto")])
def test_a_configuration_states_the_type_of_the_weights_unless_it_states_none(
    dtype: str, written: str, tmp_path: Path
) -> None:
    halves = [parameter(name, {MODEL: tensor.to(torch.float16).numpy()}) for name, tensor in state().items()]
    source = checkpoint(halves, (), {"hf/config.json": LLAMA | {"dtype": dtype}})
    _, remarks = write(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == written
    assert ("config.json states dtype float16" in remarks) == (dtype != written)


@pytest.mark.parametrize("kind", ["nothing", "an empty folder", "no JSON", "a list"])
def test_hf_refuses_a_configuration_that_is_none(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    if kind == "an empty folder":
        path.mkdir()
    elif kind != "nothing":
        path = tmp_path / "config.json"
        path.write_text("{" if kind == "no JSON" else "[]")
    with pytest.raises((NotFoundError, CorruptError)):
        write(llama(), tmp_path / "out", config=path)
    assert not (tmp_path / "out").exists()


def test_hint_names_the_option_when_the_configuration_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"no config\.json") as error:
        write(llama(), tmp_path / "out")
    assert "--config" in str(error.value.hint)
    assert not (tmp_path / "out").exists()


def test_notes_name_states_of_the_run_that_are_lost(tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    torch.save(numbered(20, 20), folder / "optimizer.pt")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text("{}")
    losses, _ = write(open_checkpoint(folder), tmp_path / "out")
    assert all(word in losses for word in ("exp_avg", "scheduler.pt", "trainer_state.json"))
    assert "config.json" not in losses
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("name", ["../x.json", "/x.json", "a/../b.json", "..", "."])
def test_a_carried_file_whose_name_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    source, key = llama(config=LLAMA), f"hf/{name}"
    held = Parameter(key, "extra", {MODEL: Tensor.of(ArrayBlob(np.ones(2, np.uint8)))})
    more = checkpoint([*source.parameters.values(), held], (), {**source.extras, key: TensorName(key)})
    with pytest.raises(UnsafeError):
        write(more, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_folders_beside_the_model_are_not_written(tmp_path: Path) -> None:
    source = llama(config=LLAMA)
    more = checkpoint([*source.parameters.values()], (), {**source.extras, "hf/unet/config.json": {"a": 1}})
    losses, _ = write(more, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert "hf/unet/config.json" in losses


def test_a_carried_file_never_takes_the_place_of_the_weights(tmp_path: Path) -> None:
    source = llama(config=LLAMA)
    held = [
        Parameter(f"hf/{n}", "extra", {MODEL: Tensor.of(ArrayBlob(np.ones(2, np.uint8)))})
        for n in ("model.safetensors",)
    ]
    places = {p.name: TensorName(p.name) for p in held} | {"hf/model.safetensors.index.json": {"weight_map": {}}}
    more = checkpoint([*source.parameters.values(), *held], (), {**source.extras, **places})
    losses, _ = write(more, tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(names())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert "hf/model.safetensors" in losses


@pytest.mark.parametrize(
    "value", [b"bytes", (1, 2), np.ones(3), {1: 2}, {"a": [TensorName("x")]}, Record(Global("a", "B"))]
)
def test_a_configuration_that_json_cannot_say_is_not_written(value: Any, tmp_path: Path) -> None:
    held = llama(config=LLAMA)
    source = checkpoint(held.parameters.values(), (), {"hf/config.json": {"model_type": value}, "hf/a.json": LLAMA})
    with pytest.raises(UnsupportedError, match=r"no config\.json"):
        write(source, tmp_path / "out")


def test_hf_names_links_to_nowhere(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    (folder / "tokenizer.model").symlink_to(tmp_path / "gone")
    assert "tokenizer.model" in " ".join(map(str, open_checkpoint(folder).notices))


def test_metadata_of_the_files_are_carried(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    save_file(state(head=False), folder / "model.safetensors", {"format": "pt", "note": "kept"})
    assert open_checkpoint(folder).extras["hf/__metadata__"] == {"note": "kept"}


def test_hf_writes_an_adapter(tmp_path: Path) -> None:
    held = {"base_model.model.q.lora_A.weight": np.ones((2, 3), np.float32)}
    source = checkpoint(
        [parameter(n, {MODEL: v}) for n, v in held.items()], (), {"hf/adapter_config.json": {"peft_type": "LORA"}}
    )
    _, remarks = write(source, tmp_path / "out")
    assert remarks == ""
    assert set(load_file(tmp_path / "out" / "adapter_model.safetensors")) == set(held)
    assert detect(tmp_path / "out").name == "hf"


def test_hf_returns_every_bit(tmp_path: Path) -> None:
    source = llama(config=LLAMA)
    write(source, tmp_path / "out", shard_nbytes=100)
    restored = open_checkpoint(tmp_path / "out")
    assert {n: bits(read(p.weight)) for n, p in restored.parameters.items()} == {
        n: bits(read(p.weight)) for n, p in source.parameters.items()
    }
    assert restored.extras["hf/config.json"] == LLAMA


def test_hf_refuses_a_type_that_safetensors_lacks(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        write(checkpoint([parameter("w", {MODEL: np.ones(2, np.complex128)})]), tmp_path / "out")


# A folder of the real Trainer


SAMPLE = Path(__file__).parents[2] / "sample_checkpoints" / "transformers-5.23-trainer"


def test_hf_reads_what_the_trainer_held() -> None:
    restored = open_checkpoint(SAMPLE)
    truth = load_file(SAMPLE.with_name(f"{SAMPLE.name}.truth.safetensors"))
    held = {f"{p.name}/{to_stored(s)}": bits(read(t)) for p, s, t in restored.tensors() if p.role != "extra"}
    assert held == {name: bits(tensor.numpy()) for name, tensor in truth.items()}
    assert restored.origin.step == 4
    assert restored.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert not restored.notices
    assert not list(find_problems(restored, EFFORT))


def test_a_flipped_bit_in_the_optimizer_is_found(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "run")
    file = tmp_path / "run" / "optimizer.pt"
    table = open_checkpoint(tmp_path / "run").parameters["transformer.wte.weight"]
    place = next(table.states["exp_avg"].sources())
    flip(file, place.offset + 5)
    (problem,) = find_problems(open_checkpoint(tmp_path / "run"), EFFORT)
    assert problem.where.endswith("optimizer.pt")
    with pytest.raises(CorruptError):
        save_checkpoint(open_checkpoint(tmp_path / "run"), tmp_path / "out", writable("universal"), resources=EFFORT)
