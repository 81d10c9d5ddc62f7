"""One rule both splits and merges: what is cut by it comes together again, whatever the axis, pieces and ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError, RulesError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.layout import Layout, Partitioning, Rule, ShardBlock, lengths, merge, place, split
from ckpt_formats.core.rules import rule_set
from ckpt_formats.core.tensor import Array, Tensor, c_strides, read
from ckpt_formats.core.transfer import Transfer
from held import array, bits, lay, tensor

RANKS = [1, 2, 3, 4]
UNIT = 12
"""Divisible by every number of ranks and of pieces."""
FUSED: list[int | tuple[int, ...]] = [1, 2, 3, (12, 24), (24, 12, 12), (12, 0, 36)]


def by_hand(values: Array, rule: Rule, table: Sequence[Sequence[int]], ranks: int) -> list[Tensor]:
    """Each rank's shard of a whole array."""
    shards = []
    for rank in range(ranks):
        shape = (*values.shape[: rule.axis], sum(row[rank] for row in table), *values.shape[rule.axis + 1 :])
        shard = np.zeros(shape, values.dtype)
        for placed in place(values.shape, rule.axis, table, rank):
            shard[placed.shard.index] = values[placed.full.index]
        shards.append(tensor(shard))
    return shards


def whole_shape(axes: int, axis: int, length: int) -> tuple[int, ...]:
    return (*(2 + i for i in range(axis)), length, *(2 + i for i in range(axis + 1, axes)))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("fused", FUSED, ids=str)
@pytest.mark.parametrize(("axes", "axis"), [(axes, axis) for axes in (1, 2, 3) for axis in range(axes)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_undoes_splitting(ranks: int, fused: int | tuple[int, ...], axes: int, axis: int, dtype: str) -> None:
    length = fused * UNIT if isinstance(fused, int) else sum(fused)
    values = array(DTYPES[dtype], whole_shape(axes, axis, length))
    rule = Rule(".*", axis=axis, fused=fused)
    table = lengths("w", rule, [length // ranks] * ranks)
    shards = by_hand(values, rule, table, ranks)
    merged = merge("w", shards, rule)
    assert list(merged.problems()) == []
    assert bits(read(merged)) == bits(values)
    for ours, shard in zip(split("w", tensor(values), rule, ranks), shards, strict=True):
        assert list(ours.problems()) == []
        assert bits(read(ours)) == bits(read(shard))
    pieces = [UNIT] * fused if isinstance(fused, int) else list(fused)
    assert [sum(row) for row in table] == pieces
    at = 0
    for piece in pieces:  # each rank holds its own part of every piece, the pieces in order
        parts = np.split(np.take(values, range(at, at + piece), axis), ranks, axis)
        low = at // ranks
        for shard, part in zip(shards, parts, strict=True):
            held = np.take(read(shard), range(low, low + piece // ranks), axis)
            assert bits(held) == bits(part)
        at += piece


@given(st.data())
def test_merging_undoes_splitting_of_ranks_that_differ(data: st.DataObject) -> None:
    """Widths name the length of every piece on every rank: grouped heads that do not divide, say."""
    ranks, pieces = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    widths = tuple(tuple(data.draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))) for _ in range(pieces))
    axes = data.draw(st.integers(1, 3))
    axis = data.draw(st.integers(0, axes - 1))
    values = array(DTYPES["float16"], whole_shape(axes, axis, sum(map(sum, widths))))
    rule = Rule(".*", axis=axis, fused=pieces, widths=widths)
    local = [sum(row[rank] for row in widths) for rank in range(ranks)]
    assert lengths("w", rule, local) == [list(row) for row in widths]
    merged = merge("w", by_hand(values, rule, widths, ranks), rule)
    assert list(merged.problems()) == []
    assert bits(read(merged)) == bits(values)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rows", [1, 10, 11, 12])
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_that_pad_a_vocabulary_are_dropped(ranks: int, rows: int, axis: int) -> None:
    padded = np.zeros((12, 12), np.float32)
    padded[:rows] = array(DTYPES["float32"], (rows, 12))
    rule = Rule(".*", axis=axis, vocabulary=rows)
    merged = merge("w", by_hand(padded, rule, lengths("w", rule, [12 // ranks] * ranks), ranks), rule)
    assert list(merged.problems()) == []
    assert bits(read(merged)) == bits(padded[:rows])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rows", [None, 12, 24])
@pytest.mark.parametrize("how", ["sharded", "replicated"])
@pytest.mark.parametrize("axis", [0, 1])
def test_splitting_pads_a_vocabulary_with_zeros_that_merging_drops(
    ranks: int, rows: int | None, how: Partitioning, axis: int
) -> None:
    values = array(DTYPES["bfloat16"], (11, 12))
    rule = Rule(".*", how, axis, vocabulary=11)
    shards = split("w", tensor(values), rule, ranks, rows)
    merged = merge("w", shards, rule)
    assert [list(part.problems()) for part in (*shards, merged)] == [[]] * (ranks + 1)
    assert bits(read(merged)) == bits(values)
    padded = merge("w", shards, replace(rule, vocabulary=None))
    assert padded.shape[0] >= (rows or 11)
    assert not read(padded)[11:].view(np.uint8).any()


def test_axis_that_does_not_divide_is_not_split() -> None:
    for rule, shape in (
        (Rule(".*"), (7, 2)),
        (Rule(".*", axis=2), (4, 2)),
        (Rule(".*", fused=3), (8, 2)),
        (Rule(".*", fused=(3, 5)), (8, 2)),
        (Rule(".*", fused=(2, 2)), (8, 2)),
        (Rule(".*", "blocks", shape=(8, 2), blocks=((),)), (8, 2)),
    ):
        with pytest.raises(RulesError, match=r"`layer\.w`"):
            split("layer.w", tensor(np.zeros(shape, np.float32)), rule, 2)


def test_a_table_smaller_than_its_vocabulary_is_an_error() -> None:
    with pytest.raises(RulesError, match="has 8 rows, fewer than its vocabulary of 9"):
        merge("w", [tensor(np.zeros((4, 2)))] * 2, Rule(".*", vocabulary=9))


def test_replicas_that_agree_are_one_tensor_and_those_that_do_not_name_both_files(tmp_path: Path) -> None:
    values = array(DTYPES["float32"], (4, 3))
    other = values.copy()
    other[3, 2] = 0.25
    files = [
        Tensor.of(lay(tmp_path / f"rank{i}", one, 0, c_strides((4, 3), 4)))
        for i, one in enumerate([values, values, other])
    ]
    rule = Rule(".*", "replicated")
    agreed = merge("w", files[:2], rule)
    assert list(agreed.problems()) == []
    with Reader() as reader:
        assert b"".join(map(bytes, Transfer(reader).chunks(agreed))) == values.tobytes()
    with Reader() as reader, pytest.raises(CorruptError, match=r"rank0 against .*rank2"):
        list(Transfer(reader).chunks(merge("w", files, rule)))


def test_the_first_copy_counts_where_a_rule_says_so() -> None:
    copies = [array(DTYPES["bfloat16"], (3, 2), seed) for seed in range(3)]
    merged = merge("w", list(map(tensor, copies)), Rule(".*", "first"))
    with Reader() as reader:
        assert b"".join(map(bytes, Transfer(reader).chunks(merged))) == copies[0].tobytes()


@pytest.mark.parametrize("ranks", RANKS)
def test_the_mean_counts_where_a_rule_says_so(ranks: int) -> None:
    copies = [np.arange(6, dtype=np.float64).reshape(2, 3) * (i + 1) for i in range(ranks)]
    merged = merge("w", list(map(tensor, copies)), Rule(".*", "averaged"))
    assert np.array_equal(read(merged), np.mean(copies, axis=0))


def test_blocks_say_for_themselves_where_they_belong() -> None:
    """Rank 1 holds the corner, rank 0 the rest, its rows in reverse."""
    values = array(DTYPES["float32"], (4, 3))
    first = np.zeros((4, 3), np.float32)
    first[0], first[1], first[2, :2] = values[1], values[0], values[2, :2]
    first[3, :2] = values[3, :2]
    second = values[2:, 2:]
    blocks = (
        (
            ShardBlock(Box((0, 0), (1, 3)), Box((1, 0), (2, 3))),
            ShardBlock(Box((1, 0), (2, 3)), Box((0, 0), (1, 3))),
            ShardBlock(Box((2, 0), (4, 2)), Box((2, 0), (4, 2))),
        ),
        (ShardBlock(Box((0, 0), (2, 1)), Box((2, 2), (4, 3))),),
    )
    rule = Rule(".*", "blocks", shape=(4, 3), blocks=blocks)
    merged = merge("w", [tensor(first), tensor(second)], rule)
    assert list(merged.problems()) == []
    assert bits(read(merged)) == bits(values)
    fewer = replace(rule, blocks=(blocks[0], ()))
    assert "no file holds block [2:4, 2:3]" in " ".join(merge("w", [tensor(first), tensor(second)], fewer).problems())


@pytest.mark.parametrize("how", ["sharded", "replicated", "averaged", "first"])
def test_a_gap_in_a_shard_is_a_flaw_of_the_whole(how: Partitioning) -> None:
    holed = replace(tensor(np.zeros((4, 3), np.float32)).crop(Box((0, 0), (3, 3))), shape=(4, 3))
    merged = merge("w", [holed, tensor(np.zeros((4, 3), np.float32))], Rule(".*", how))
    assert any("no file holds block [3:4, 0:3]" in flaw for flaw in merged.problems())


CONTRADICTIONS = {
    "axis beyond the shape": (Rule(".*", axis=2), [(4, 2), (4, 2)]),
    "scalar": (Rule(".*"), [(), ()]),
    "other lengths differ": (Rule(".*", axis=0), [(4, 2), (4, 3)]),
    "other number of axes": (Rule(".*", axis=0), [(4, 2), (4,)]),
    "an axis less": (Rule(".*", axis=1), [(4, 2), (4,)]),
    "pieces do not divide": (Rule(".*", fused=3), [(4, 2), (4, 2)]),
    "sizes do not sum": (Rule(".*", fused=(4, 2)), [(4, 2), (4, 2)]),
    "sizes do not divide": (Rule(".*", fused=(5, 3)), [(4, 2), (4, 2)]),
    "sizes of equal ranks": (Rule(".*", fused=(4, 4)), [(3, 2), (5, 2)]),
    "widths of other ranks": (Rule(".*", widths=((4, 2, 2),)), [(4, 2), (4, 2)]),
    "widths of other lengths": (Rule(".*", widths=((3, 5),)), [(4, 2), (4, 2)]),
    "replicas of two shapes": (Rule(".*", "replicated"), [(4, 2), (2, 4)]),
    "mean of two shapes": (Rule(".*", "averaged"), [(4, 2), (2, 4)]),
    "first of two shapes": (Rule(".*", "first"), [(4, 2), (2, 4)]),
    "blocks of other ranks": (Rule(".*", "blocks", shape=(8, 2), blocks=((),)), [(4, 2), (4, 2)]),
}


@pytest.mark.quick(100)
@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_shapes_that_contradict_a_rule_are_an_error_that_names_the_tensor(kind: str) -> None:
    rule, shapes = CONTRADICTIONS[kind]
    with pytest.raises(RulesError, match=r"`layer\.w`"):
        merge("layer.w", [tensor(np.zeros(shape, np.float32)) for shape in shapes], rule)


def test_shards_of_two_types_are_a_flaw() -> None:
    merged = merge("w", [tensor(np.zeros(2, np.float32)), tensor(np.zeros(2, np.float16))], Rule(".*"))
    assert any("holds float16" in flaw for flaw in merged.problems())


def test_the_first_rule_that_matches_the_whole_name_counts() -> None:
    layout = Layout((Rule(r"a\.\d+", axis=1), Rule(r"a\..*", "replicated"), Rule("b", "first")))
    assert layout.rule("a.5").axis == 1
    assert layout.rule("a.5.b").how == "replicated"
    assert layout.rule("b").how == "first"
    with pytest.raises(RulesError, match="`bb`") as caught:
        layout.rule("bb")
    assert "[[rule]]" in str(caught.value.hint)


def test_a_vocabulary_may_be_said_by_another_rule_than_the_cut() -> None:
    layout = Layout((Rule("embed", axis=1), Rule(".*", vocabulary=5)))
    assert layout.rule("embed") == Rule("embed", axis=1, vocabulary=5)
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    merged = merge("embed", [tensor(values[:, :2]), tensor(values[:, 2:])], layout.rule("embed"))
    assert np.array_equal(read(merged), values[:5])


def test_replicas_of_shards_are_compared_after_merging_too(tmp_path: Path) -> None:
    values = array(DTYPES["float32"], (4, 3))
    other = values.copy()
    other[3, 2] = 0.25
    whole = [Tensor.of(lay(tmp_path / n, v, 0, (12, 4))) for n, v in (("ours", values), ("theirs", other))]
    shards = [replace(whole[0].crop(half), replicas=(whole[1].crop(half),)) for half in map(_half, (0, 1))]
    with pytest.raises(CorruptError, match=r"ours against .*theirs"):
        read(merge("w", shards, Rule(".*")))
    same = [replace(shard, replicas=(shard, shard)) for shard in shards[:1]] + [replace(shards[1], replicas=())]
    merged = merge("w", same, Rule(".*"))
    assert list(merged.problems()) == []
    assert bits(read(merged)) == bits(values)


def _half(rank: int) -> Box:
    return Box((2 * rank, 0), (2 * rank + 2, 3))


SIZES = {
    "hidden": 24,
    "ffn": 48,
    "gated": 1,
    "latent": 0,
    "qkv_pieces": 0,
    "cut_down_proj": 1,
    "heads": 24,
    "groups": 12,
    "head_dim": 2,
    "qkv_rows": 96,
    "attention_out": 48,
    "vocab_rows": 36,
    "expert_ffn": 24,
    "shared_ffn": 12,
    "mamba_inner": 48,
    "mamba_state": 24,
    "mamba_heads": 12,
    "delta_keys": 24,
    "delta_values": 36,
    "delta_heads": 12,
    "q_rank": 12,
    "kv_rank": 24,
    "rope_dim": 12,
}
SHAPES_BY_SET: dict[str, dict[str, tuple[int, ...]]] = {
    "megatron-core": {
        "embedding.word_embeddings.weight": (36, 24),
        "embedding.position_embeddings.weight": (7, 24),
        "decoder.layers.0.input_layernorm.weight": (24,),
        "decoder.layers.0.self_attention.linear_qkv.weight": (96, 24),
        "decoder.layers.0.self_attention.linear_qkv.bias": (96,),
        "decoder.layers.0.self_attention.linear_proj.weight": (24, 48),
        "decoder.layers.0.self_attention.linear_proj.bias": (24,),
        "decoder.layers.0.mlp.linear_fc1.weight": (96, 24),
        "decoder.layers.0.mlp.linear_fc1.bias": (96,),
        "decoder.layers.0.mlp.linear_fc2.weight": (24, 48),
        "mtp.layers.0.eh_proj.weight": (24, 48),
        "output_layer.weight": (36, 24),
    },
    "megatron-moe": {
        "decoder.layers.0.mlp.router.weight": (8, 24),
        "decoder.layers.0.mlp.experts.local_experts.7.linear_fc1.weight": (48, 24),
        "decoder.layers.0.mlp.experts.local_experts.7.linear_fc2.weight": (24, 24),
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight": (24, 24),
        "decoder.layers.0.mlp.shared_experts.gate_weight": (1, 24),
    },
    "megatron-mla": {
        "decoder.layers.0.self_attention.linear_q_up_proj.weight": (72, 12),
        "decoder.layers.0.self_attention.linear_q_down_proj.weight": (12, 24),
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight": (36, 24),
    },
    "megatron-mamba": {
        "decoder.layers.0.mixer.in_proj.weight": (156, 24),
        "decoder.layers.0.mixer.conv1d.weight": (96, 1, 4),
        "decoder.layers.0.mixer.conv1d.bias": (96,),
        "decoder.layers.0.mixer.A_log": (12,),
        "decoder.layers.0.mixer.norm.weight": (48,),
        "decoder.layers.0.mixer.out_proj.weight": (24, 48),
        "decoder.layers.0.self_attention.in_proj.weight": (144, 24),
    },
    "megatron-legacy": {
        "language_model.encoder.layers.0.self_attention.query_key_value.weight": (96, 24),
        "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight": (96, 24),
        "language_model.encoder.layers.0.mlp.dense_4h_to_h.weight": (24, 48),
    },
    "megatron-deepspeed": {
        "3.self_attention.query_key_value.weight": (96, 24),
        "3.self_attention.dense.weight": (24, 48),
        "tied_modules.embed.word_embeddings.weight": (36, 24),
        "3.input_layernorm.weight": (24,),
    },
    "hf-llama": {
        "model.embed_tokens.weight": (36, 24),
        "model.layers.0.self_attn.q_proj.weight": (48, 24),
        "model.layers.0.self_attn.o_proj.weight": (24, 48),
        "model.layers.0.mlp.gate_proj.weight": (48, 24),
        "model.layers.0.block_sparse_moe.experts.3.w2.weight": (24, 48),
        "model.norm.weight": (24,),
    },
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("named", SHAPES_BY_SET)
def test_models_of_every_family_come_back_from_any_number_of_ranks(named: str, ranks: int) -> None:
    layout = Layout(rule_set(named), SIZES)
    for name, shape in SHAPES_BY_SET[named].items():
        values = array(DTYPES["bfloat16"], shape)
        rule = layout.rule(name)
        shards = split(name, tensor(values), rule, ranks)
        assert [list(shard.problems()) for shard in shards] == [[]] * ranks
        assert bits(read(merge(name, shards, rule))) == bits(values), name
        if rule.how == "sharded" and ranks > 1:
            assert all(shard.size == values.size // ranks for shard in shards), name


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=3))
def test_values_of_each_rank_are_stacked_and_handed_out_again(ranks: int, shape: list[int]) -> None:
    rule = Rule(".*", "unique")
    shards = [array(DTYPES["float32"], tuple(shape), seed) for seed in range(ranks)]
    whole = merge("rng", list(map(tensor, shards)), rule)
    assert list(whole.problems()) == []
    assert bits(read(whole)) == bits(np.stack(shards))
    for ours, shard in zip(split("rng", whole, rule, ranks), shards, strict=True):
        assert list(ours.problems()) == []
        assert bits(read(ours)) == bits(shard)
    with pytest.raises(RulesError, match="`rng`"):
        split("rng", whole, rule, ranks + 1)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rows", [None, 12, 24])
def test_a_table_whose_true_rows_nobody_knows_keeps_them_all(ranks: int, rows: int | None) -> None:
    values = array(DTYPES["bfloat16"], (11, 12))
    rule = Rule(".*", padded=True, length=11)
    merged = merge("w", split("w", tensor(values), rule, ranks, rows), replace(rule, length=None))
    assert bits(read(merged)[:11]) == bits(values)
    assert merged.shape[0] % ranks == 0
    assert merged.shape[0] >= (rows or 11)
    assert not read(merged)[11:].view(np.uint8).any()


def test_units_are_never_cut() -> None:
    rule = Rule(".*", units=3)
    with pytest.raises(RulesError, match=r"3 units .* over 2 ranks"):
        split("w", tensor(np.zeros((12, 2))), rule, 2)
    with pytest.raises(RulesError, match="3 units"):
        merge("w", [tensor(np.zeros((5, 2)))], rule)
    for ranks in (1, 3, 6):  # more ranks than units share one out
        whole = merge("w", split("w", tensor(np.zeros((12, 2))), rule, ranks), rule)
        assert whole.shape == (12, 2)


def test_a_rule_counts_only_where_the_model_has_what_it_is_for() -> None:
    rules = (Rule("w", when="gated", fused=("ffn", "ffn")), Rule("w", length="ffn"))
    assert Layout(rules, {"gated": 1, "ffn": 4}).rule("w").fused == (4, 4)
    assert Layout(rules, {"gated": 0, "ffn": 4}).rule("w").length == 4
    with pytest.raises(RulesError, match=r"needs the size `gated`.*states none"):
        Layout(rules).rule("w")
    with pytest.raises(RulesError, match=r"needs the size `ffn`.*known are gated"):
        Layout(rules, {"gated": 1}).rule("w")
    with pytest.raises(RulesError, match="has formulas"):
        merge("w", [tensor(np.zeros((8, 2)))] * 2, rules[0])


def test_a_whole_tensor_is_as_long_as_the_models_sizes_say() -> None:
    layout = Layout((Rule("w", axis=1, length="ffn"),), {"ffn": 4})
    layout.check("w", (3, 4))
    layout.check("of no rule", (3, 5))
    with pytest.raises(RulesError, match=r"`w` has length 5 along axis 1, but .* is 4"):
        layout.check("w", (3, 5))
