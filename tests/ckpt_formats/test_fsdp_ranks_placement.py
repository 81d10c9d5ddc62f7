"""How tensors are cut over meshes, against PyTorch's own arithmetic."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from ckpt_formats.containers.torchfile import open_file
from ckpt_formats.core.errors import UnsafeError
from ckpt_formats.core.geometry import Box, missing, overlaps
from ckpt_formats.core.tensor import read
from ckpt_formats.engines.fsdp_ranks.dtensor import DTensor, gather
from ckpt_formats.engines.fsdp_ranks.mesh import Mesh
from ckpt_formats.engines.fsdp_ranks.placement import Placement, PlacementSpec, block_of_rank, without_strides


@st.composite
def specs(draw, strided: bool = True) -> PlacementSpec:
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    mesh = Mesh(sizes, tuple(draw(st.permutations(range(prod(sizes))))))
    axes = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    placements = []
    for _ in sizes:
        axis = draw(axes)
        factor = draw(st.integers(1, 5)) if strided and axis is not None else 1
        placements.append(Placement(axis, factor))
    return PlacementSpec(shape, mesh, tuple(placements), tuple(range(len(sizes))))


def as_torch(placement: Placement) -> object:
    if placement.axis is None:
        return Replicate()
    if placement.factor == 1:
        return Shard(placement.axis)
    return _StridedShard(placement.axis, split_factor=placement.factor)


def elements(spec: PlacementSpec, rank: int) -> list[tuple[Box, Box]]:
    return [(placed.shard, placed.full) for placed in block_of_rank(spec, rank).blocks()]


@given(specs())
def test_every_rank_has_the_shape_and_the_place_that_torch_computes(spec):
    for rank in spec.mesh.ranks:
        at = list(spec.mesh.coordinate(rank))
        placements = [as_torch(placement) for placement in spec.placements]
        shape, offset = _compute_local_shape_and_global_offset(spec.shape, spec.mesh.shape, at, placements)
        mine = block_of_rank(spec, rank)
        assert mine.shape == shape
        if prod(shape):
            assert min(whole.start for _, whole in elements(spec, rank)) == offset


@given(specs())
def test_every_rank_has_the_elements_that_torch_gives_it(spec):
    """Cut for real, one dimension of the mesh after another, by the function that torch scatters with."""
    whole = torch.arange(prod(spec.shape)).reshape(spec.shape)
    for rank in spec.mesh.ranks:
        theirs = whole
        for dim, (placement, i) in enumerate(zip(spec.placements, spec.mesh.coordinate(rank), strict=True)):
            if placement.axis is not None:
                pieces, _ = as_torch(placement)._split_tensor(theirs, spec.mesh.shape[dim], with_padding=False)
                theirs = pieces[i]
        mine = torch.full(block_of_rank(spec, rank).shape, -1)
        for local, place in elements(spec, rank):
            mine[local.index] = whole[place.index]
        assert torch.equal(mine, theirs)


@given(specs())
def test_the_ranks_of_each_copy_cover_the_whole_exactly_once(spec):
    copies: dict[tuple[int, ...], list[Box]] = {}
    for rank in spec.mesh.ranks:
        copies.setdefault(spec.copy(rank), []).extend(whole for _, whole in elements(spec, rank))
    for boxes in copies.values():
        assert missing(Box.whole(spec.shape), boxes) == []
        assert list(overlaps(boxes)) == []


@given(specs(), st.integers(1, 3), st.integers(1, 4))
def test_a_stride_is_another_order_of_plain_cuts_where_sizes_divide(spec, rows, tp):
    """What FSDP2 does: the last dimension of the mesh cuts first, the one before it cuts what is left."""
    dp = spec.mesh.shape[0]
    mesh = Mesh((dp, tp), tuple(range(dp * tp)))
    strided = PlacementSpec((dp * tp * rows, 2), mesh, (Placement(0, tp), Placement(0)), (0, 1))
    plain = without_strides(strided)
    assert plain is not None
    assert plain.order == ((1, 0) if tp > 1 else (0, 1))
    for rank in mesh.ranks:
        assert block_of_rank(plain, rank) == block_of_rank(strided, rank)


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4))
def test_strided_placement_gives_each_row_of_ranks_the_same_elements(length, dp, tp):
    """They only share them out differently, which the ranks' own shapes show: so there is never a choice."""
    mesh = Mesh((dp, tp), tuple(range(dp * tp)))
    strided = PlacementSpec((length,), mesh, (Placement(0, tp), Placement(0)), (0, 1))
    plain = without_strides(strided)
    for row in range(dp):
        ranks = [row * tp + column for column in range(tp)]
        one, other = (
            [i for rank in ranks for runs in block_of_rank(way, rank).axes for run in runs for i in range(*run)]
            for way in (strided, plain)
        )
        assert one == other
    same_shapes = all(block_of_rank(strided, rank).shape == block_of_rank(plain, rank).shape for rank in mesh.ranks)
    assert same_shapes == all(block_of_rank(strided, rank) == block_of_rank(plain, rank) for rank in mesh.ranks)


def test_the_ranks_own_shapes_say_which_way_a_stride_is_read(tmp_path):
    mesh, whole = Mesh((3, 2), tuple(range(6))), torch.arange(14.0).reshape(7, 2)
    strided = PlacementSpec((7, 2), mesh, (Placement(0, 2), Placement(0)), (0, 1))
    plain = without_strides(strided)
    assert plain is not None
    assert [block_of_rank(plain, rank).shape for rank in mesh.ranks] != [
        block_of_rank(strided, rank).shape for rank in mesh.ranks
    ]
    for way in (strided, plain):
        shards = [torch.empty(block_of_rank(way, rank).shape) for rank in mesh.ranks]
        for rank, local in enumerate(shards):
            for inside, place in elements(way, rank):
                local[inside.index] = whole[place.index]
        torch.save(shards, tmp_path / "locals.pt")
        held = enumerate(open_file(tmp_path / "locals.pt").root)
        gathered = gather("w", {rank: DTensor(strided, local) for rank, local in held})
        assert read(gathered).tolist() == whole.tolist()


def test_a_stride_that_no_order_explains_has_none():
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    assert without_strides(PlacementSpec((12,), mesh, (Placement(0, 3), Placement(0)), (0, 1))) is None
    assert without_strides(PlacementSpec((12, 4), mesh, (Placement(0, 2), Placement(1)), (0, 1))) is None


def test_a_tensor_in_countless_pieces_is_refused_in_no_time():
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    with pytest.raises(UnsafeError, match="pieces"):
        block_of_rank(PlacementSpec((1 << 40,), mesh, (Placement(0, 1 << 19), Placement(0)), (0, 1)), 3)
    wide = PlacementSpec((4096,) * 3, mesh, (Placement(0, 2048), Placement(1, 2048)), (0, 1))
    with pytest.raises(UnsafeError, match="blocks"):
        list(block_of_rank(wide, 3).blocks())
