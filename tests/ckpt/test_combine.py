"""Averages of checkpoints, and adapters merged into models: held against exact arithmetic and against PEFT."""

import json
import pickle
import re
import tracemalloc
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.combine import average, convert_lora, ema_weights, merge_lora
from ckpt.combine.average_blob import round_once
from ckpt.combine.lora_blob import matmul_in_order, merged_blob
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Group, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import ArrayBlob, Blob, Tensor, read
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from late import Late

SHORT = ["float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
FLOATS = ["float64", "float32", *SHORT]


def checkpoint(tensors: Mapping[str, Any], aliases: Mapping[str, str] = {}, name: str = "a", **more: Any) -> Checkpoint:
    parameters = {
        n: Parameter(n, "parameter", {MODEL: Tensor.of(ArrayBlob(np.asarray(array)))}) for n, array in tensors.items()
    }
    return Checkpoint(path=Path(name), origin=Origin("test", step=7), parameters=parameters, aliases=aliases, **more)


def values(source: Checkpoint, name: str) -> Any:
    return read(source.parameters[name].weight)


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


# Rounding


class Rounding:
    """Round to nearest, ties to even, by fractions: the slow and certain way."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        words = np.arange(2 ** (8 * dtype.itemsize - 1), dtype=f"u{dtype.itemsize}")
        with np.errstate(invalid="ignore"):  # of signalling NaNs
            every = words.view(dtype).astype(np.float64)
        finite = words[np.isfinite(every)]
        # Positive numbers are in the order of their words, so the next word is the neighbour, and odd words are odd.
        self.words = [int(word) for word in finite]
        self.numbers = [Fraction(float(x)) for x in every[np.isfinite(every)]]
        self.limit = self.numbers[-1] + (self.numbers[-1] - self.numbers[-2]) / 2

    def __call__(self, value: float) -> Any:
        if not np.isfinite(value):
            return np.float64(value).astype(self.dtype)
        exact = abs(Fraction(value))
        last_is_odd = self.words[-1] % 2 == 1
        if exact > self.limit or (exact == self.limit and last_is_odd):
            return np.copysign(np.float64(np.inf), value).astype(self.dtype)
        at = min(bisect_left(self.numbers, exact), len(self.numbers) - 1)
        low = max(at - 1, 0)
        near = sorted((low, at), key=lambda i: (abs(self.numbers[i] - exact), self.words[i] % 2))[0]
        return np.copysign(np.float64(self.numbers[near]), value).astype(self.dtype)


@cache
def rounding_to(name: str) -> Rounding:
    return Rounding(DTYPES[name])


def is_same(a: Any, b: Any) -> bool:
    return bits(a) == bits(b) or bool(np.isnan(np.float64(a)) and np.isnan(np.float64(b)))


@pytest.mark.parametrize("name", SHORT)
def test_rounding_is_exact_around_every_midpoint(name: str) -> None:
    """A hair above or below the middle of two numbers: what two roundings get wrong."""
    rounding = rounding_to(name)
    step = max(1, len(rounding.numbers) // 500)
    chosen = [*range(0, len(rounding.numbers) - 1, step), *range(len(rounding.numbers) - 3, len(rounding.numbers) - 1)]
    middles = np.array(
        [float((rounding.numbers[i] + rounding.numbers[i + 1]) / 2) for i in chosen] + [float(rounding.limit)]
    )
    hair = np.concatenate([middles, np.nextafter(middles, np.inf), np.nextafter(middles, 0), middles * (1 + 2**-40)])
    every = np.concatenate([hair, -hair, [0.0, 5e-324, 1e-60, 1e300, 1.7e308, np.inf]])
    actual = round_once(every, DTYPES[name])
    wrong = [(x, a) for x, a in zip(every, actual, strict=True) if not is_same(a, rounding(float(x)))]
    assert wrong == []


def test_numpy_alone_rounds_twice() -> None:
    """Why `round_once` exists; if this fails, it may have become needless."""
    value = np.array([1 + 2**-8 + 2**-40])
    assert value.astype(ml_dtypes.bfloat16) != round_once(value, DTYPES["bfloat16"])


@settings(max_examples=300, deadline=None)
@given(st.floats(allow_nan=True, allow_infinity=True, width=64), st.sampled_from(SHORT))
def test_any_float_is_rounded_once(value: float, name: str) -> None:
    assert is_same(round_once(np.array([value]), DTYPES[name])[0], rounding_to(name)(value))


def test_a_nan_is_positive_and_quiet() -> None:
    odd = np.array([0xFFF8000000000001, 0x7FF0000000000001], np.uint64).view(np.float64)
    for name in FLOATS:
        expected = np.array([np.nan, np.nan]).astype(DTYPES[name])
        assert bits(round_once(odd, DTYPES[name])) == bits(expected), name


# Averages


def random_values(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...]) -> Any:
    size = int(np.prod(shape))
    if dtype.itemsize == 1:  # all numbers, but for NaNs
        words = rng.integers(0, 256, size, np.uint8).view(dtype)
        return np.where(np.isnan(words.astype(np.float32)), np.zeros(1, dtype), words).reshape(shape)
    scale = np.exp2(rng.integers(-12, 4, size).astype(np.float64))
    return (rng.standard_normal(size) * scale).astype(dtype).reshape(shape)


def reference(arrays: Sequence[Any], weights: Sequence[float], dtype: DType) -> Any:
    total = np.zeros(arrays[0].shape) * 0
    for i, (array, weight) in enumerate(zip(arrays, weights, strict=True)):
        total = array.astype(np.float64) * weight if i == 0 else total + array.astype(np.float64) * weight
    total = total / sum(map(Fraction, weights)).__float__()
    if dtype.itemsize >= 4:
        return total.astype(dtype)
    rounding = rounding_to(dtype.name)
    return np.array([rounding(float(x)) for x in total.reshape(-1)]).astype(dtype).reshape(total.shape)


@pytest.mark.parametrize("weights", [None, [0.7, 0.2, 0.1], [3, 1, -0.5]])
@pytest.mark.parametrize("name", FLOATS)
def test_average_is_the_float64_mean_rounded_once(name: str, weights: list[float] | None) -> None:
    rng, dtype = np.random.default_rng(1), DTYPES[name]
    arrays = [random_values(rng, dtype, (20, 31)) for _ in range(3)]
    result = average([checkpoint({"w": a}, name=str(i)) for i, a in enumerate(arrays)], weights)
    tensor = result.parameters["w"].weight
    assert tensor.dtype == dtype
    assert list(tensor.problems()) == []
    assert bits(read(tensor)) == bits(reference(arrays, weights or [1, 1, 1], dtype))
    for box in (Box((3, 0), (4, 31)), Box((0, 7), (20, 8)), Box((5, 5), (15, 30))):
        assert bits(read(tensor.crop(box))) == bits(read(tensor)[box.index])


def test_average_is_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.combine.average_blob.BLOCK", 100)
    rng = np.random.default_rng(2)
    arrays = [random_values(rng, DTYPES["bfloat16"], (9, 13, 11)) for _ in range(4)]
    sizes: list[int] = []

    class Watched(ArrayBlob):
        def crop(self, box: Box) -> "Watched":
            return Watched(self.array[box.index])

        def read_into(self, out: Any, reader: Reader) -> None:
            sizes.append(out.size)
            super().read_into(out, reader)

    sources = [checkpoint({"w": a}) for a in arrays]
    sources = [
        replace(s, parameters={"w": replace(s.parameters["w"], states={MODEL: Tensor.of(Watched(a))})})
        for s, a in zip(sources, arrays, strict=True)
    ]
    assert bits(values(average(sources), "w")) == bits(reference(arrays, [1] * 4, DTYPES["bfloat16"]))
    assert max(sizes) <= 100
    strided = np.zeros((9, 13, 22), DTYPES["bfloat16"])[..., ::2]
    with Reader(check=False) as reader:
        average(sources).parameters["w"].weight.read_into(strided, reader)
    assert bits(strided) == bits(values(average(sources), "w"))


def test_average_of_numbers_without_axes_of_none_and_of_complex_ones() -> None:
    a = {"one": np.float32(1), "none": np.zeros((0, 3), np.float16), "c": np.array([1 + 2j, 3 - 1j], np.complex64)}
    b = {"one": np.float32(4), "none": np.zeros((0, 3), np.float16), "c": np.array([2 + 1j, 5 + 5j], np.complex64)}
    result = average([checkpoint(a), checkpoint(b)])
    assert values(result, "one") == np.float32(2.5)
    assert values(result, "none").shape == (0, 3)
    assert values(result, "c").tolist() == [1.5 + 1.5j, 4 + 2j]


def test_the_first_source_decides_the_type() -> None:
    wide, short = np.array([1.0, 1 + 2**-7], np.float32), np.array([1, 1], ml_dtypes.bfloat16)
    assert values(average([checkpoint({"w": wide}), checkpoint({"w": short})]), "w").tolist() == [1, 1 + 2**-8]
    assert values(average([checkpoint({"w": short}), checkpoint({"w": wide})]), "w").tolist() == [1, 1]


def test_not_a_number_and_infinity_follow_ieee() -> None:
    inf, nan = np.inf, np.nan
    a, b = np.array([inf, inf, nan, -0.0, 3e38], np.float32), np.array([1, -inf, 1, -0.0, 3e38], np.float32)
    result = values(average([checkpoint({"w": a}), checkpoint({"w": b})]), "w")
    assert bits(result) == bits(np.array([inf, nan, nan, -0.0, 3e38], np.float32))
    assert np.isnan(values(average([checkpoint({"w": a}), checkpoint({"w": b})], [0, 1]), "w")[0])


def test_integers_must_be_equal_and_counters_take_the_largest() -> None:
    a = {"ids": np.arange(5), "mask": np.array([True, False]), "bn.num_batches_tracked": np.int64(3)}
    b = {**a, "bn.num_batches_tracked": np.int64(9)}
    result = average([checkpoint(a), checkpoint(b)])
    assert values(result, "ids").tolist() == [0, 1, 2, 3, 4]
    assert values(result, "mask").tolist() == [True, False]
    assert values(result, "bn.num_batches_tracked") == 9
    assert "the largest is taken: bn.num_batches_tracked" in " ".join(map(str, result.notices))
    other = average([checkpoint(a), checkpoint({**b, "ids": np.arange(5)[::-1]})])
    with pytest.raises(UnsupportedError, match="`ids` holds int64 values which differ"):
        values(other, "ids")


def test_models_must_have_the_same_names_shapes_and_kinds() -> None:
    one, two = np.zeros(3, np.float32), np.zeros(4, np.float32)
    with pytest.raises(IncompleteError, match=r"b: it lacks 5 tensors of a: w1, w2, w3 and 2 more"):
        average([checkpoint({f"w{i}": one for i in range(6)}), checkpoint({"w0": one}, name="b")])
    with pytest.raises(IncompleteError, match=r"a: it lacks 1 tensors of b: x"):
        average([checkpoint({"w": one}), checkpoint({"w": one, "x": one}, name="b")])
    with pytest.raises(UnsupportedError, match=r"w \[4\] instead of \[3\]"):
        average([checkpoint({"w": one}), checkpoint({"w": two}, name="b")])
    with pytest.raises(UnsupportedError, match="other element types"):
        average([checkpoint({"w": one}), checkpoint({"w": one.astype(np.int32)}, name="b")])
    with pytest.raises(UnsupportedError, match="other element types"):
        average([checkpoint({"w": one.astype(np.int32)}), checkpoint({"w": one}, name="b")])


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [np.inf, 1.0], [np.nan, 1.0], [-1.0, -1.0]])
def test_weights_must_make_a_mean(weights: list[float]) -> None:
    sources = [checkpoint({"w": np.zeros(1, np.float32)})] * 2
    with pytest.raises(InvalidArgumentError, match="weights"):
        average(sources, weights)
    with pytest.raises(InvalidArgumentError, match="at least one"):
        average([])


def test_names_stay_tied_only_if_all_sources_tie_them() -> None:
    x, y = np.array([1.0], np.float32), np.array([3.0], np.float32)
    tied = [checkpoint({"embed": x}, {"head": "embed"}), checkpoint({"embed": y}, {"head": "embed"})]
    both = average(tied)
    assert (list(both.parameters), dict(both.aliases)) == (["embed"], {"head": "embed"})
    config = {"extras": {"hf/config.json": {"tie_word_embeddings": True}}}
    apart = average([replace(tied[0], **config), checkpoint({"embed": y, "head": 2 * y})])
    assert dict(apart.aliases) == {}
    assert (values(apart, "embed"), values(apart, "head")) == (2, 3.5)
    assert apart.extras["hf/config.json"] == {"tie_word_embeddings": False}
    other = average([checkpoint({"embed": y, "head": 2 * y}), tied[0]])
    assert (values(other, "embed"), values(other, "head")) == (2, 3.5)
    swapped = average([tied[0], checkpoint({"head": y}, {"embed": "head"})])
    assert (dict(swapped.aliases), values(swapped, "embed")) == ({"head": "embed"}, 2)


def test_the_optimizer_is_dropped_and_this_is_stated() -> None:
    source = checkpoint({"w": np.ones(2, ml_dtypes.bfloat16)}, name="a")
    states = {MASTER: Tensor.of(ArrayBlob(np.ones(2, np.float32))), **source.parameters["w"].states}
    full = replace(
        source,
        parameters={
            "w": Parameter("w", "parameter", {**states, "exp_avg": states[MASTER]}, {"step": 3}),
            "rng": Parameter("rng", "extra", {MODEL: states[MASTER]}),
        },
        groups=(Group({"lr": 1.0}, ("w",)),),
        digests={("w", "exp_avg"): 5},
    )
    result = average([full, replace(full, origin=Origin("test", step=9))])
    assert list(result.parameters) == ["w"]
    assert set(result.parameters["w"].states) == {MODEL}
    assert (result.groups, result.digests, result.origin.step) == ((), {}, None)
    assert "not in the result: master, exp_avg" in " ".join(map(str, result.notices))
    assert average([source]).notices == ()


def test_ema_weights_are_those_of_the_recurrence() -> None:
    states = [Fraction(3), Fraction(5), Fraction(-2), Fraction(7)]
    decay = Fraction(7, 8)
    expected = states[0]
    for state in states[1:]:
        expected = decay * expected + (1 - decay) * state
    weights = ema_weights(4, float(decay))
    assert sum(map(Fraction, weights)) == 1
    assert sum(Fraction(w) * s for w, s in zip(weights, states, strict=True)) == expected
    assert ema_weights(1, 0.9) == [1.0]
    for count, wrong in ((0, 0.5), (2, 1.0), (2, -0.1), (2, float("nan"))):
        with pytest.raises(InvalidArgumentError):
            ema_weights(count, wrong)


class Counting(Reader):
    """Counts the bytes that are read, by file."""

    def __init__(self) -> None:
        super().__init__(check=False)
        self.nbytes: dict[str, int] = {}

    def read_into(self, path: Path, offset: int, out: memoryview, seal: Any = None) -> None:
        self.nbytes[path.parent.name] = self.nbytes.get(path.parent.name, 0) + out.nbytes
        super().read_into(path, offset, out, seal)


def test_a_slice_of_an_average_reads_only_this_slice(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal((512, 64)).astype(np.float32) for _ in range(3)]
    for i, array in enumerate(arrays):
        (tmp_path / str(i)).mkdir()
        save_file({"w": array, "x": array}, tmp_path / str(i) / "model.safetensors")
    sources = [open_checkpoint(tmp_path / str(i) / "model.safetensors") for i in range(3)]
    result = average(sources)
    assert set(result.identities) == {file for source in sources for file in source.identities}
    assert len(result.files) == 3
    with Counting() as reader:
        rows = read(result.parameters["w"].weight.crop(Box((10, 0), (12, 64))), reader)
    assert reader.nbytes == {str(i): 2 * 64 * 4 for i in range(3)}
    assert bits(rows) == bits(reference(arrays, [1, 1, 1], DTYPES["float32"])[10:12])


# The product of A and B


def test_the_product_is_that_of_fused_multiply_adds_in_order() -> None:
    rng = np.random.default_rng(4)
    left, right = rng.standard_normal((7, 5)).astype(np.float32), rng.standard_normal((5, 9)).astype(np.float32)
    actual = matmul_in_order(left.astype(np.float64), right.astype(np.float64), DTYPES["float32"])
    for i in range(7):
        for j in range(9):
            total = np.float32(0)
            for k in range(5):
                exact = Fraction(float(total)) + Fraction(float(left[i, k])) * Fraction(float(right[k, j]))
                total = np.float32(float(exact))
            assert actual[i, j] == total


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("block", [10, 70])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_blocks_of_a_merged_weight_do_not_depend_on_the_cut(
    monkeypatch: pytest.MonkeyPatch, name: str, dora: bool, transposed: bool, block: int
) -> None:
    monkeypatch.setattr("ckpt.combine.lora_blob._BLOCK", block)
    monkeypatch.setattr("ckpt.combine.lora_blob._TILE", 16)
    rng = np.random.default_rng(5)
    out, rank, inner = 23, 6, 31
    weight = rng.standard_normal((inner, out) if transposed else (out, inner)).astype(DTYPES[name])
    a, b = rng.standard_normal((rank, inner)), rng.standard_normal((out, rank))
    magnitude = rng.random(out).astype(np.float32) + 1 if dora else None

    def blob() -> Blob:
        parts = [ArrayBlob(x.astype(np.float32)) for x in (a, b)]
        vector = None if magnitude is None else ArrayBlob(magnitude)
        return merged_blob(ArrayBlob(weight), *parts, 0.37, transposed, vector)

    full = read(blob())
    wide = weight.astype(np.float64)
    delta = 0.37 * (b.astype(np.float32).astype(np.float64) @ a.astype(np.float32).astype(np.float64))
    expected = wide + (delta.T if transposed else delta)
    if magnitude is not None:
        axis = 0 if transposed else 1
        expected *= np.expand_dims(magnitude / np.linalg.norm(expected, axis=axis), axis)
    tolerance = {"float32": 1e-5, "bfloat16": 2**-7, "float64": 1e-7}[name]
    assert np.allclose(full.astype(np.float64), expected, rtol=tolerance, atol=1e-5)
    for low, high in ((0, 1), (3, 20), (22, 23)):
        for left, right in ((0, 23), (4, 5), (7, 19)):
            box = Box((low, left), (high, right))
            assert bits(read(blob().crop(box))) == bits(full[box.index])
            assert bits(
                read(blob().crop(Box((low, 0), (high, full.shape[1]))).crop(Box((0, left), (high - low, right))))
            ) == bits(full[box.index])
    assert read(blob().crop(Box((2, 2), (2, 9)))).shape == (0, 7)


def test_blocks_of_a_merged_convolution_do_not_depend_on_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    weight, a, b = (rng.standard_normal(s).astype(np.float32) for s in ((5, 4, 3, 2), (6, 4, 3, 2), (5, 6, 1, 1)))

    def blob(magnitude: Any = None) -> Blob:
        return merged_blob(ArrayBlob(weight), ArrayBlob(a), ArrayBlob(b), 0.5, False, magnitude)

    full = read(blob())
    assert np.allclose(full, weight + 0.5 * np.einsum("orhw,rikl->oikl", b, a), atol=1e-6)
    norms = np.linalg.norm(full.reshape(5, -1), axis=1)
    magnitude = ArrayBlob((2 * norms).reshape(1, 5, 1, 1))
    assert np.allclose(read(blob(magnitude)), 2 * full, rtol=1e-6)
    monkeypatch.setattr("ckpt.combine.lora_blob._BLOCK", 5)
    assert bits(read(blob())) == bits(full)
    for box in (Box((1, 0, 0, 0), (4, 4, 3, 2)), Box((0, 1, 1, 1), (5, 3, 3, 2)), Box((4, 3, 2, 1), (5, 4, 3, 2))):
        assert bits(read(blob().crop(box))) == bits(full[box.index])
        assert bits(read(blob(magnitude).crop(box))) == bits(read(blob(magnitude))[box.index])


def small_adapter(tensors: Mapping[str, Any], **config: Any) -> Checkpoint:
    """An adapter of rank 2 for `tensors`: shapes (out, in) by module."""
    rng, arrays = np.random.default_rng(7), {}
    for module, (out, inner) in tensors.items():
        arrays[f"base_model.model.{module}.lora_A.weight"] = rng.standard_normal((2, inner)).astype(np.float32)
        arrays[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((out, 2)).astype(np.float32)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **config}
    return checkpoint(arrays, name="adapter", extras={"hf/adapter_config.json": fields})


@pytest.mark.parametrize("flag", [False, True])
def test_the_layout_of_a_square_weight(flag: bool) -> None:
    """That of other modules of its name, as far as their biases show it; else the configured one."""
    zeros = {"a.proj.weight": np.zeros((4, 4), np.float32)}
    adapter = small_adapter({"a.proj": (4, 4)}, fan_in_fan_out=flag)
    a, b = (values(adapter, f"base_model.model.a.proj.lora_{x}.weight").astype(np.float64) for x in "AB")
    product = matmul_in_order(b, a, DTYPES["float32"])
    plain = {"b.proj.weight": np.zeros((4, 6), np.float32), "b.proj.bias": np.zeros(4, np.float32)}
    other = {"c.proj.weight": np.zeros((6, 4), np.float32), "c.proj.bias": np.zeros(4, np.float32)}
    for more, transposed in (({}, flag), (plain, False), (other, True)):
        result = values(merge_lora(checkpoint({**zeros, **more}), adapter), "a.proj.weight")
        assert bits(result) == bits(product.T if transposed else product)
    with pytest.raises(UnsupportedError, match="is square"):
        merge_lora(checkpoint({**zeros, **plain, **other}), adapter)


def test_two_tensors_for_one_are_refused() -> None:
    model = checkpoint({"proj.weight": np.zeros((4, 3), np.float32), "proj.bias": np.zeros(4, np.float32)})
    adapter = small_adapter({"x.proj": (4, 3), "proj": (4, 3)})
    with pytest.raises(UnsupportedError, match=r"two tensors of the adapter are meant for `proj\.weight`"):
        merge_lora(model, adapter)
    biases = {f"base_model.model.proj.{infix}bias": np.ones(4, np.float32) for infix in ("", "base_layer.")}
    adapter = small_adapter({"proj": (4, 3)})
    adapter = replace(adapter, parameters={**adapter.parameters, **checkpoint(biases).parameters})
    with pytest.raises(UnsupportedError, match=r"two tensors of the adapter are meant for `proj\.bias`"):
        merge_lora(model, adapter)


def test_combined_checkpoint_can_be_pickled() -> None:
    """Work may be done in other processes."""
    model = checkpoint({"proj.weight": np.ones((4, 3), np.float32)})
    adapter = small_adapter({"proj": (4, 3)}, use_dora=True)
    magnitude = checkpoint({"base_model.model.proj.lora_magnitude_vector": np.ones(4, np.float32)}).parameters
    merged = merge_lora(model, replace(adapter, parameters={**adapter.parameters, **magnitude}))
    result = average([merged, model])
    again = pickle.loads(pickle.dumps(result))
    assert bits(values(again, "proj.weight")) == bits(values(result, "proj.weight"))


def test_memory_is_a_few_blocks_for_any_number_of_sources() -> None:
    """Beyond the slabs of the transfer: 1 MiB each."""
    rng = np.random.default_rng(8)
    arrays = [rng.standard_normal((2048, 1024)).astype(np.float32) for _ in range(6)]
    mean = average([checkpoint({"w": x}) for x in arrays]).parameters["w"].weight
    a, b = rng.standard_normal((8, 1024)).astype(np.float32), rng.standard_normal((2048, 8)).astype(np.float32)
    magnitude = ArrayBlob(np.ones(2048, np.float32))
    merged = Tensor.of(merged_blob(ArrayBlob(arrays[0]), ArrayBlob(a), ArrayBlob(b), 1.0, False, magnitude))
    for tensor in (mean, merged):
        tracemalloc.start()
        with Reader(check=False) as reader, Transfer(reader, 1 << 20) as transfer:
            for _ in transfer.slabs(tensor):
                pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 6 << 20


# PEFT

torch = pytest.importorskip("torch")
peft, transformers = Late("peft"), Late("transformers")

Build = Callable[..., Any]


def llama(**more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **more))


def gpt2(**more: Any) -> Any:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **{"tie_word_embeddings": False, **more})
    )


class Convolutions(torch.nn.Module):  # type: ignore[misc]
    """A model of another library: convolutions of one and two axes, with kernels of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Conv2d(6, 8, 1)
        self.three = torch.nn.Conv2d(8, 5, 3)
        self.line = torch.nn.Conv1d(4, 6, 2)
        self.head = torch.nn.Linear(5, 2)


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def trained(tmp_path: Path, quiet: None) -> Callable[..., tuple[Checkpoint, Checkpoint]]:
    """A model and an adapter of PEFT with random values, saved by their libraries, and opened."""

    def save(
        model: Any, dtype: Any = torch.float32, edit: Mapping[str, Any] = {}, **options: Any
    ) -> tuple[Checkpoint, Checkpoint]:
        torch.manual_seed(0)
        model = model.to(dtype)
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(tmp_path / "base")
        else:
            (tmp_path / "base").mkdir()
            torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
        for name, tensor in adapted.named_parameters():
            if "lora_" in name:
                scale = tensor.detach().abs().mean() if "magnitude" in name else 0
                tensor.data = (0.1 * torch.randn(tensor.shape) + scale).to(tensor.dtype)
            elif tensor.requires_grad:
                tensor.data = torch.randn(tensor.shape).to(tensor.dtype)
        adapted.save_pretrained(tmp_path / "adapter")
        if edit:
            file = tmp_path / "adapter" / "adapter_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **edit}))
        return open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "adapter")

    return save


def with_adapter(base: Checkpoint, adapter: Checkpoint, model: Any = None) -> Any:
    """The model with the adapter, as PEFT loads them."""
    if model is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(base.path, dtype="auto")
    return peft.PeftModel.from_pretrained(model, adapter.path).eval()


def array(tensor: Any) -> Any:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def merged_by_peft(base: Checkpoint, adapter: Checkpoint, model: Any = None) -> dict[str, Any]:
    merged = with_adapter(base, adapter, model).merge_and_unload()
    return {name: array(tensor) for name, tensor in merged.state_dict().items()}


def ulps(a: Any, b: Any) -> int:
    """The largest distance of two arrays of one type, in steps from one number to the next."""
    signed = [np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}").astype(np.int64) for x in (a, b)]
    low = -(2 ** (8 * a.dtype.itemsize - 1))
    ordered = [np.where(x < 0, low - x, x) for x in signed]
    return int(np.abs(ordered[0] - ordered[1]).max(initial=0))


@cache
def torch_adds_in_order() -> bool:
    """Does this machine's torch sum products of matrices in ascending order, with fused multiply-adds?"""
    rng = np.random.default_rng(0)
    for rows, rank, columns in ((32, 4, 48), (96, 8, 32), (16, 4, 32), (64, 3, 32), (32, 6, 128)):
        left = rng.standard_normal((rows, rank)).astype(np.float32)
        right = rng.standard_normal((rank, columns)).astype(np.float32)
        product = (torch.from_numpy(left) @ torch.from_numpy(right)).numpy()
        if bits(product) != bits(matmul_in_order(left.astype(np.float64), right.astype(np.float64), DTYPES["float32"])):
            return False
    return True


def compare(result: Checkpoint, expected: Mapping[str, Any], limit: int = 0) -> None:
    """All tensors have the names and types of PEFT's, and are at most so many ulps away."""
    names = {**{name: name for name in result.parameters}, **result.aliases}
    assert set(names) == set(expected)
    for name, holder in names.items():
        actual = values(result, holder)
        assert (actual.dtype, actual.shape) == (expected[name].dtype, expected[name].shape)
        if not torch_adds_in_order():
            eps = float(ml_dtypes.finfo(actual.dtype).eps)
            a, b = (x.astype(np.float64) for x in (actual, expected[name]))
            assert np.allclose(a, b, rtol=32 * eps, atol=1e-6), name
        elif limit == 0:
            assert bits(actual) == bits(expected[name]), name
        else:
            assert ulps(actual, expected[name]) <= limit, name


def mixture(kind: str, **more: Any) -> Any:
    """A model whose experts are stacks in memory: GPT-OSS, or a family that stores them one by one in its files."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8}
    sizes |= {"num_key_value_heads": 1, "num_experts_per_tok": 2, "num_hidden_layers": 2, **more}
    if kind == "gpt_oss":
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, num_local_experts=3))
    config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=12, num_experts=3)
    return transformers.Qwen3MoeForCausalLM(config)


def with_stacked_experts(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Experts that are stored one by one, as transformers has them in memory: stacks, with gate and up in one."""
    result, experts = {}, {}
    for name, values in arrays.items():
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)_proj\.weight", name)
        if match is None:
            result[name] = values
        else:
            experts.setdefault(match[1], {})[match[3], int(match[2])] = values
    for module, parts in experts.items():
        count = range(len(parts) // 3)
        fused = [np.concatenate([parts["gate", e], parts["up", e]]) for e in count]
        result[f"{module}.gate_up_proj"] = np.stack(fused)
        result[f"{module}.down_proj"] = np.stack([parts["down", e] for e in count])
    return result


ATTENTION = ["q_proj", "v_proj", "down_proj"]
VARIANTS: dict[str, tuple[Build, dict[str, Any]]] = {
    "lora": (llama, {"r": 4, "target_modules": ATTENTION}),
    "rslora": (llama, {"r": 8, "lora_alpha": 5, "use_rslora": True, "target_modules": ATTENTION}),
    "patterns": (
        llama,
        {
            "r": 4,
            "target_modules": ATTENTION,
            "rank_pattern": {"down_proj": 3, r"layers\.1\..*v_proj": 6},
            "alpha_pattern": {r"layers.0.self_attn.q_proj": 11, "^model.layers.1.self_attn.q_proj": 7},
        },
    ),
    "embedding": (llama, {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "saved": (llama, {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "bias": (gpt2, {"r": 4, "target_modules": ["c_attn"], "bias": "all"}),
    "lora-only": (gpt2, {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "bias": "lora_only"}),
    "gpt2": (gpt2, {"r": 4, "target_modules": ["c_attn", "c_proj", "wte", "lm_head"]}),
    "gpt2-reversed": (gpt2, {"r": 4, "target_modules": ["c_proj", "lm_head"], "fan_in_fan_out": True}),
    "gaussian": (llama, {"r": 4, "target_modules": "all-linear", "init_lora_weights": "gaussian"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_float32_model_is_what_peft_merges_bit_by_bit(trained: Build, variant: str) -> None:
    build, options = VARIANTS[variant]
    base, adapter = trained(build(), **options)
    compare(merge_lora(base, adapter), merged_by_peft(base, adapter))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "names"),
    [
        ("gpt_oss", {}, ["gate_up_proj", "down_proj"]),
        ("gpt_oss", {"intermediate_size": 16}, ["gate_up_proj", "down_proj"]),
        ("qwen3_moe", {}, ["gate_up_proj", "down_proj"]),
        ("qwen3_moe", {}, ["down_proj"]),
    ],
    ids=["gpt_oss", "square", "qwen3_moe", "one"],
)
def test_experts_by_target_parameters_are_what_peft_merges(
    trained: Build, kind: str, sizes: dict[str, int], names: list[str], tmp_path: Path
) -> None:
    """Of stacks whose rows of gate and up are in turn, and of files with one weight for each expert. PEFT loads what
    ckpt converts, and merges it to the same bits."""
    targets = [f"mlp.experts.{name}" for name in names]
    options = {"r": 4, "lora_alpha": 6, "alpha_pattern": {r".*1\.mlp\.experts\.down_proj": 5}}
    base, adapter = trained(mixture(kind, **sizes), target_modules=["q_proj"], target_parameters=targets, **options)
    result, expected = merge_lora(base, adapter), merged_by_peft(base, adapter)
    arrays = with_stacked_experts({name: values(result, name) for name in result.parameters})
    original = with_stacked_experts({name: values(base, name) for name in base.parameters})
    compare(checkpoint(arrays), expected)
    gate_up: Any = "in-turn" if kind == "gpt_oss" else "halves"
    back = convert_lora(convert_lora(adapter, "per-expert", gate_up), "peft", gate_up)
    save(back, tmp_path / "back", writable("hf"))
    merged_again = merged_by_peft(base, open_checkpoint(tmp_path / "back"))
    assert {name: bits(x) for name, x in merged_again.items()} == {name: bits(x) for name, x in expected.items()}
    for name in expected:
        is_target = "q_proj.weight" in name or any(name.endswith(f".experts.{target}") for target in names)
        assert (bits(arrays[name]) != bits(original[name])) == is_target


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_16_bit_model_is_what_peft_merges(trained: Build, variant: str, dtype: Any) -> None:
    """Bit by bit, but for embeddings: PEFT rounds their updates before it adds them."""
    build, options = VARIANTS[variant]
    base, adapter = trained(build(), dtype, **options)
    result, expected = merge_lora(base, adapter), merged_by_peft(base, adapter)
    embeddings = [name for name in expected if "embed_tokens" in name or "wte" in name]
    for name in embeddings if variant in ("embedding", "gpt2") else ():
        original = values(base, name).astype(np.float32)
        a, b = values(result, name).astype(np.float32), expected[name].astype(np.float32)
        eps = float(ml_dtypes.finfo(expected[name].dtype).eps)
        assert (np.abs(a - b) <= eps * np.maximum(np.abs(a - original), np.abs(a)) + 2**-24).all()
        expected[name] = values(result, name)
    compare(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("targets", [(llama, [*ATTENTION, "embed_tokens"]), (gpt2, ["c_attn", "c_proj"])])
def test_dora_is_within_a_few_ulps_of_peft(trained: Build, targets: tuple[Build, list[str]], dtype: Any) -> None:
    """PEFT sums the squares of a norm in float32, in an order that is not specified."""
    build, modules = targets
    base, adapter = trained(build(), dtype, r=4, use_dora=True, target_modules=modules)
    result, expected = merge_lora(base, adapter), merged_by_peft(base, adapter)
    compare(result, expected, 8 if dtype == torch.float32 else 1)
    for name, x in expected.items() if dtype == torch.float32 else ():
        assert (np.abs(values(result, name) - x) <= np.abs(x) * (max(x.shape) + 8) * 2**-24).all()


@pytest.mark.slow
def test_a_float64_model_is_computed_in_float64(trained: Build) -> None:
    base, adapter = trained(llama(), torch.float64, r=4, target_modules=ATTENTION)
    compare(merge_lora(base, adapter), merged_by_peft(base, adapter), 4)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [64, 300])
def test_a_large_rank_is_within_the_bound_of_sums(trained: Build, rank: int) -> None:
    """Sums in float32 differ by at most `2 * rank` half ulps of the sum of magnitudes, whatever the order."""
    base, adapter = trained(llama(), r=rank, lora_alpha=rank, target_modules=["q_proj"])
    result, expected = merge_lora(base, adapter), merged_by_peft(base, adapter)
    name = "model.layers.0.self_attn.q_proj"
    a, b = (np.abs(values(adapter, f"base_model.model.{name}.lora_{x}.weight").astype(np.float64)) for x in "AB")
    distance = np.abs(values(result, f"{name}.weight").astype(np.float64) - expected[f"{name}.weight"])
    assert (distance <= 2**-24 * (2 * rank * (b @ a) + 2 * np.abs(expected[f"{name}.weight"]) + 2 * (b @ a))).all()


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_convolutions_are_merged(trained: Build, dora: bool, tmp_path: Path) -> None:
    model = Convolutions()
    base, adapter = trained(model, r=2, use_dora=dora, target_modules=["one", "three", "line", "head"])
    fresh = Convolutions()
    fresh.load_state_dict(torch.load(tmp_path / "base" / "pytorch_model.bin"))
    expected = merged_by_peft(base, adapter, fresh)
    if dora:
        compare(merge_lora(base, adapter), expected, 8)
        return
    result = merge_lora(base, adapter)
    for name, x in expected.items():  # torch may sum a convolution in another order
        assert np.allclose(values(result, name), x, rtol=0, atol=1e-7), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
)
def test_tied_weights_come_apart_and_the_model_computes_the_same(
    trained: Build, options: dict[str, Any], tmp_path: Path
) -> None:
    """PEFT itself would change both of two tied weights."""
    base, adapter = trained(llama(tie_word_embeddings=True), r=4, **options)
    assert base.aliases
    tokens = torch.arange(10)[None]
    before = with_adapter(base, adapter)(tokens).logits
    result = merge_lora(base, adapter)
    assert not result.aliases
    assert "now stored apart" in " ".join(map(str, result.notices))
    assert result.extras["hf/config.json"]["tie_word_embeddings"] is False
    config = transformers.LlamaConfig(**result.extras["hf/config.json"])
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict({name: torch.from_numpy(values(result, name)) for name in result.parameters})
    assert torch.allclose(model(tokens).logits, before, atol=1e-5)


@pytest.mark.slow
def test_tied_weights_that_are_not_adapted_stay_tied(trained: Build) -> None:
    base, adapter = trained(llama(tie_word_embeddings=True), r=4, target_modules=["q_proj"])
    result = merge_lora(base, adapter)
    assert result.aliases == base.aliases
    compare(result, merged_by_peft(base, adapter))


@pytest.mark.slow
def test_scale_multiplies_the_updates(trained: Build) -> None:
    base, adapter = trained(llama(), r=4, lora_alpha=6, target_modules=["q_proj"])
    name = "model.layers.0.self_attn.q_proj"
    model = with_adapter(base, adapter)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.3)
    expected = array(model.merge_and_unload().state_dict()[f"{name}.weight"])
    assert bits(values(merge_lora(base, adapter, 0.3), f"{name}.weight")) == bits(expected)
    assert bits(values(merge_lora(base, adapter, 0), f"{name}.weight")) == bits(values(base, f"{name}.weight"))
    with pytest.raises(InvalidArgumentError, match="finite"):
        merge_lora(base, adapter, float("inf"))


@pytest.mark.slow
def test_a_prefix_of_the_inner_model_may_differ(trained: Build) -> None:
    base, adapter = trained(llama(), r=4, target_modules=ATTENTION, modules_to_save=["lm_head"])
    expected = merged_by_peft(base, adapter)
    for change in (lambda n: n.removeprefix("model."), lambda n: f"module.{n}"):
        moved = replace(base, parameters={change(n): replace(p, name=change(n)) for n, p in base.parameters.items()})
        compare(merge_lora(moved, adapter), {change(n): x for n, x in expected.items()})
    twice = replace(base, parameters={f"{part}.{n}": p for n, p in base.parameters.items() for part in ("a", "b")})
    with pytest.raises(UnsupportedError, match=r"could be several weights of the model: a.model"):
        merge_lora(twice, adapter)
    with pytest.raises(IncompleteError, match=r"it has no weights for 6 modules of the adapter: model.layers"):
        merge_lora(base.select(skip=["layers"]), adapter)


@pytest.mark.slow
def test_a_head_that_the_model_lacks_is_added(trained: Build) -> None:
    base, adapter = trained(llama(), r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    headless = base.select(skip=["lm_head"])
    result = merge_lora(headless, adapter)
    assert bits(values(result, "lm_head.weight")) == bits(values(adapter, "base_model.model.lm_head.weight"))
    assert "which the model does not have: lm_head.weight" in " ".join(map(str, result.notices))


@pytest.mark.slow
def test_a_slice_reads_only_what_it_needs(trained: Build) -> None:
    base, adapter = trained(llama(), r=4, target_modules=["q_proj", "down_proj"])
    result = merge_lora(base, adapter)
    assert set(result.identities) == {*base.identities, *adapter.identities}
    weight = result.parameters["model.layers.1.mlp.down_proj.weight"].weight  # 32 outputs of 48 inputs
    for box, (rows, columns) in {((5, 0), (7, 48)): (2, 48), ((0, 3), (32, 4)): (32, 1)}.items():
        with Counting() as reader:
            read(weight.crop(Box(*box)), reader)
        limit = 4096 if columns == 1 else rows * columns * 4  # bytes between the rows of a column are read, too
        assert reader.nbytes["base"] <= max(limit, 48 * 32 * 4)
        assert rows * 4 * 4 + 4 * columns * 4 <= reader.nbytes["adapter"] <= rows * 4 * 4 + 4 * 48 * 4
    with Counting() as reader:
        read(weight.crop(Box((5, 0), (7, 48))), reader)
    assert reader.nbytes == {"base": 2 * 48 * 4, "adapter": 2 * 4 * 4 + 4 * 48 * 4}
    with Counting() as reader:
        read(result.parameters["model.norm.weight"].weight, reader)
    assert reader.nbytes == {"base": 32 * 4}


@pytest.mark.slow
def test_a_slice_of_dora_reads_the_rows_of_its_norms_once(trained: Build) -> None:
    base, adapter = trained(llama(), r=4, use_dora=True, target_modules=["down_proj"])
    weight = merge_lora(base, adapter).parameters["model.layers.1.mlp.down_proj.weight"].weight
    for times in (2, 1):  # first for the norms, then for the values
        with Counting() as reader:
            read(weight.crop(Box((5, 0), (7, 48))), reader)
        assert reader.nbytes["base"] == times * 2 * 48 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        ({"peft_type": "LOHA"}, UnsupportedError, "type 'LOHA' are not merged"),
        ({"peft_type": None}, UnsupportedError, "type None"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedError, "changes the model's own weights"),
        ({"init_lora_weights": ["x"]}, UnsupportedError, "changes the model's own weights"),
        ({"lora_bias": True}, UnsupportedError, "not supported: lora_bias"),
        ({"target_parameters": ["mlp.experts.w1"]}, IncompleteError, "no updates of the parameters .*: mlp.experts.w1"),
        ({"layer_replication": [[0, 1]]}, UnsupportedError, "not supported: layer_replication"),
        ({"something_new": 1}, UnsupportedError, "not supported: something_new"),
        ({"r": 8}, UnsupportedError, "has rank 4, but adapter_config.json states 8"),
        ({"lora_alpha": "many"}, CorruptError, "`lora_alpha` is not a number: 'many'"),
        ({"lora_alpha": float("nan")}, CorruptError, "`lora_alpha` is not a number"),
        ({"lora_alpha": 10**400}, CorruptError, "`lora_alpha` is not a number"),
        ({"modules_to_save": "lm_head"}, CorruptError, "`modules_to_save` is not a list"),
        ({"rank_pattern": [1]}, CorruptError, "`rank_pattern` is not a table"),
        ({"alpha_pattern": {"(a|b|ab)*x": 3}}, UnsafeError, "may take too long"),
        ({"use_dora": True}, IncompleteError, "lacks lora_magnitude_vector"),
    ],
)
def test_merge_refuses_unknown_adapters(
    trained: Build, edit: dict[str, Any], error: type[CkptError], message: str
) -> None:
    base, adapter = trained(llama(), edit=edit, r=4, target_modules=["q_proj"])
    with pytest.raises(error, match=message):
        merge_lora(base, adapter)


@pytest.mark.slow
def test_tensors_that_do_not_fit_are_refused(trained: Build) -> None:
    base, adapter = trained(llama(), r=4, target_modules=["q_proj"])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    weight = "model.layers.0.self_attn.q_proj.weight"

    def changed(source: Checkpoint, **arrays: Any) -> Checkpoint:
        new = {n.replace("__", "."): checkpoint({n.replace("__", "."): x}) for n, x in arrays.items()}
        return replace(source, parameters={**source.parameters, **{n: c.parameters[n] for n, c in new.items()}})

    def cast(source: Checkpoint, name: str, dtype: Any) -> Checkpoint:
        return changed(source, **{name: np.zeros(source.parameters[name].weight.shape, dtype)})

    cases = [
        (base, replace(adapter, extras={}), NotFoundError, "no adapter_config.json"),
        (base, replace(adapter, parameters={}), IncompleteError, "holds no tensors"),
        (base, adapter.select(skip=[name.replace("lora_A", "lora_B")]), IncompleteError, "lacks lora_B"),
        (base, changed(adapter, **{name: np.zeros((4, 31), np.float32)}), UnsupportedError, "cannot be added"),
        (base, cast(adapter, name, np.int8), UnsupportedError, "holds int8 values"),
        (base, changed(adapter, base_model__model__x__lora_C=np.zeros(1)), UnsupportedError, "are not known: .*lora_C"),
        (base, changed(adapter, base_model__model__x__y=np.zeros(1)), UnsupportedError, "are not known: x.y"),
        (base, changed(adapter, **{f"{name[:-14]}.lora_B.bias": np.zeros(1)}), UnsupportedError, "`lora_bias`"),
        (
            base,
            changed(adapter, **{f"{name[:-14]}.lora_magnitude_vector": np.zeros(32)}),
            UnsupportedError,
            "without need",
        ),
        (
            base,
            changed(adapter, base_model__model__lm_head__weight=np.zeros((66, 32))),
            UnsupportedError,
            "has the shape",
        ),
        (
            base,
            changed(adapter, base_model__model__lm_head__weight=np.zeros((64, 32), np.int8)),
            UnsupportedError,
            "int8",
        ),
        (cast(base, weight, ml_dtypes.float8_e4m3fn), adapter, UnsupportedError, "to which nothing can be added"),
        (cast(base, weight, np.int8), adapter, UnsupportedError, "to which nothing can be added"),
    ]
    for model, other, error, message in cases:
        with pytest.raises(error, match=message):
            merge_lora(model, other)


@pytest.mark.slow
def test_results_are_written_like_any_checkpoint(trained: Build, tmp_path: Path) -> None:
    base, adapter = trained(llama(tie_word_embeddings=True), torch.bfloat16, r=4, target_modules=["q_proj", "lm_head"])
    result = merge_lora(base, adapter)
    target = tmp_path / "merged"
    save(result, target, writable("hf"), resources=Execution(2, 1 << 20))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    compare(result, {name: array(tensor) for name, tensor in model.state_dict().items()})
    half = average([open_checkpoint(target), result, result])
    save(half, tmp_path / "mean.safetensors", writable("safetensors"), resources=Execution(2, 1 << 16))
    again = open_checkpoint(tmp_path / "mean.safetensors")
    assert {name: bits(values(again, name)) for name in again.parameters} == {
        name: bits(values(result, name)) for name in result.parameters
    }
