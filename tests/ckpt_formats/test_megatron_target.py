"""What a run of Megatron's is told to be, and what its ranks keep: piece by piece."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_formats.core.checkpoint import MODEL, Group, Origin
from ckpt_formats.core.layout import Layout
from ckpt_formats.core.values import Global, Record
from ckpt_formats.engines.megatron.shared.arguments import Arguments, Parallel
from ckpt_formats.engines.megatron.shared.distributed_optimizer import buckets_of
from ckpt_formats.engines.megatron.shared.extras import EXTRA_STATE
from ckpt_formats.engines.megatron.shared.origin import origin_of
from ckpt_formats.engines.megatron.shared.rules import layout_of
from ckpt_formats.engines.megatron.shared.split import RankCoords
from ckpt_formats.engines.megatron.shared.stages import Stages
from ckpt_formats.engines.megatron.shared.write_extras import RankExtras
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout, layout_string
from ckpt_formats.engines.megatron.shared.write_optimizer import WrittenOptimizer
from held import checkpoint, parameter


def arguments(**fields: Any) -> Arguments:
    return Arguments(Record(Global("argparse", "Namespace"), (), state=fields), Path("run"))


def target(dtype: str = "float32", extras: Any = None, **fields: Any) -> WriteLayout:
    """One rank, whose model is one vector."""
    source = checkpoint(
        [parameter("w", {MODEL: np.zeros(3, dtype)})],
        (Group({}, ("w",)),),
        extras,
        origin=Origin("megatron", None, 5, {"tp": 2, "pp": 1}),
    )
    return WriteLayout(source, arguments(**fields), Parallel(1, 1), Stages((1,), 1), Layout(), None, False)


@pytest.mark.parametrize(("stages", "vpp"), [(None, 1), (Stages((3, 3), 2), 1), (Stages((1, 2, 3, 4), 2), 2)])
def test_the_origin_says_how_many_chunks_a_stage_has(stages: Stages | None, vpp: int) -> None:
    origin = origin_of(arguments(), Parallel(1, 2), stages, {"iteration": 7}, "torch_dist")
    assert (origin.step, origin.layout["pp"], origin.layout["vpp"]) == (7, 2, vpp)
    assert origin.layout.get("layers") == (None if stages is None else list(stages.counts))


@pytest.mark.parametrize(
    ("fields", "pieces"), [({}, 1), ({"checkpoint_version": 0.9}, 1), ({"checkpoint_version": 1.0}, 0)]
)
def test_version_is_the_first_when_none_is_stated(fields: Any, pieces: int) -> None:
    """Megatron itself takes it so. Then each rank held q, k and v as three pieces."""
    extras = {"args": arguments(num_layers=1, hidden_size=4, num_attention_heads=2).record, **fields}
    assert layout_of(checkpoint([], (), extras)).sizes["qkv_pieces"] == pieces


def test_buckets_end_early_in_the_first_stage_only() -> None:
    stated = arguments(overlap_grad_reduce=True, ddp_bucket_size=100)
    assert [buckets_of(stated, Parallel(1, 3), stage, 2, 1000).sizes for stage in range(3)] == [
        (100,),
        (None,),
        (None,),
    ]
    stated = arguments(overlap_grad_reduce=True, ddp_num_buckets=4)
    assert buckets_of(stated, Parallel(1, 3), 0, 2, 1000).sizes == (250,)
    assert buckets_of(arguments(ddp_bucket_size=100), Parallel(1, 3), 0, 2, 1000).sizes == (None,)


@pytest.mark.parametrize(
    ("dtype", "fields", "low"),
    [
        ("float32", {}, False),
        ("float16", {}, True),
        ("float32", {"bf16": True}, True),
        ("float32", {"fp16": True}, True),
    ],
)
def test_masters_are_kept_of_weights_that_are_or_will_be_of_low_precision(dtype: str, fields: Any, low: bool) -> None:
    assert WrittenOptimizer(target(dtype, **fields)).low_precision is low


def test_a_rank_has_its_own_extra_states_and_else_those_of_the_first_that_has_them() -> None:
    extras = {
        EXTRA_STATE: {"a": b"first", "b": b"first"},
        "ranks": {
            "tp1_pp0": {EXTRA_STATE: {"b": b"second", "c": b"second"}},
            "tp0_pp1": {EXTRA_STATE: {"c": b"third", "d": b"third"}},
        },
    }
    items = RankExtras(target(extras=extras))
    whole = {"a": b"first", "b": b"first", "c": b"second", "d": b"third"}
    assert items.extra_states(RankCoords(0, 0)) == whole
    assert items.extra_states(RankCoords(1, 0)) == {**whole, "b": b"second"}


def test_layout_string_has_the_layers_of_each_chunk() -> None:
    assert layout_string(Stages((1, 3, 0, 2), 2)) == "Et|ttt||ttL"
