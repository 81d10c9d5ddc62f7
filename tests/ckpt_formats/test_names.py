"""Tables of names, and the transforms they speak of, against plain NumPy."""

import re
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Array, ArrayBlob, Tensor, read
from ckpt_formats.core.views import split_stack
from ckpt_formats.names.tables import parse, table_for, tables
from ckpt_formats.names.transforms import TRANSFORMS, ModelSizes
from held import boxes, shapes

SIZES = ModelSizes(heads=6, groups=2, vocabulary=10, padded_vocabulary=16)
WIDTH = 4


def values(*shape: int) -> Array:
    return np.random.default_rng(list(shape)).integers(0, 1 << 30, shape).astype(np.int32)


def of(array: Array) -> Tensor:
    return Tensor.of(ArrayBlob(array))


def fused(q: Array, k: Array, v: Array) -> Array:
    """Megatron's order, by its definition: of each group all queries, then its key, then its value."""
    rows = []
    for g in range(SIZES.groups):
        each = SIZES.heads // SIZES.groups
        rows += [q[(g * each + head) * WIDTH : (g * each + head + 1) * WIDTH] for head in range(each)]
        rows += [one[g * WIDTH : (g + 1) * WIDTH] for one in (k, v)]
    return np.concatenate(rows)


def cases(*rest: int) -> dict[str, tuple[Array, list[Array]]]:
    """One of Megatron's tensors, and what it is in Hugging Face's: (whole, pieces)."""
    q, k, v = values(6 * WIDTH, *rest), values(2 * WIDTH, *rest) + 1, values(2 * WIDTH, *rest) + 2
    gate, up = values(5, *rest), values(5, *rest) + 1
    table = values(10, *rest)
    padded = np.concatenate([table, np.zeros((6, *rest), table.dtype)])
    return {
        "same": (q, [q]),
        "qkv": (fused(q, k, v), [q, k, v]),
        "gate_and_up": (np.concatenate([gate, up]), [gate, up]),
        "vocabulary": (padded, [table]),
    }


def blocks() -> dict[str, tuple[Array, list[Array], ModelSizes]]:
    """GPT-2's: three equal blocks of as many heads."""
    q, k, v = values(12, 7), values(12, 7) + 1, values(12, 7) + 2
    rows = [one[head * WIDTH : (head + 1) * WIDTH] for head in range(3) for one in (q, k, v)]
    whole, apart, sizes = np.concatenate(rows), np.concatenate([q, k, v]), ModelSizes(3, 3, 1)
    return {
        "qkv_blocks": (whole, [apart], sizes),
        "qkv_blocks_transposed": (whole, [apart.T], sizes),
        "transposed": (q, [q.T], sizes),
    }


ALL = {
    **{(how, len(rest)): (*case, SIZES) for rest in ((), (3,)) for how, case in cases(*rest).items()},
    **{(how, 1): case for how, case in blocks().items()},
}


@pytest.mark.parametrize("case", ALL, ids=str)
def test_transform_is_that_of_numpy_both_ways(case: tuple[str, int]) -> None:
    whole, pieces, sizes = ALL[case]
    transform = TRANSFORMS[case[0]]
    split = transform.split(of(whole), sizes)
    joined = transform.join([of(piece) for piece in pieces], sizes)
    assert len(split) == transform.count == len(pieces)
    for actual, piece in zip((*split, joined), (*pieces, whole), strict=True):
        assert not list(actual.problems())
        assert actual.shape == piece.shape
        assert np.array_equal(read(actual), piece)


@given(st.data())
def test_any_block_of_a_transform_is_read_alone(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(list(ALL)))
    how, (whole, pieces, sizes) = case[0], ALL[case]
    for part, piece in zip(TRANSFORMS[how].split(of(whole), sizes), pieces, strict=True):
        box: Box = data.draw(boxes(piece.shape))
        assert np.array_equal(read(part.crop(box)), piece[box.index])


@pytest.mark.parametrize("columns", [0, 3, 5000])  # rows that are read whole, and rows that are longer
@given(st.data())
def test_any_block_of_a_transposed_matrix_is_read_alone(columns: int, data: st.DataObject) -> None:
    whole = values(4, columns)
    (transposed,) = TRANSFORMS["transposed"].split(of(whole), SIZES)
    box: Box = data.draw(boxes((columns, 4)))
    inner: Box = data.draw(boxes(box.shape))
    assert np.array_equal(read(transposed.crop(box).crop(inner)), whole.T[box.index][inner.index])


@given(st.data())
def test_any_block_of_what_was_stacked_is_read_alone(data: st.DataObject) -> None:
    shape = data.draw(shapes(3).map(lambda rest: (2, *rest)))
    whole = np.arange(prod(shape)).reshape(shape)
    for layer, piece in zip(split_stack(of(whole), 2), whole, strict=True):
        box: Box = data.draw(boxes(piece.shape))
        assert not list(layer.problems())
        assert np.array_equal(read(layer.crop(box)), piece[box.index])


@pytest.mark.parametrize("shape", [(), (3,), (1, 2)])
def test_stack_of_experts_is_refused_when_its_size_is_another(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError):
        split_stack(of(np.zeros(shape)), 2)


def test_transforms_are_all_tested() -> None:
    assert {how for how, _ in ALL} == set(TRANSFORMS)


WRONG: list[tuple[str, tuple[int, ...], ModelSizes]] = [
    ("qkv", (7, 3), SIZES),
    ("qkv", (), SIZES),
    ("qkv", (40, 3), ModelSizes(5, 2, 1)),
    ("qkv", (40, 3), ModelSizes(5, 0, 1)),
    ("gate_and_up", (7,), SIZES),
    ("gate_and_up", (), SIZES),
    ("vocabulary", (9, 2), SIZES),
    ("transposed", (3,), SIZES),
    ("qkv_blocks", (8, 2), SIZES),
]


@pytest.mark.parametrize(("how", "shape", "sizes"), WRONG)
def test_a_shape_that_does_not_fit_is_refused(how: str, shape: tuple[int, ...], sizes: ModelSizes) -> None:
    with pytest.raises(UnsupportedError):
        TRANSFORMS[how].split(of(values(*shape)), sizes)


def test_pieces_that_do_not_fit_together_are_refused() -> None:
    for how, ones in {
        "gate_and_up": [(3, 2), (3, 4)],
        "qkv": [(12, 2), (4, 2), (5, 2)],
        "vocabulary": [(20, 2)],
    }.items():
        with pytest.raises(UnsupportedError):
            TRANSFORMS[how].join([of(values(*shape)) for shape in ones], SIZES)


# Tables

SAID = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}


def test_every_table_is_of_a_family_of_its_own() -> None:
    types = [one for table in tables() for one in table.model_types]
    assert sorted(types) == ["gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3"]


@pytest.mark.parametrize("family", [table.family for table in tables()])
def test_names_are_as_many_as_the_configuration_says(family: str) -> None:
    table = next(table for table in tables() if table.family == family)
    config: dict[str, Any] = {key: 3 + i for i, key in enumerate(table.count.values())}
    bare = table.expected_names(config)
    assert bare is not None
    full = table.expected_names(config | {name.when: True for name in table.names if name.when})
    assert full is not None
    assert len(set(full)) == len(full)
    assert set(bare) <= set(full)
    assert not any("{" in name for name in full)
    numbers = [int(match[1]) for name in bare if (match := re.search(r"\.(\d+)\.", name))]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(3))
    held = {re.sub(r"\.\d+\.", ".", name) for name in full}
    assert held == {re.sub(r"\.\{\w+\}\.", ".", name.pattern) for name in table.names}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_hidden_layers": None},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": "2"},
        {"num_hidden_layers": True},
        {"num_hidden_layers": 2.0},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**400},
    ],
)
def test_a_configuration_that_does_not_tell_how_many_layers_gives_no_names(fields: dict[str, Any]) -> None:
    table = table_for({"model_type": "llama"})
    assert table is not None
    assert table.expected_names(fields) is None


def test_table_is_of_models_whose_tensors_it_lists() -> None:
    assert table_for(SAID) is not None
    assert table_for(SAID | {"architectures": None}) is not None
    assert table_for(SAID | {"architectures": ["LlamaForSequenceClassification"]}) is None
    assert table_for(SAID | {"model_type": ["llama"]}) is None
    assert table_for({}) is None


@pytest.mark.parametrize(("stated", "tied"), [(True, True), (False, False), (None, False), ("yes", False)])
def test_names_are_tied_where_the_configuration_says_so(stated: Any, tied: bool) -> None:
    table = table_for(SAID)
    assert table is not None
    assert bool(table.tie(SAID | {"tie_word_embeddings": stated})) == tied


def test_gpt2_is_tied_unless_it_says_otherwise() -> None:
    table = table_for({"model_type": "gpt2"})
    assert table is not None
    assert table.tie({}) is not None
    assert table.tie({"tie_word_embeddings": False}) is None


GOOD = """
model_types = ["x"]
architectures = ["X"]
base_prefix = "model."
ignored = []
names = ["e.weight", "l.{layer}.a", "l.{layer}.b", { name = "l.{layer}.c", when = "bias" }, "h.weight"]
[count]
layer = "layers"
[sizes]
heads = "h"
groups = "g"
vocabulary = "v"
[tied]
alias = "h.weight"
name = "e.weight"
default = false
[[megatron]]
name = "e"
hf = ["e.weight"]
[[megatron]]
name = "d.{layer}.ab"
hf = ["l.{layer}.a", "l.{layer}.b"]
transform = "gate_and_up"
[[megatron]]
name = "d.{layer}.c"
hf = ["l.{layer}.c"]
[[megatron]]
name = "h"
hf = ["h.weight"]
"""

BAD = {
    "a transform that is none": ('transform = "gate_and_up"', 'transform = "thirds"'),
    "a transform that is none, in the last row": ('hf = ["h.weight"]', 'hf = ["h.weight"]\ntransform = "thirds"'),
    "too few pieces": ('"l.{layer}.a", "l.{layer}.b"]\ntransform', '"l.{layer}.a"]\ntransform'),
    "a row under several conditions": ('"l.{layer}.b", {', '{ name = "l.{layer}.b", when = "bias" }, {'),
    "a name without a row": ('"e.weight", "l', '"e.weight", "f.weight", "l'),
    "a name in two rows": ('hf = ["h.weight"]', 'hf = ["e.weight"]'),
    "a place that nothing counts": ('layer = "layers"', 'expert = "layers"'),
    "a place on one side": ('name = "d.{layer}.ab"', 'name = "d.ab"'),
    "an unknown entry": ("ignored = []", "ignored = []\nmore = 1"),
    "no names": ("names =", "nomes ="),
    "an unknown size": ('heads = "h"', 'hearts = "h"'),
    "a tie of a stranger": ('alias = "h.weight"', 'alias = "i.weight"'),
    "a stack of strangers": ("[sizes]", "[[memory]]\nname = 's'\nfiles = ['z']\n[sizes]"),
    "a stack of too few": (
        "[sizes]",
        "[[memory]]\nname = 's'\nfiles = ['e.weight']\ntransform = 'gate_and_up'\n[sizes]",
    ),
    "a row with more": ('transform = "gate_and_up"', 'transform = "gate_and_up"\nwhy = "not"'),
}


def test_a_table_is_parsed() -> None:
    table = parse("x", GOOD)
    assert table.expected_names({"layers": 2}) == ("e.weight", "l.0.a", "l.0.b", "l.1.a", "l.1.b", "h.weight")
    assert table.expected_names({"layers": 1, "bias": True}) == ("e.weight", "l.0.a", "l.0.b", "l.0.c", "h.weight")
    lines = table.lines({"layers": 2})
    assert lines is not None
    assert [line.names[0] for line in lines] == ["e", "d.0.ab", "d.1.ab", "h"]
    assert lines[1].hf == ("l.0.a", "l.0.b")
    assert table.ignored.fullmatch("") is None
    assert replace(table, family="y") != table


@pytest.mark.quick(100)
@pytest.mark.parametrize("kind", BAD)
def test_a_table_that_contradicts_itself_is_refused(kind: str) -> None:
    before, after = BAD[kind]
    assert before in GOOD
    with pytest.raises(ValueError, match="table x"):
        parse("x", GOOD.replace(before, after, 1))
