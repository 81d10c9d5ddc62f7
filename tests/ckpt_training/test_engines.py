"""Memory of live runs of real engines: what is written through it, is what the engines themselves then save."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 -- numpy learns of bfloat16
import numpy as np
import pytest

from ckpt_formats.core.checkpoint import MASTER, MODEL
from ckpt_formats.core.tensor import Array, read
from ckpt_formats.registry.opening import open_checkpoint
from filling_jobs import launch
from filling_jobs.values import values_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

KINDS = (  # of `recording_jobs` and of `engines`
    "ddp",
    "hsdp_2x2",
    "fsdp1",
    "fsdp1_flat_2x2",
    "fsdp1_whole",
    "zero0",
    "zero1_fp32_sums",
    "zero1_fp16",
    "zero1_experts",
    "zero2",
    "zero3",
    "zero3_offload",
    "z1_bf16opt_dp3_tied_frozen",
    "z2_bf16_dp4_round_robin",
    "z3_fp32_dp2",
    "z3_bf16_dp4_hpz2",
    "megatron_2x2",
    "megatron_buckets",
    "megatron_tied",
    "megatron_plain",
    "megatron_experts",
    "megatron_fp32",
)
GOING_ON = {
    "divided": "whole",
    "pipeline_2x2": "whole",
    "fsdp1": "whole",
    "zero0": "whole",
    "zero1_fp16": "whole",
    "zero2": "whole",
    "z1_bf16_dp3_muon": "whole",
    "zero3": "own",
    "megatron_buckets": "whole",
    "megatron_tied": "whole",
    "megatron_fp16": "whole",
    "megatron_experts_fp16": "whole",
}
"""Kinds that go on after a load, and what with: the run that was saved, or its engine's own load. DeepSpeed 0.19.8 goes
on from its own checkpoints of stage 3 with other losses than the run that was saved."""

ALONE = ("fsdp1", "megatron_tied")
"""Kinds whose model loads alone, too."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all filled runs."""
    out = tmp_path_factory.mktemp("filled")
    launch.fill([*KINDS, *map(going_on, GOING_ON), "stages"], out)
    return out


def going_on(kind: str) -> str:
    """The folder of a kind that goes on, which says in which ways."""
    ways = ["whole", *(["own"] if GOING_ON[kind] == "own" else []), "loaded", *(["alone"] if kind in ALONE else [])]
    return ":".join([kind, *ways, *(["scalers"] if kind == "megatron_fp16" else [])])


def losses(kind: str, way: str, filled: Path) -> list[float]:
    of_steps: list[float] = json.loads((filled / going_on(kind) / f"{way}.json").read_text())
    return of_steps


def parts_of_ranks(run: Path) -> list[list[Any]]:
    """What each rank has filled: name, state, dtype, shape, start and stop of the block, start and stop in it."""
    return [json.loads(path.read_text()) for path in sorted(run.glob("rank*.json"))]


@pytest.mark.parametrize("kind", KINDS)
def test_shards_have_each_element_once(kind: str, filled: Path) -> None:
    """Ranks whose shards are equal are replicas."""
    parts: defaultdict[tuple[str, str, tuple[int, ...]], set[tuple[Any, ...]]] = defaultdict(set)
    for of_rank in parts_of_ranks(filled / kind):
        for name, state, _, shape, start, stop, first, last in of_rank:
            parts[name, state, tuple(shape)].add((tuple(start), tuple(stop), first, last))
    assert len({(name, state) for name, state, _ in parts}) == len(parts)
    for (name, state, shape), of_tensor in parts.items():
        times = np.zeros(shape, np.int64)
        for start, stop, first, last in of_tensor:
            block = times[(*map(slice, start, stop), ...)]
            marks = np.zeros(block.size, np.int64)
            marks[first:last] = 1
            block += marks.reshape(block.shape)
        assert (times == 1).all(), (name, state)


@pytest.mark.parametrize("kind", KINDS)
def test_engines_save_what_was_written(kind: str, filled: Path) -> None:
    saved = open_checkpoint(filled / kind / "saved")
    written = {tuple(part[:3]) for of_rank in parts_of_ranks(filled / kind) for part in of_rank}
    with_master = {name for name, state, _ in written if state == MASTER}
    wrong = []
    for name, state, dtype in sorted(written):
        stored = saved.parameters[saved.aliases.get(name, name)].states
        origin = MASTER if name in with_master and state == MODEL else state  # the engine makes copies of masters
        other = {MODEL: MASTER, MASTER: MODEL}.get(state, state)  # a checkpoint may have one of both
        if not same(read(stored[state if state in stored else other]), name, origin, dtype):
            wrong.append((name, state))
    assert wrong == []


def test_last_stage_fills_its_copy_of_a_tied_table(filled: Path) -> None:
    """The checkpoint has only the first stage's; Megatron's last stage would go on with another one."""
    _, last = parts_of_ranks(filled / "megatron_tied")
    table = {state for name, state, *_ in last if name == "embedding.word_embeddings.weight"}
    assert table == {MODEL, MASTER, "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("kind", GOING_ON)
def test_losses_after_a_load_have_the_same_bits(kind: str, filled: Path) -> None:
    assert losses(kind, "loaded", filled) == losses(kind, GOING_ON[kind], filled)


@pytest.mark.parametrize("kind", ALONE)
def test_models_load_without_an_optimizer(kind: str, filled: Path) -> None:
    assert losses(kind, "alone", filled) == losses(kind, "whole", filled)[:1]


def test_load_reports_a_missing_loss_scaler_and_refuses_an_invalid_one(filled: Path) -> None:
    missing, invalid, hint = json.loads((filled / going_on("megatron_fp16") / "scalers.json").read_text())
    assert missing == "the checkpoint does not state the loss scaler: the run's own stays"
    assert invalid == "the stored state of the loss scaler is not one of Megatron's"
    assert hint == "Load an earlier checkpoint."  # and not: the run has values of both


def test_stages_that_count_layers_from_their_own_first_load_with_a_rule(filled: Path) -> None:
    differing = [json.loads((filled / "stages" / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert differing == [[], []]


def same(values: Array, name: str, state: str, dtype: str) -> bool:
    """Are they the values that belong to a state, rounded to the dtype in memory, then to theirs?"""
    expected = values_of(name, state, values.shape, values.dtype.kind in "iu")
    return expected.astype(dtype).astype(values.dtype).tobytes() == values.tobytes()
