"""Merges of models: held against their formulas on whole tensors, and against themselves cut into other blocks."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.combine import average, merge
from ckpt.combine.task_blob import drawing_key, drawn
from ckpt.combine.whole_tensor import Once, flat_indices, threshold_of_largest
from ckpt.job import save
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import IncompleteError, InvalidArgumentError, NoMatchError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import ArrayBlob, Tensor, read
from ckpt_formats.core.values import TensorName
from held import bits, checkpoint, parameter
from oracle import merges

SHAPE = (11, 17)
NAME = "model.layers.0.mlp.weight"


def model(arrays: Mapping[str, Any], path: str = "m", **more: Any) -> Checkpoint:
    return checkpoint(
        [parameter(name, {"model": np.asarray(x)}) for name, x in arrays.items()], path=Path(path), **more
    )


def family(dtype: str, count: int = 3, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> list[Any]:
    """A base and models tuned from it. Of bfloat16, many differences are equal."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(shape)
    tuned = [base + 0.05 * rng.standard_normal(shape) for _ in range(count)]
    return [one.astype(DTYPES[dtype]) for one in (base, *tuned)]


def weight(merged: Checkpoint, name: str = NAME) -> Tensor:
    return merged.parameters[name].weight


def rounded(values: Any, dtype: str) -> Any:
    """Float64 values in a type that float32 holds, rounded as `average` does, which has tests of its own."""
    return read(weight(average([model({NAME: np.zeros(values.shape, DTYPES[dtype])}), model({NAME: values})], [0, 1])))


METHODS: dict[str, dict[str, Any]] = {
    "task-arithmetic": {"weights": [0.7, 0.4, -0.2], "scale": 0.9},
    "ties": {"weights": [1, 0.5, 0.25], "density": [0.5, 0.2, 0.9]},
    "dare-linear": {"weights": [0.7, 0.4, 0.1], "density": 0.3, "seed": 5},
    "dare-ties": {"weights": [0.7, 0.4, 0.1], "density": [0.3, 0.6, 1], "seed": 6, "normalize": True},
}


def kept_of(method: str, number: int, density: float, difference: Any, seed: int) -> Any:
    if density >= 1 or method == "task-arithmetic":
        return 1.0
    if method == "ties":
        return merges.largest(difference, density)
    key = drawing_key(seed, NAME, number)
    return drawn(key, density, np.arange(difference.size, dtype=np.uint64)).reshape(difference.shape) * (1 / density)


def expected(method: str, arrays: Sequence[Any], options: Mapping[str, Any]) -> Any:
    base, *models = (one.astype(np.float64) for one in arrays)
    density = options.get("density", 1.0)
    densities = density if isinstance(density, list) else [density] * len(models)
    differences = [one - base for one in models]
    kept = [d * kept_of(method, i, densities[i], d, options.get("seed", 0)) for i, d in enumerate(differences)]
    normalize = options.get("normalize", method == "ties")
    weights = options.get("weights", [1.0] * len(models))
    return merges.merged(base, kept, weights, method.endswith("ties"), normalize, options.get("scale", 1.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("method", METHODS)
def test_differences_are_merged_as_the_formula_says(method: str, dtype: str) -> None:
    arrays = family(dtype)
    base, *models = (model({NAME: one}, str(i)) for i, one in enumerate(arrays))
    result = weight(merge(models, method, base=base, **METHODS[method]))
    assert bits(read(result)) == bits(rounded(expected(method, arrays, METHODS[method]), dtype))
    for box in (Box((3, 0), (4, 17)), Box((0, 7), (11, 8)), Box((5, 5), (9, 16))):
        assert bits(read(result.crop(box))) == bits(read(result)[box.index])
        assert bits(read(result.crop(box).crop(Box((1, 0), box.shape)))) == bits(read(result)[box.index][1:])


@pytest.mark.parametrize("method", ["slerp", "ties", "dare-linear"])
def test_blocks_of_any_size_have_the_same_bits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = family("bfloat16", 2, (3, 40, 7))
    options: dict[str, Any] = {
        "slerp": {"t": 0.3},
        "ties": {"density": 0.4},
        "dare-linear": {"density": 0.4, "rescale": "l1"},
    }[method]

    def result() -> Any:
        base, *models = (model({NAME: one}, str(i)) for i, one in enumerate(arrays))
        return read(weight(merge(models, method, base=None if method == "slerp" else base, **options)))

    once = result()
    for module in ("average_blob", "task_blob"):
        monkeypatch.setattr(f"ckpt.combine.{module}.BLOCK", 11)
    assert bits(result()) == bits(once)
    monkeypatch.setattr("ckpt.combine.whole_tensor.BLOCK", 13)
    if method == "ties":  # the other methods form sums, whose blocks are those of `BLOCK`
        assert bits(result()) == bits(once)


def test_slerp_is_on_the_arc() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, *SHAPE)).astype(np.float32)
    for t in (0.0, 0.3, 1.0):
        result = read(weight(merge([model({NAME: a}), model({NAME: b})], "slerp", t=t)))
        exact = merges.slerp(a.astype(np.float64), b.astype(np.float64), t)
        assert np.abs(result - exact).max() <= np.spacing(np.abs(exact).max().astype(np.float32))
    near = read(weight(merge([model({NAME: a}), model({NAME: a * 2})], "slerp", t=0.25)))
    assert bits(near) == bits((a.astype(np.float64) * 0.75 + 2 * a.astype(np.float64) * 0.25).astype(np.float32))
    zero = read(weight(merge([model({NAME: a}), model({NAME: np.zeros_like(a)})], "slerp", t=0.5)))
    assert np.allclose(zero, np.sin(np.pi / 4) * a, rtol=1e-6)  # a right angle, as in mergekit


def test_linear_is_the_average_or_the_sum() -> None:
    arrays = family("bfloat16", 1)
    models = [model({NAME: one}) for one in arrays]
    mean = merge(models, "linear", weights=[1, 3])
    assert bits(read(weight(mean))) == bits(read(weight(average(models, [1, 3]))))
    wide = [one.astype(np.float64) for one in arrays]
    total = weight(merge(models, "linear", weights=[1, 3], normalize=False))
    assert bits(read(total)) == bits(rounded(wide[0] + 3 * wide[1], "bfloat16"))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1, -1, 2, 1e-40, 3e38, np.inf, np.nan]), min_size=1, max_size=40), st.data()
)
def test_just_so_many_of_the_largest_are_kept(values: list[float], data: st.DataObject) -> None:
    difference = np.array(values, np.float32)
    count = data.draw(st.integers(1, difference.size))
    with Reader(check=False) as reader:
        base = ArrayBlob(np.zeros_like(difference))
        least, end = threshold_of_largest(ArrayBlob(difference), base, count, reader)
    sizes = np.abs(difference).view(np.uint32)
    kept = (sizes > least) | ((sizes == least) & (np.arange(sizes.size) < end))
    order = np.argsort(-(sizes.astype(np.int64)), kind="stable")
    assert np.flatnonzero(kept).tolist() == sorted(order[:count].tolist())


def test_draws_are_as_many_as_the_density_and_independent() -> None:
    indices = np.arange(1 << 18, dtype=np.uint64)
    for density in (0.1, 0.5, 0.93):
        ones = drawn(drawing_key(0, "a", 0), density, indices) - density
        deviation = np.sqrt(density * (1 - density))
        assert abs(ones.sum()) < 5 * deviation * np.sqrt(indices.size)
        others = [
            drawn(drawing_key(*key), density, indices) - density for key in ((1, "a", 0), (0, "b", 0), (0, "a", 1))
        ]
        for other in (*others, np.roll(ones, 1)):
            assert abs((ones * other).sum()) < 5 * deviation**2 * np.sqrt(indices.size)
    box = Box((2, 1, 3), (4, 5, 6))
    grid = np.arange(7 * 6 * 9, dtype=np.uint64).reshape(7, 6, 9)
    assert flat_indices(box, grid.shape).tolist() == grid[box.index].reshape(-1).tolist()
    assert flat_indices(Box((), ()), ()).tolist() == [0]


def test_rescaling_restores_the_sum_of_sizes_or_is_left_out() -> None:
    base, tuned = (one.astype(np.float64) for one in family("float32", 1, (300, 40)))
    sources = {"base": model({NAME: base}), "models": [model({NAME: tuned})]}
    plain, l1 = (
        read(weight(merge(method="dare-linear", density=0.2, rescale=how, **sources))) - base for how in ("none", "l1")
    )
    mask = plain != 0
    assert np.allclose(plain[mask], (tuned - base)[mask], rtol=1e-9, atol=1e-12)
    assert np.isclose(np.abs(l1).sum(), np.abs(tuned - base).sum(), rtol=1e-9)
    assert ((l1 != 0) == mask).all()


def test_settings_may_differ_by_name_and_layer() -> None:
    rng = np.random.default_rng(2)
    names = ["embed.w", *(f"layers.{i}.{part}.w" for i in range(5) for part in ("attn", "mlp")), "head.w"]
    a, b = ({name: rng.standard_normal(8).astype(np.float64) for name in names} for _ in range(2))
    where = {"attn": {"t": [0, 1, 0.5]}, r"layers\.[34]\.mlp": {"t": 1}, "layers": {"t": 0.25}}
    result = merge([model(a), model(b)], "slerp", t=[0.1, 0.9], where=where)
    stated = {f"layers.{i}.attn.w": t for i, t in enumerate((0, 0.5, 1, 0.75, 0.5))}
    stated |= {f"layers.{i}.mlp.w": t for i, t in enumerate((0.25, 0.25, 0.25, 1, 1))}
    for name, t in {**stated, "embed.w": 0.1, "head.w": 0.9}.items():
        assert np.allclose(read(weight(result, name)), merges.slerp(a[name], b[name], t), rtol=1e-12), name
    base = {name: np.zeros(8) for name in names}
    result = merge([model(a), model(b)], "task-arithmetic", base=model(base), where={"mlp": {"weights": [2, 0]}})
    assert np.allclose(read(weight(result, "layers.1.mlp.w")), 2 * a["layers.1.mlp.w"])
    assert np.allclose(read(weight(result, "layers.1.attn.w")), a["layers.1.attn.w"] + b["layers.1.attn.w"])


def test_odd_tensors_are_merged_or_refused() -> None:
    first = {"one": np.float32(1), "none": np.zeros((0, 3), np.float16), "ids": np.arange(3)}
    other = {**first, "one": np.float32(3)}
    base = {**first, "one": np.float32(0)}
    for method in ("ties", "dare-ties"):
        result = merge([model(first), model(other)], method, base=model(base), density=0.5, rescale=None)
        assert read(weight(result, "none")).shape == (0, 3)
        assert read(weight(result, "ids")).tolist() == [0, 1, 2]
    assert read(weight(merge([model(first), model(other)], "ties", base=model(base), density=0.5), "one")) == 2
    assert read(weight(merge([model(first), model(other)], "slerp", t=0.5), "one")) == 2
    with pytest.raises(UnsupportedError, match="complex"):
        merge([model({"c": np.ones(2, np.complex64)})] * 2, "slerp", t=0.5)
    with pytest.raises(IncompleteError, match="lacks 1 tensors of b: y"):
        merge([model({"x": np.ones(2)}, "m")], "ties", base=model({"x": np.ones(2), "y": np.ones(1)}, "b"), density=0.5)
    with pytest.raises(UnsupportedError, match=r"x \[3\] instead of \[2\]"):
        merge([model({"x": np.ones(2)}), model({"x": np.ones(3)})], "linear")


def test_nan_spreads_and_is_counted(tmp_path: Path) -> None:
    arrays = family("float32", 2)
    arrays[1][2, 3] = np.nan
    base, *models = (model({NAME: one}, str(i)) for i, one in enumerate(arrays))
    result = save(merge(models, "ties", base=base, density=0.3), tmp_path / "t.safetensors")
    assert [(one.name, one.not_finite) for one in result.changed] == [(NAME, 1)]


def test_a_value_of_a_whole_tensor_is_computed_once_and_again_in_a_copy() -> None:
    calls: list[int] = []
    once = Once(lambda reader: calls.append(1) or 7)
    with Reader(check=False) as reader:
        assert [once.get(reader), once.get(reader), len(calls)] == [7, 7, 1]
        arrays = family("float32", 1)
        base, tuned = (model({NAME: one}) for one in arrays)
        result = weight(merge([tuned], "ties", base=base, density=0.5))
        before = read(result)
        assert bits(read(pickle.loads(pickle.dumps(result)))) == bits(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "slerp"}, "slerp needs t"),
        ({"method": "slerp", "t": 1.5}, "from 0 to 1"),
        ({"method": "slerp", "t": 0.5, "density": 0.5}, "slerp has no density"),
        ({"method": "ties", "base": True}, "ties needs density"),
        ({"method": "ties", "base": True, "density": 0}, "above 0"),
        ({"method": "ties", "base": True, "density": [0.5, 0.5, 0.5]}, "3 densities for 2 models"),
        ({"method": "ties", "density": 0.5}, "needs the base"),
        ({"method": "linear", "base": True}, "has no base"),
        ({"method": "linear", "weights": [1]}, "1 weights for 2 models"),
        ({"method": "linear", "weights": [1, -1]}, "above zero"),
        ({"method": "linear", "weights": [1, np.nan]}, "finite"),
        ({"method": "linear", "scale": 2}, "linear has no scale"),
        ({"method": "task-arithmetic", "base": True, "seed": 1}, "no seed"),
        ({"method": "breadcrumbs"}, "'linear' or 'slerp'"),
        ({"method": "linear", "where": {"w": {"alpha": 1}}}, "no setting 'alpha'"),
        ({"method": "linear", "where": {"(": {"weights": [1, 2]}}}, "regular expression"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    one = model({NAME: np.ones(2, np.float32)})
    arguments = {**arguments, "base": one if arguments.get("base") else None}
    with pytest.raises(InvalidArgumentError, match=message):
        merge([one, one], **arguments)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    one = model({NAME: np.ones(2, np.float32)})
    with pytest.raises(NoMatchError, match="atn"):
        merge([one, one], "slerp", t=0.5, where={"atn": {"t": 1}})


def test_other_configurations_and_tokenizers_are_spoken_of() -> None:
    def with_files(theta: float, tokens: list[int], name: str) -> Checkpoint:
        config = {"rope_theta": theta, "transformers_version": name}
        vocabulary = parameter("hf/tokenizer.json", {"model": np.array(tokens, np.uint8)}, "extra")
        extras = {"hf/config.json": config, "hf/tokenizer.json": TensorName("hf/tokenizer.json")}
        return checkpoint([parameter("w", {"model": np.ones(2)}), vocabulary], extras=extras, path=Path(name))

    one, same, other = (
        with_files(theta, tokens, name)
        for theta, tokens, name in ((1, [1, 2], "a"), (1, [1, 2], "b"), (2, [1, 3], "c"))
    )
    assert average([one, same]).notices == ()
    texts = [str(notice) for notice in merge([one, other], "slerp", t=0.5).notices]
    assert texts == [
        "entries of config.json differ from those of c; the first checkpoint's are kept: rope_theta",
        "files of the tokenizer differ from those of c; the first checkpoint's are kept: tokenizer.json",
    ]
