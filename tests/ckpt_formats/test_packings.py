"""Packings against NumPy, by definition: both directions, any block read alone, sizes that do not fit."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_formats.core import views
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, slabs
from ckpt_formats.core.tensor import Array, FileBlob, Tensor, checked_read, read, with_replicas
from ckpt_formats.names.expressions import Scope, parse_expression
from ckpt_formats.names.packings import Atom, Node, Packing, atoms_of, pack, parse_packing, stored_shape, unpack
from held import array, assert_shows, bits, folder, scattered, tensor

DTYPE = DTYPES["bfloat16"]
Atoms = dict[str, Array]


def expected(node: Node, arrays: Callable[[str, int | None], Array], expert: int | None = None) -> Array:
    """What a tree stores, row by row, as its definition states. Sizes are literals."""
    if isinstance(node, Atom):
        return arrays(node.name, expert)
    size: Any = eval(node.size.text) if node.size else None
    if node.kind == "each":
        return np.stack([expected(node.parts[0], arrays, e) for e in range(size)])
    parts = [expected(part, arrays, expert) for part in node.parts]
    (first, *_) = parts
    if node.kind == "by":
        each = [(part, len(part) // size) for part in parts]
        rows = [part[g * rows + i] for g in range(size) for part, rows in each for i in range(rows)]
        return np.array(rows, DTYPE).reshape(len(rows), *first.shape[1:])
    if node.kind == "rope":
        half = len(first) // size // 2
        order = [(2 * head + part) * half + i for head in range(size) for i in range(half) for part in range(2)]
        return first[order]
    if node.kind == "turned":
        heads = np.split(first, size)
        return np.stack([[[row[i] for row in rows] for i in range(rows.shape[1])] for rows in heads]).astype(DTYPE)
    if node.kind == "T":
        return np.array([[row[i] for row in first] for i in range(first.shape[1])], DTYPE).reshape(first.shape[::-1])
    return first.reshape(size) if node.kind == "shaped" else first


def divisors(n: int) -> list[int]:
    return [d for d in range(1, max(n, 3) + 1) if n % d == 0]


@st.composite
def matrices(draw: st.DrawFn, shape: tuple[int, int], shapes: dict[str, Shape], depth: int = 3) -> str:
    """A tree that stores a matrix of this shape. Adds the shapes of its atoms to `shapes`."""
    kinds = ["by", "T", "rope", "turned", "shaped", "pad", "copy", "atom"] if depth else ["atom"]
    kind, (rows, columns) = draw(st.sampled_from(kinds)), shape

    def inner(*inside: int) -> str:
        return draw(matrices((inside[0], inside[1]), shapes, depth - 1))

    if kind == "by":
        groups = draw(st.sampled_from(divisors(rows)))
        ends = sorted(draw(st.lists(st.integers(0, rows // groups), max_size=2)))
        widths = np.diff([0, *ends, rows // groups])
        return f"by({groups}, {', '.join(inner(groups * int(width), columns) for width in widths)})"
    if kind == "rope" and rows % 2 == 0:
        return f"rope({draw(st.sampled_from(divisors(rows // 2)))}, {inner(rows, columns)})"
    if kind == "T":
        return f"T({inner(columns, rows)})"
    if kind == "shaped" and rows * columns:
        first = draw(st.sampled_from(divisors(rows * columns)))
        return f"shaped([{rows}, {columns}], {inner(first, rows * columns // first)})"
    if kind == "turned" and rows * columns:
        first = draw(st.sampled_from(divisors(rows * columns)))
        heads = draw(st.sampled_from(divisors(first)))
        return f"shaped([{rows}, {columns}], turned({heads}, {inner(first, rows * columns // first)}))"
    if kind in ("pad", "copy"):
        return f"{kind}({inner(rows, columns)})"
    name = f"atoms.a{len(shapes)}"
    shapes[name] = shape
    return name


@pytest.fixture(params=["small", "usual"], autouse=True, scope="module")
def _limits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Limits that no small tensor reaches, and such that each does."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "small":
            sizes = {"_WINDOW": 40, "_TILE": 200, "_WHOLE_ROWS": 10, "_FEW_GROUPS": 1, "_FEW_FRAGMENTS": 4}
            for name, value in sizes.items():
                patch.setattr(views, name, value)
        yield


@given(st.data())
def test_tree_packs_and_unpacks_as_numpy_does(data: st.DataObject) -> None:
    shapes: dict[str, Shape] = {}
    experts = data.draw(st.sampled_from([0, 0, 1, 3]))
    text = data.draw(matrices(data.draw(st.tuples(st.integers(0, 12), st.integers(0, 6))), shapes))
    node = parse_packing(f"each({experts}, {text})" if experts else text)
    seeds = {name: seed for seed, name in enumerate(atoms_of(node))}

    def shape(name: str, scope: Scope) -> Shape:
        return shapes[name]

    def atom(name: str, expert: object) -> Array:
        return array(DTYPE, shapes[name], seeds[name] * 10 + (expert if isinstance(expert, int) else 9))

    values = expected(node, atom)
    assert stored_shape(node, {}, shape) == values.shape
    packed = pack(node, {}, lambda name, scope: tensor(atom(name, scope.get("expert"))), shape)
    assert_shows(packed, values, data)
    with folder() as at:
        for stored in (data.draw(scattered(at, values)), packed):
            unpacked = unpack(node, stored, {"other": 1}, shape)
            assert [name for name, _, _ in unpacked] == list(atoms_of(node)) * (experts or 1)
            for name, scope, one in unpacked:
                assert scope["other"] == 1
                assert bits(read(one)) == bits(atom(name, scope.get("expert")))
            assert_shows(one, atom(name, scope.get("expert")), data)


def test_stack_of_stacks_has_the_inner_index_as_expert() -> None:
    """An outer stack may be of layers, so the inner one decides."""
    node = parse_packing("each(2, each(3, a))")
    stored = tensor(array(DTYPE, (2, 3, 4)))
    assert [scope["expert"] for _, scope, _ in unpack(node, stored, {}, lambda name, scope: (4,))] == [0, 1, 2] * 2


def test_padding_is_left_out_and_not_written() -> None:
    node = parse_packing("pad(table)")
    table = array(DTYPE, (5, 2))
    ((_, _, actual),) = unpack(node, tensor(table), {}, lambda name, scope: (3, 2))
    assert bits(read(actual)) == bits(table[:3])
    assert pack(node, {}, lambda name, scope: actual, lambda name, scope: (3, 2)).shape == (3, 2)


SIZES: dict[str, object] = {"heads": 4, "groups": 2, "width": 3, "hidden": 5, "vocabulary": 7}
SHAPES = {"q": "heads*width", "k": "groups*width", "embed": "vocabulary", "u": "groups", "v": "width"}


def shape_of(name: str, scope: Scope) -> Shape:
    rows = scope
    for factor in ("heads*width", "groups*width"):
        if SHAPES[name] == factor:
            a, b = factor.split("*")
            return int(str(rows[a])) * int(str(rows[b])), int(str(rows["hidden"]))
    return (int(str(rows[SHAPES[name]])), int(str(rows["hidden"])))


@pytest.mark.parametrize(
    ("text", "shape", "stored"),
    [
        ("by(groups, q, k, k)", (23, 5), (24, 5)),
        ("by(groups, q, k, k)", (24, 6), (24, 5)),
        ("by(groups, q, k, k)", (24,), (24, 5)),
        ("T(q)", (12, 5), (5, 12)),
        ("T(q)", (5,), (5, 12)),
        ("pad(embed)", (6, 5), (7, 5)),
        ("pad(embed)", (8, 4), (7, 5)),
        ("pad(embed)", (), (7, 5)),
        ("copy(embed)", (8, 5), (7, 5)),
        ("by(1, pad(embed))", (8, 5), (7, 5)),
        ("each(3, q)", (2, 12, 5), (3, 12, 5)),
        ("each(3, q)", (3, 5, 12), (3, 12, 5)),
        ("each(3, T(q))", (), (3, 5, 12)),
        ("rope(2, q)", (6, 10), (12, 5)),
        ("turned(4, q)", (4, 3, 5), (4, 5, 3)),
        ("shaped([6, 10], q)", (12, 5), (6, 10)),
    ],
)
def test_tensor_of_another_shape_is_refused(text: str, shape: Shape, stored: Shape) -> None:
    with pytest.raises(CorruptError) as caught:
        unpack(parse_packing(text), tensor(np.zeros(shape, DTYPE)), SIZES, shape_of)
    assert str(caught.value) == f"has the shape {list(shape)}, but the model's sizes give {list(stored)}"


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("by(n, q, k)", 5, "q has 12 rows, which cannot be divided into `n` = 5 groups"),
        ("by(n, q, k)", 12, "k has 6 rows, which cannot be divided into `n` = 12 groups"),
        ("by(n, q, k)", 0, "q has 12 rows, which cannot be divided into `n` = 0 groups"),
        ("by(n, q, k)", 1 << 62, "= 4611686018427387904 groups"),
        ("by(n, q, k)", 1 << 80, "`n` cannot be computed with n = an integer of 81 bits"),
        ("by(n, q, k)", "2", "`n` is '2': it must be an integer >= 0"),
        ("by(n, q, k)", True, "`n` is True"),
        ("by(n, q, k)", [2], "`n` is a list of 1"),
        ("by(n, T(q), k)", 1, "q, k have the shapes [5, 12], [6, 5], which differ in more than their rows"),
        ("rope(n, q)", 4, "q has 12 rows, which cannot be divided into `n` = 4 heads of 2 halves"),
        ("turned(n, q)", 5, "q has 12 rows, which cannot be divided into `n` = 5 groups"),
        ("turned(n, each(2, q))", 2, "q has the shape [2, 12, 5], which is not that of a matrix"),
        ("each(n, q)", 0, "`n` is 0: a stack has 1 to 1,048,576 tensors"),
        ("each(n, q)", 1 << 40, "a stack has 1 to 1,048,576 tensors"),
        ("each(n, q)", None, "`n` is None"),
        ("T(each(n, q))", 2, "q has the shape [2, 12, 5], which is not that of a matrix"),
        ("shaped([n, 10], q)", 5, "q has the shape [12, 5], which cannot be reshaped to [5, 10]"),
        ("shaped([n, n], q)", "x", "reshaped to ['x', 'x']"),
        ("shaped([n, -10], q)", -6, "reshaped to [-6, -10]"),
        ("shaped([n, 60], q)", True, "reshaped to [True, 60]"),
        ("shaped(n, q)", 61, "reshaped to [61]"),
        ("shaped(n, q)", [[60]], "reshaped to [a list of 1]"),
    ],
)
def test_sizes_that_do_not_fit_are_named(text: str, size: object, message: str) -> None:
    node, scope = parse_packing(text), {**SIZES, "n": size}

    for attempt in (
        lambda: stored_shape(node, scope, shape_of),
        lambda: pack(node, scope, lambda name, _: tensor(np.zeros(shape_of(name, SIZES), DTYPE)), shape_of),
        lambda: unpack(node, tensor(np.zeros((12, 5), DTYPE)), scope, shape_of),
    ):
        with pytest.raises(CorruptError) as caught:
            attempt()
        assert message in str(caught.value)


def test_atoms_that_cannot_be_in_one_tensor_are_refused() -> None:
    def get(name: str, scope: Scope) -> Tensor:
        wide = name == "k" or scope.get("expert") == 1
        return tensor(np.zeros(shape_of(name, scope), np.float32 if wide else DTYPE))

    for text in ("by(2, q, k)", "each(2, q)"):
        with pytest.raises(CorruptError, match="tensors of bfloat16, float32 are to be stored in one"):
            pack(parse_packing(text), SIZES, get, shape_of)
    with pytest.raises(CorruptError, match=r"^q: has the shape \[1\], but the model's sizes give \[12, 5\]$"):
        pack(parse_packing("copy(q)"), SIZES, lambda name, scope: tensor(np.zeros(1, DTYPE)), shape_of)
    with pytest.raises(CorruptError, match=r"^a: tensors of \[1\], \[2\] are to be stored in one tensor$"):
        pack(
            parse_packing("each(2, a)"),
            {},
            lambda name, scope: tensor(np.zeros(1 + int(str(scope["expert"])))),
            lambda name, scope: (1 + int(str(scope["expert"])),),
        )


@pytest.mark.parametrize(
    "text",
    [
        *("by(2)", "by()", "T()", "T(a, b)", "each(a)", "rope(2, a, b)", "pad(1, a)", "other(a)", "f(a).b", "a + b"),
        *("1", "by(f(1), a)", "T(n=a)", "T(*a)", "a.b()", "(", "x.y(a)", "by(2, [a])"),
    ],
)
def test_parser_refuses_what_is_no_packing(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|another number|not allowed"):
        parse_packing(text)


def test_tree_is_as_written() -> None:
    node = parse_packing("each(experts, T(by(ffn * 2, experts.gate, up)))")
    inner = Packing("by", parse_expression("ffn * 2"), (Atom("experts.gate"), Atom("up")))
    assert node == Packing("each", parse_expression("experts"), (Packing("T", None, (inner,)),))
    assert atoms_of(node) == ("experts.gate", "up")


# --- how it is read ---


def packed_file(path: Path, values: Array) -> Tensor:
    path.write_bytes(values.tobytes())
    return Tensor.of(FileBlob.packed(path, 0, values.shape, values.dtype))


@pytest.fixture
def usual_limits(request: pytest.FixtureRequest) -> None:
    if "small" in request.node.name:
        pytest.skip("the number of fragments depends on the limits")


@pytest.mark.usefixtures("usual_limits")
def test_few_groups_are_ranges_of_files_and_many_are_one_blob(tmp_path: Path) -> None:
    values = {"a": array(DTYPE, (2400, 2), 1), "b": array(DTYPE, (1200, 2), 2)}
    shapes = {name: one.shape for name, one in values.items()}
    tensors = {name: packed_file(tmp_path / name, one) for name, one in values.items()}

    def packed(groups: int) -> Tensor:
        node = parse_packing(f"by({groups}, a, b)")
        return pack(node, {}, lambda name, scope: tensors[name], lambda name, scope: shapes[name])

    assert {type(fragment.blob) for fragment in packed(8).fragments} == {FileBlob}
    assert len(packed(8).fragments) == 16
    assert len(packed(1200).fragments) == 1
    stored = packed_file(tmp_path / "stored", read(packed(8)))
    for groups, fragments in ((8, 8), (1200, 1)):
        unpacked = unpack(parse_packing(f"by({groups}, a, b)"), stored, {}, lambda name, scope: shapes[name])
        assert [len(one.fragments) for _, _, one in unpacked] == [fragments, fragments]


@pytest.mark.usefixtures("usual_limits")
def test_experts_that_are_stacked_and_unstacked_are_the_same_files(tmp_path: Path) -> None:
    experts = [packed_file(tmp_path / str(i), array(DTYPE, (6, 4), i)) for i in range(300)]
    node = parse_packing("each(300, T(a))")
    stored = pack(node, {}, lambda name, scope: experts[int(str(scope["expert"]))], lambda name, scope: (6, 4))
    assert len(stored.fragments) == 1
    assert [one for _, _, one in unpack(node, stored, {}, lambda name, scope: (6, 4))] == experts


def test_transposed_matrix_is_read_a_few_times_slab_after_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = array(DTYPE, (64, 100))
    monkeypatch.setattr(views, "_TILE", values.nbytes // 2)
    monkeypatch.setattr(views, "_WHOLE_ROWS", 1 << 10)
    view = views.transposed(packed_file(tmp_path / "a", values))
    read_nbytes = 0

    def observe(path: Path, offset: int, content: memoryview) -> None:
        nonlocal read_nbytes
        read_nbytes += len(content)

    with Reader(check=False) as reader, reader.observed(observe):
        for box in slabs(view.shape, 130):
            assert bits(read(view.crop(box), reader)) == bits(values.T[box.index].copy())
    assert read_nbytes == 2 * values.nbytes


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("text", ["by(2, a, a)", "by(4, a, a)", "rope(2, a)", "T(a)", "each(2, a)", "T(by(4, a, a))"])
def test_replicas_are_compared_through_a_view(text: str, differs: bool) -> None:
    node, first = parse_packing(text), np.arange(24, dtype=np.float32).reshape(8, 3)
    second = first + differs

    def read_all(tensors: Iterable[Tensor]) -> None:
        for one in tensors:
            checked_read(one)

    def packed(atom: Tensor) -> Tensor:
        return pack(node, {}, lambda name, scope: atom, lambda name, scope: (8, 3))

    replicated = packed(with_replicas([tensor(first), tensor(second)]))
    stored = with_replicas([tensor(read(packed(tensor(first)))), tensor(read(packed(tensor(second))))])
    parts = [one for _, _, one in unpack(node, stored, {}, lambda name, scope: (8, 3))]
    for tensors in ([replicated], parts):
        with pytest.raises(CorruptError, match="replicas of one tensor differ") if differs else nullcontext():
            read_all(tensors)


@pytest.mark.parametrize("groups", [0, 2, 5])
def test_rows_that_are_not_divisible_are_refused(groups: int) -> None:
    whole = tensor(np.zeros((9, 2)))
    for attempt in (
        lambda: views.group_rows(whole, groups, 0, 1),
        lambda: views.interleaved([whole, whole], groups),
        lambda: views.pairs_of_rotary(whole, groups),
        lambda: views.halves_of_rotary(whole, groups),
        lambda: views.group_rows(tensor(np.zeros(())), 1, 0, 1),
    ):
        with pytest.raises(UnsupportedError, match="are not divisible by"):
            attempt()


def test_block_of_many_groups_names_only_its_own_ranges_of_files(tmp_path: Path) -> None:
    """What is read of stores is requested before by these ranges."""
    rows = packed_file(tmp_path / "a", np.arange(4000, dtype=np.int32).reshape(2000, 2))
    blob = views.InterleavedBlob((rows, rows), 1000, Box.whole((4000, 2)))
    block = blob.crop(Box((1001, 0), (1011, 2)))  # from the second half of group 250 to the first of group 252
    ranges = [(raw.offset // 8, raw.offset // 8 + raw.shape[0]) for raw in block.sources()]
    assert ranges == [(501, 502), (500, 502), (502, 504), (502, 504), (504, 506), (504, 505)]
