"""Megatron's legacy layout: what is read, and that whatever does not fit is named before anything is written."""

import argparse
import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ckpt_cli.main import cli
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    NotFoundError,
    RulesError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.rules import read_rules
from ckpt_formats.core.tensor import ArrayBlob, Fragment, Tensor, read
from ckpt_formats.engines.megatron import MegatronLegacy
from ckpt_formats.engines.megatron.shared.buffers import BufferItem, fill, fit
from ckpt_formats.engines.megatron.shared.merge import LocalCopy, merge_copies
from ckpt_formats.engines.megatron.shared.module_order import ModuleOrder
from ckpt_formats.engines.megatron.shared.names import Naming
from ckpt_formats.engines.megatron.shared.rules import with_stored_sizes
from ckpt_formats.engines.megatron.shared.stages import even_stages, from_layout_string, uneven_stages
from ckpt_formats.engines.megatron.torch_dist.optimizer import unflattened
from ckpt_formats.engines.megatron.torch_dist.read import tensors_by_name
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from held import array, tensor
from megatron_files import cut, whole, write


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_parts_are_joined_as_megatron_cut_them(tmp_path: Path, tp: int) -> None:
    tensors = whole()
    checkpoint = open_checkpoint(write(tmp_path, tensors, tp))
    assert list(checkpoint.parameters) == list(tensors)
    for name, values in tensors.items():
        assert np.array_equal(read(checkpoint.parameters[name].weight), values), name


def test_the_newest_iteration_is_read_by_its_pointer_and_one_by_its_name(tmp_path: Path) -> None:
    run = write(tmp_path, whole())
    assert detect(run).name == detect(run / "iter_0000005").name == "megatron-legacy"
    assert open_checkpoint(run).parameters.keys() == open_checkpoint(run / "iter_0000005").parameters.keys()
    (run / "latest_checkpointed_iteration.txt").write_text("release")
    (run / "iter_0000005").rename(run / "release")
    assert open_checkpoint(run).origin.step == 5


@pytest.mark.parametrize("text", ["7", "-1", "five", "", "../iter_0000005", "9" * 30])
def test_megatron_refuses_a_pointer_to_nothing(tmp_path: Path, text: str) -> None:
    run = write(tmp_path, whole())
    (run / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises((NotFoundError, CorruptError)):
        MegatronLegacy().read(run, ReadOptions())
    assert not MegatronLegacy().detect(run)


def test_megatron_legacy_names_a_missing_rank(tmp_path: Path) -> None:
    run = write(tmp_path, whole(), tp=2)
    (run / "iter_0000005" / "mp_rank_01").rename(run / "gone")
    with pytest.raises(IncompleteError, match=r"mp_rank_01 is missing.* tp 2"):
        open_checkpoint(run)


def test_megatron_legacy_names_a_surplus_rank(tmp_path: Path) -> None:
    run = write(tmp_path, whole(), tp=2)
    (run / "iter_0000005" / "mp_rank_02").mkdir()
    torch.save(
        torch.load(run / "iter_0000005/mp_rank_01/model_optim_rng.pt", weights_only=False),
        run / "iter_0000005/mp_rank_02/model_optim_rng.pt",
    )
    with pytest.raises(CorruptError, match="no rank mp_rank_02"):
        open_checkpoint(run)


def test_expert_files_are_saved_by_some_ranks_when_experts_are_split_otherwise(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, two experts, each whole on one: the folders are a diagonal, not a grid."""
    tensors, experts = whole(), {i: np.full((24, 8), 100 + i, "f4") for i in range(2)}
    run = tmp_path / "run"
    args = {"num_experts": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    write(run, tensors, 2, {**args, "moe_ffn_hidden_size": 12})
    for rank in range(2):
        folder = run / "iter_0000005" / f"mp_rank_0{rank}"
        own = {"decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight": torch.from_numpy(experts[rank])}
        _change(folder, lambda root, own=own: root["model"].update(own))
        folder.rename(folder.with_name(f"mp_rank_0{rank}_00{rank}"))
    parameters = open_checkpoint(run).parameters
    for name, values in tensors.items():
        assert np.array_equal(read(parameters[name].weight), values), name
    for i, values in experts.items():
        name = f"decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc1.weight"
        assert np.array_equal(read(parameters[name].weight), values)


def test_a_tensor_parallel_rank_that_megatron_did_not_save_is_named(tmp_path: Path) -> None:
    """Of two ranks that hold the same experts, one saves: the other's half of the rest is nowhere."""
    experts = {"num_experts": 2, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    run = write(tmp_path / "run", whole(), 2, {**experts, "moe_ffn_hidden_size": 12})
    shutil.rmtree(run / "iter_0000005/mp_rank_01")
    with pytest.raises(IncompleteError, match="did not save tensor-parallel rank 1"):
        open_checkpoint(run)


def test_megatron_refuses_mixed_iterations(tmp_path: Path) -> None:
    run = write(tmp_path, whole(), tp=2)
    _change(run / "iter_0000005/mp_rank_01", lambda root: root.update(iteration=6))
    with pytest.raises(CorruptError, match="`iteration` is 5 in mp_rank_00 but 6 in mp_rank_01"):
        open_checkpoint(run)


def test_megatron_refuses_mixed_runs(tmp_path: Path) -> None:
    run = write(tmp_path, whole(), tp=2)
    _change(run / "iter_0000005/mp_rank_01", lambda root: setattr(root["args"], "num_layers", 3))
    with pytest.raises(CorruptError, match="`num_layers` is 2 in mp_rank_00 but 3 in mp_rank_01"):
        open_checkpoint(run)


def test_megatron_refuses_a_file_without_arguments(tmp_path: Path) -> None:
    run = write(tmp_path, whole())
    _change(run / "iter_0000005/mp_rank_00", lambda root: root.pop("args"))
    with pytest.raises(IncompleteError, match="no arguments"):
        open_checkpoint(run)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_layers": 3}, "have 2 layers, but the arguments state 3"),
    "ffn": ({"ffn_hidden_size": 16}, "linear_fc1.weight"),
    "no gate": ({"swiglu": False}, "linear_fc1.weight"),
    "head dimension": ({"kv_channels": 4}, "linear_proj.weight"),
    "vocabulary": ({"padded_vocab_size": 32}, "word_embeddings.weight` has length 16 .* it is 32"),
    "groups": ({"num_query_groups": 3}, "4 attention heads cannot be divided into 3 query groups"),
    "a text for a number": ({"hidden_size": "8"}, "`hidden_size` is '8', not a whole number"),
    "no degree": ({"tensor_model_parallel_size": 0}, "degrees of tp 0"),
    "world": ({"world_size": 3}, "3 ranks are not divisible"),
    "interleaved gates": ({"moe_mlp_glu_interleave_size": 32}, "interleaved in blocks"),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_arguments_that_contradict_the_tensors_are_an_error(tmp_path: Path, kind: str) -> None:
    args, message = CONTRADICTIONS[kind]
    run = write(tmp_path, whole(), tp=2)
    for rank in range(2):
        _change(run / f"iter_0000005/mp_rank_0{rank}", lambda root: vars(root["args"]).update(args))
    with pytest.raises(CkptError, match=message):
        open_checkpoint(run)


def test_heads_that_do_not_divide_are_an_error(tmp_path: Path) -> None:
    """Three groups of heads over two ranks: whatever the rows are, no rank can have whole groups."""
    tensors = {
        **whole(),
        **{f"decoder.layers.{i}.self_attention.linear_qkv.weight": np.zeros((24, 8), "f4") for i in (0, 1)},
    }
    args = {"num_attention_heads": 6, "num_query_groups": 3, "kv_channels": 2, "hidden_size": 8}
    proj = {f"decoder.layers.{i}.self_attention.linear_proj.weight": np.zeros((8, 12), "f4") for i in (0, 1)}
    run = write(tmp_path, {**tensors, **proj}, tp=2, args=args)
    with pytest.raises(RulesError, match=r"3 units .* do not divide over 2 ranks"):
        open_checkpoint(run)


def test_a_parameter_without_a_rule_is_an_error_that_suggests_one(tmp_path: Path) -> None:
    tensors = {**whole(), "decoder.layers.0.adapter.down.weight": np.ones((4, 8), "f4")}
    run = write(tmp_path, tensors, tp=2)
    with pytest.raises(RulesError, match=r"`decoder\.layers\.0\.adapter\.down\.weight`") as caught:
        open_checkpoint(run)
    assert "[[rule]]" in str(caught.value.hint)
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\nmatch = '.*adapter.*'\nhow = 'replicated'\n")
    read_back = MegatronLegacy().read(run, ReadOptions(read_rules(rules)))
    assert np.array_equal(read(read_back.parameters["decoder.layers.0.adapter.down.weight"].weight), np.ones((4, 8)))


def test_rules_of_the_user_come_first_and_wrong_ones_are_an_error(tmp_path: Path) -> None:
    run = write(tmp_path, whole(), tp=2)
    plain = MegatronLegacy().read(run, ReadOptions((Rule(r".*\.linear_fc1\.weight"),)))
    halves = [cut("linear_fc1.weight", whole()["decoder.layers.0.mlp.linear_fc1.weight"], 2, rank) for rank in (0, 1)]
    assert np.array_equal(
        read(plain.parameters["decoder.layers.0.mlp.linear_fc1.weight"].weight), np.concatenate(halves)
    )
    for wrong, message in (
        (Rule(r".*\.linear_fc1\.weight", fused=("ffn", "heads")), "contradict its rule"),
        (Rule(r".*\.linear_fc1\.weight", axis=2), "cannot be concatenated along axis 2"),
        (Rule(r".*\.linear_fc1\.weight", fused=("depth",)), "needs the size `depth`"),
        (Rule(r".*\.linear_fc2\.weight", length="hidden"), "has length 16 along axis 0"),
    ):
        with pytest.raises(RulesError, match=message):
            MegatronLegacy().read(run, ReadOptions((wrong,)))


def test_a_padded_vocabulary_is_trimmed_to_the_size_that_the_user_says(tmp_path: Path) -> None:
    run = write(tmp_path, whole(), tp=2)
    checkpoint = MegatronLegacy().read(
        run, ReadOptions((Rule(".*(?:word_embeddings|output_layer).weight", vocabulary=13),))
    )
    assert checkpoint.parameters["output_layer.weight"].weight.shape == (13, 8)


def test_copies_of_a_norm_that_differ_are_found(tmp_path: Path) -> None:
    def spoiled(name: str, values: np.ndarray[Any, Any], tp: int, rank: int) -> np.ndarray[Any, Any]:
        return values + rank if name == "decoder.final_layernorm.weight" else cut(name, values, tp, rank)

    checkpoint = open_checkpoint(write(tmp_path, whole(), 2, cutting=spoiled))
    with pytest.raises(CorruptError, match="replicas of one tensor differ"):
        read(checkpoint.parameters["decoder.final_layernorm.weight"].weight)


def test_copies_of_other_shapes_or_values_are_found() -> None:
    rows, columns = (Tensor.of(ArrayBlob(np.zeros(shape, np.float32))) for shape in ((2, 3), (3, 2)))
    with pytest.raises(CorruptError, match=r"copies of `w` \(model\) have the shapes \[\[2, 3\], \[3, 2\]\]"):
        merge_copies("w", [LocalCopy({"model": rows}), LocalCopy({"model": columns})])
    with pytest.raises(CorruptError, match="ranks disagree on `step` of `w`: 3 and 4"):
        merge_copies("w", [LocalCopy({"model": rows}, {"step": 3}), LocalCopy({"model": rows}, {"step": 4})])


@pytest.mark.parametrize("numel", [64, 1 << 16])
def test_an_optimizer_of_a_smaller_or_larger_model_is_an_error(tmp_path: Path, numel: int) -> None:
    run = write(tmp_path, whole(), optimizer={"optimizer": {"param_groups": [{"wd_mult": 1.0}, {"wd_mult": 0.0}]}})
    flat = {"buckets_coalesced": True, 0: {(torch.float32, torch.float32): {"param": torch.zeros(numel)}}}
    torch.save(flat, run / "iter_0000005/mp_rank_00/distrib_optim.pt")
    with pytest.raises(CorruptError, match=f"has {numel:,} elements"):
        open_checkpoint(run)


def test_buffers_that_are_stored_by_parameter_are_refused(tmp_path: Path) -> None:
    run = write(tmp_path, whole(), optimizer={"optimizer": {"param_groups": [{"wd_mult": 1.0}, {"wd_mult": 0.0}]}})
    listed = {0: {(torch.float32, torch.float32): [{"param": torch.zeros(64)}]}}
    torch.save(listed, run / "iter_0000005/mp_rank_00/distrib_optim.pt")
    with pytest.raises(UnsupportedError, match="stored by parameter"):
        open_checkpoint(run)


def test_megatron_doubts_states_that_lie_elsewhere(tmp_path: Path) -> None:
    """A buffer of the right length whose parameters are in another order."""
    tensors = whole()
    run = write(tmp_path, tensors, optimizer={"optimizer": {"param_groups": [{"wd_mult": 1.0}, {"wd_mult": 0.0}]}})
    items = [BufferItem(name, values.shape) for name, values in tensors.items()]
    places = fill(items, None, 64).flat()
    buffer = np.zeros(sum(fill(items, None, 64).buckets), np.float32)
    for name, values in tensors.items():
        buffer[places[name] : places[name] + values.size] = values.reshape(-1)
    for shift, doubted in ((0, False), (64, True)):
        states = {"param": torch.from_numpy(np.roll(buffer, shift).copy()), "numel_unpadded": len(buffer)}
        torch.save({0: {(torch.float32, torch.float32): states}}, run / "iter_0000005/mp_rank_00/distrib_optim.pt")
        assert bool(open_checkpoint(run).suspicions) == doubted


@pytest.mark.parametrize("padding", [0, 37])
@pytest.mark.parametrize("alignment", [64, 1])
def test_buckets_of_older_releases_are_read_by_their_lengths(tmp_path: Path, padding: int, alignment: int) -> None:
    """Before 2024-04 each bucket had a vector of its own; before 2024-02 with its padding."""
    tensors = whole()
    args = {"overlap_grad_reduce": True, "ddp_bucket_size": 200}
    groups = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
    run = write(tmp_path, tensors, args=args, optimizer={"optimizer": {"param_groups": groups}})
    items = [BufferItem(name, values.shape) for name, values in tensors.items()]
    filled = fill(items, 200, alignment)
    assert len(filled.buckets) > 2
    vectors = [np.full(length + padding, -1, np.float32) for length in filled.buckets]
    for name, values in tensors.items():
        place = filled.places[name]
        vectors[place.bucket][place.start : place.start + values.size] = values.reshape(-1)
    states = {"param": [torch.from_numpy(vector) for vector in vectors]}
    torch.save({0: {torch.float32: states}}, run / "iter_0000005/mp_rank_00/distrib_optim.pt")
    checkpoint = open_checkpoint(run)
    assert checkpoint.suspicions == ()
    for name, values in tensors.items():
        assert np.array_equal(read(checkpoint.parameters[name].states["master"]), values)


def test_megatron_splits_experts_in_one_tensor(tmp_path: Path) -> None:
    """`weight1` is [hidden, experts * ffn] by its shape, but [expert, hidden, ffn] in memory."""
    experts = np.arange(2 * 24 * 8, dtype=np.float32).reshape(2, 24, 8)
    down = np.arange(2 * 8 * 12, dtype=np.float32).reshape(2, 8, 12)
    joined = {
        "decoder.layers.0.mlp.experts.weight1": experts.transpose(0, 2, 1).reshape(8, 48),
        "decoder.layers.0.mlp.experts.weight2": down.transpose(0, 2, 1).reshape(24, 8),
    }
    run = write(tmp_path, {**whole(), **joined}, args={"num_experts": 2, "moe_ffn_hidden_size": 12})
    parameters = open_checkpoint(run).parameters
    for i in range(2):
        prefix = f"decoder.layers.0.mlp.experts.local_experts.{i}"
        assert np.array_equal(read(parameters[f"{prefix}.linear_fc1.weight"].weight), experts[i])
        assert np.array_equal(read(parameters[f"{prefix}.linear_fc2.weight"].weight), down[i])


def test_megatron_restores_states_that_were_flattened_by_shard(tmp_path: Path) -> None:
    """Up to core 0.14: [shards along each axis, elements], each shard cut anywhere by data-parallel ranks."""
    values = array(DTYPES["float32"], (2, 8, 6))
    fragments = []
    for i in range(2):
        for j in range(4):
            shard = values[i, 2 * j : 2 * j + 2].reshape(-1)
            for start, stop in ((0, 5), (5, 12)):
                box = Box((i, j, 0, start), (i + 1, j + 1, 1, stop))
                fragments.append(Fragment(box, ArrayBlob(shard[start:stop].reshape(1, 1, 1, -1))))
    flat = Tensor((2, 4, 1, 12), DTYPES["float32"], tuple(fragments))
    restored = unflattened("w", flat, (2, 8, 6))
    assert list(restored.problems()) == []
    assert read(restored).tobytes() == values.tobytes()
    with pytest.raises(CorruptError, match=r"`w` has shape \[2, 4, 1, 12\]"):
        unflattened("w", flat, (2, 8, 7))
    holed = Tensor(flat.shape, flat.dtype, flat.fragments[1:])
    assert any("no file holds" in flaw for flaw in unflattened("w", holed, (2, 8, 6)).problems())


def test_pieces_of_a_tensor_are_joined_and_a_missing_one_is_named() -> None:
    rows = {
        piece: array(DTYPES["float32"], (n, 4), n) for piece, n in (("z", 6), ("x", 6), ("B", 2), ("C", 2), ("dt", 3))
    }
    key = "decoder.layers.1.mixer.in_proj.weight"
    tensors = tensors_by_name({f"{key}.{piece}": tensor(values) for piece, values in reversed(rows.items())})
    assert read(tensors[key]).tobytes() == np.concatenate(list(rows.values())).tobytes()
    with pytest.raises(CorruptError, match="of which only _w are present"):
        tensors_by_name({"decoder.layers.0.mlp.linear_fc1.weight_w": tensor(rows["z"])})


def test_a_stack_is_taken_apart_by_layer_and_expert() -> None:
    values = array(DTYPES["bfloat16"], (2, 3, 4, 5))
    tensors = tensors_by_name({"decoder.layers.mlp.experts.experts.linear_fc1.weight": tensor(values)})
    assert {name: read(one).tobytes() for name, one in tensors.items()} == {
        f"decoder.layers.{i}.mlp.experts.local_experts.{j}.linear_fc1.weight": values[i, j].tobytes()
        for i in range(2)
        for j in range(3)
    }
    with pytest.raises(UnsafeError, match="stack of"):
        tensors_by_name({"decoder.layers.x.weight": Tensor((1 << 40, 4), DTYPES["float32"], ())})


def test_megatron_reads_names_of_all_implementations_as_one() -> None:
    naming = Naming(first_layer=10, first_expert=4, experts=4)
    plain_names = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.10.input_layernorm.weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_bias": "decoder.layers.11.pre_mlp_layernorm.bias",
        "decoder.layers.0.mlp.experts.linear_fc1.weight3": (
            "decoder.layers.10.mlp.experts.local_experts.7.linear_fc1.weight"
        ),
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.bias": (
            "decoder.layers.10.mlp.experts.local_experts.5.linear_fc2.bias"
        ),
        "language_model.encoder.layers.2.self_attention.dense.weight": (
            "language_model.encoder.layers.12.self_attention.dense.weight"
        ),
        "output_layer.weight": "output_layer.weight",
    }
    assert {name: naming.plain(name) for name in plain_names} == plain_names


def test_nested_names_of_before_megatron_core_are_read(tmp_path: Path) -> None:
    inner = {"word_embeddings": {"weight": torch.ones(16, 8)}}
    layers = {"layers.0.self_attention.query_key_value.weight": torch.ones(16, 8), "final_norm.weight": torch.ones(8)}
    run = write(tmp_path, {}, args={"num_layers": 1})
    model = {"language_model": {"embedding": inner, "encoder": layers}}
    _change(run / "iter_0000005/mp_rank_00", lambda root: root.update(model=model))
    assert list(open_checkpoint(run).parameters) == [
        "language_model.embedding.word_embeddings.weight",
        "language_model.encoder.layers.0.self_attention.query_key_value.weight",
        "language_model.encoder.final_norm.weight",
    ]


def test_before_version_one_each_rank_held_q_k_and_v_as_three_pieces(tmp_path: Path) -> None:
    name = "language_model.encoder.layers.0.self_attention.query_key_value.weight"
    values = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)
    args = {"num_layers": 1, "group_query_attention": False}

    def pieces(_: str, values: np.ndarray[Any, Any], tp: int, rank: int) -> np.ndarray[Any, Any]:
        return np.concatenate([np.split(piece, tp)[rank] for piece in np.split(values, 3)])

    def plain(_: str, values: np.ndarray[Any, Any], tp: int, rank: int) -> np.ndarray[Any, Any]:
        return np.split(values, tp)[rank]

    for version, cutting in ((0, pieces), (1.0, plain), (3.0, plain)):
        run = write(tmp_path / str(version), {name: values}, 2, args, cutting, checkpoint_version=version)
        assert np.array_equal(read(open_checkpoint(run).parameters[name].weight), values), version


@pytest.mark.parametrize("fused", [9, torch.tensor(9), None], ids=["number", "tensor", "not"])
def test_the_step_is_each_parameters_wherever_the_optimizer_keeps_it(tmp_path: Path, fused: object) -> None:
    tensors = whole()
    decayed = [name for name, values in tensors.items() if values.ndim > 1]
    rest = [name for name in tensors if name not in decayed]
    step = {"step": torch.tensor(9.0)} if fused is None else {}
    state = {i: {"exp_avg": torch.from_numpy(tensors[name] + 1), **step} for i, name in enumerate((*decayed, *rest))}
    groups = [
        {"wd_mult": wd, "params": list(numbers), **({} if fused is None else {"step": deepcopy(fused)})}
        for wd, numbers in ((1.0, range(len(decayed))), (0.0, range(len(decayed), len(tensors))))
    ]
    checkpoint = open_checkpoint(write(tmp_path, tensors, optimizer={"state": state, "param_groups": groups}))
    for name, values in tensors.items():
        parameter = checkpoint.parameters[name]
        assert np.array_equal(read(parameter.states["exp_avg"]), values + 1)
        assert (parameter.values["step"] if isinstance(fused, int) else read(parameter.states["step"])) == 9
    assert [len(group.names) for group in checkpoint.groups] == [len(decayed), len(rest)]


def test_stages_have_the_layers_that_megatron_gives_them() -> None:
    assert even_stages(8, 2).counts == (4, 4)
    interleaved = even_stages(8, 2, 2)
    assert [list(interleaved.layers(p, v)) for p in (0, 1) for v in (0, 1)] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert even_stages(6, 2, embedding=True, loss=True).counts == (3, 3)
    assert even_stages(7, 4, embedding=True).counts == (1, 2, 2, 2)
    assert uneven_stages(10, 4, 1, 1, 3).counts == (1, 3, 3, 3)
    assert list(uneven_stages(8, 2, 2, 2, None).layers(1, 0)) == [1, 2, 3]
    assert from_layout_string("Et*3|(tt|)*2,m|L", 5).counts == (3, 2, 2, 0, 0)
    assert from_layout_string([["embedding", "decoder"], ["decoder", "decoder", "loss"]], 2).counts == (1, 2)


@pytest.mark.parametrize("pp", [0, 2])
def test_a_layout_of_chunks_that_stages_cannot_share_is_an_error(pp: int) -> None:
    with pytest.raises(UnsupportedError, match=f"layout of 3 chunks cannot be divided over {pp} stages"):
        from_layout_string("Et|t|tL", pp)


@pytest.mark.parametrize("layout", ["Et|(t", "E t#3|L", "t*99999999999|L", "((t*1000000))*1000000|t"])
def test_a_layout_that_is_not_understood_is_an_error(layout: str) -> None:
    with pytest.raises(UnsupportedError):
        from_layout_string(layout, 2)


@pytest.mark.parametrize(
    "work", [lambda: even_stages(7, 2), lambda: uneven_stages(7, 3, 1, 2, 2) and uneven_stages(8, 3, 1, 9, None)]
)
def test_layers_that_do_not_divide_are_an_error(work: Any) -> None:
    with pytest.raises(UnsupportedError, match="divide"):
        work()


def test_a_buffer_is_laid_out_as_megatron_lays_it() -> None:
    """In reverse, each at a multiple of 64; a table that is shared has a bucket of its own."""
    items = [
        BufferItem("table", (10, 3), True),
        BufferItem("a", (100,)),
        BufferItem("b", (7,)),
        BufferItem("c", (130,)),
    ]
    one = fill(items, None, 64)
    assert {name: (place.bucket, place.start) for name, place in one.places.items()} == {
        "c": (0, 0),
        "b": (0, 192),
        "a": (0, 256),
        "table": (1, 0),
    }
    assert one.buckets == (384, 30)
    assert fit(items, one.buckets, 64) == one
    assert fill(items, 120, 64).buckets == (130, 164, 30)
    assert fit(items, (384, 29), 64) is None
    assert fit(items, (384, 30, 30), 64) is None


def test_the_command_line_says_which_rule_each_parameter_got(tmp_path: Path) -> None:
    run = write(tmp_path / "run", whole(), tp=2)
    text = CliRunner().invoke(cli, ["rules", str(run)])
    assert text.exit_code == 0
    assert "decoder.layers.*.self_attention.linear_qkv.weight (2)\n    sharded along axis 0, 2 units\n" in text.output
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\nmatch = 'output_layer.weight'\nvocabulary = 13\n")
    report = json.loads(CliRunner().invoke(cli, ["rules", str(run), "--rules", str(rules), "--json"]).output)
    by_name = {one["name"]: one for one in report["parameters"]}
    assert report["sizes"]["qkv_rows"] == 16
    assert by_name["output_layer.weight"]["rule"] == {
        "how": "sharded along axis 0, 13 true rows",
        "match": "output_layer.weight",
        "origin": f"{rules}, rule 1",
    }
    assert by_name["decoder.final_layernorm.weight"]["rule"]["origin"].startswith("set megatron-core")
    assert by_name.keys() == whole().keys()


def test_rules_are_known_in_other_formats_too(tmp_path: Path) -> None:
    """The arguments come along, so a converted model is cut as before."""
    run = write(tmp_path / "run", whole(), tp=2)
    result = CliRunner().invoke(cli, ["convert", str(run), str(tmp_path / "universal")])
    assert result.exit_code == 0, result.output
    before, after = (
        json.loads(CliRunner().invoke(cli, ["rules", str(path), "--json"]).output)["parameters"]
        for path in (run, tmp_path / "universal")
    )
    assert sorted(before, key=str) == sorted(after, key=str)


def test_a_shifted_optimizer_is_refused_but_its_weights_are_not(tmp_path: Path) -> None:
    run = write(
        tmp_path / "run", whole(), optimizer={"optimizer": {"param_groups": [{"wd_mult": 1.0}, {"wd_mult": 0.0}]}}
    )
    items = [BufferItem(name, values.shape) for name, values in whole().items()]
    states = {"param": torch.zeros(sum(fill(items, None, 64).buckets))}
    torch.save(
        {0: {torch.float32: states}, "buckets_coalesced": True}, run / "iter_0000005/mp_rank_00/distrib_optim.pt"
    )
    verified = CliRunner().invoke(cli, ["verify", str(run)])
    assert verified.exit_code == 20
    assert "suspicious: the optimizer's masters of 15 of 15 parameters" in verified.output
    refused = CliRunner().invoke(cli, ["convert", str(run), str(tmp_path / "universal")])
    assert isinstance(refused.exception, CorruptError)
    assert not (tmp_path / "universal").exists()
    weights = CliRunner().invoke(cli, ["convert", str(run), str(tmp_path / "universal"), "--model-only"])
    assert weights.exit_code == 0, weights.output
    accepted = CliRunner().invoke(cli, ["convert", str(run), str(tmp_path / "accepted"), "--accept-suspicious"])
    assert accepted.exit_code == 0, accepted.output
    assert "the optimizer's masters of 15 of 15 parameters" in accepted.stderr
    masters = {p.name: read(p.states["master"]) for p in open_checkpoint(tmp_path / "accepted").parameters.values()}
    assert len(masters) == 15
    assert not any(master.any() for master in masters.values())


def _change(folder: Path, change: Any) -> None:
    file = folder / "model_optim_rng.pt"
    root = torch.load(file, weights_only=False)
    assert isinstance(root["args"], argparse.Namespace)
    change(root)
    torch.save(root, file)


@pytest.mark.parametrize(
    ("name", "rows", "split"),
    [("q", 6, True), ("q", 12, False), ("kv", 10, True), ("kv", 20, False), ("kv", 5, None)],
)
def test_stored_shapes_tell_whether_ranks_split_down_projections(name: str, rows: int, split: bool | None) -> None:
    sizes = {"q_rank": 12, "kv_rank": 17, "rope_dim": 3}
    shapes = [(f"decoder.layers.1.self_attention.linear_{name}_down_proj.weight", (rows, 32))]
    assert with_stored_sizes(sizes, shapes, tp=2).get("cut_down_proj") == (None if split is None else int(split))


def test_shared_experts_have_the_width_of_their_tensors_unless_it_is_stated() -> None:
    shapes = [("mtp.layers.0.transformer_layer.mlp.shared_experts.linear_fc2.weight", (32, 14))]
    assert with_stored_sizes({}, shapes, tp=3)["shared_ffn"] == 42
    assert with_stored_sizes({"shared_ffn": 40}, shapes, tp=3)["shared_ffn"] == 40


def test_latent_attention_of_transformer_engine_has_norms_inside_up_projections() -> None:
    layer = "decoder.layers.0"
    saved = ["linear_q_down_proj.weight", "linear_q_up_proj.layer_norm_weight", "linear_q_up_proj.weight"]
    saved += ["linear_kv_down_proj.weight", "linear_kv_up_proj.layer_norm_weight", "linear_kv_up_proj.weight"]
    names = [Naming().plain(f"{layer}.self_attention.{name}") for name in saved]
    assert names[1::3] == [f"{layer}.self_attention.{name}_layernorm.weight" for name in ("q", "kv")]
    norm, prediction = f"{layer}.input_layernorm.weight", ["mtp.layers.0.eh_proj.weight"]
    order = ModuleOrder(fused_norms=True, latent=True)
    assert order.ordered(sorted([*names, norm, *prediction])) == [norm, *names, *prediction]
