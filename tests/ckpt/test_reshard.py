"""Resharding without an engine: whatever the stages and degrees, it is the same checkpoint; and what cannot be."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.job import save as save_checkpoint
from ckpt.pipeline import Execution
from ckpt_codecs import Rounded
from ckpt_formats.containers.torchfile import TensorRef, open_file, tensor_of
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import RulesError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import Array, read
from ckpt_formats.core.values import Value
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from damage import SAMPLES, ckpt
from effort import examples
from engines import launch
from held import array, checkpoint, contents, folder, parameter, plain
from held import tensor as held

F32 = DTYPES["float32"]
DTYPE = {"bf16": DTYPES["bfloat16"], "fp16": DTYPES["float16"], "fp32": F32}
ZERO1 = next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2"))
ZERO3 = next(SAMPLES.glob("deepspeed-*-zero3-bf16-dp4-tied-frozen"))
PIPELINE = next(SAMPLES.glob("deepspeed-*-bf16opt-tp2-pp2"))
EFFORT = Execution(1, 1 << 20)


def reshard(source: Checkpoint, target: Path, to: str = "deepspeed", **goal: Any) -> Checkpoint:
    """Write and read again; rules count for both."""
    degrees = {key: goal.pop(key) for key in ("dp", "tp", "pp", "zero", "stages") if key in goal}
    save_checkpoint(source, target, writable(to, **degrees, **goal), resources=EFFORT)
    return open_checkpoint(target, ReadOptions(goal.get("rules", ())))


def assert_same(actual: Checkpoint, source: Checkpoint) -> None:
    """Every tensor, value, group, alias and extra but those that say how it is laid out."""
    assert contents(actual) == contents(source)
    assert values(actual) == values(source)
    assert [(plain(dict(g.options)), g.names) for g in actual.groups] == [
        (plain(dict(g.options)), g.names) for g in source.groups
    ]
    assert actual.aliases == source.aliases
    kept = unlaid(actual.extras)
    assert {key: kept.get(key) for key in unlaid(source.extras)} == unlaid(source.extras)


def values(source: Checkpoint) -> dict[str, Any]:
    return {name: (p.role, plain(dict(p.values))) for name, p in source.parameters.items()}


def unlaid(extras: Mapping[str, Value]) -> dict[str, Any]:
    """The extras without the optimizer's, which each stage keeps in a form of its own, and without the stage."""
    kept = {key: value for key, value in extras.items() if key not in ("optimizer", "ds_config", "ranks")}
    config = {key: value for key, value in extras["ds_config"].items() if key != "zero_optimization"}
    zero = {key: value for key, value in extras["ds_config"]["zero_optimization"].items() if key != "stage"}
    return {key: plain(value) for key, value in {**kept, "config": config, "zero": zero}.items()}


# Checkpoints in memory


def trained(name: str, shape: tuple[int, ...], dtype: str, seed: int, moments: Iterable[str], **more: Any) -> Parameter:
    """A parameter that tells itself from all others by its first value."""
    noise = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    noise.reshape(-1)[:1] = seed + 1
    states = {"master": noise, "model": rounded(noise, dtype)}
    states |= {moment: array(F32, shape, seed + 100 * i) for i, moment in enumerate(moments, 1)}
    return parameter(name, {**states, **more.pop("states", {})}, **more)


def rounded(master: Array, dtype: str) -> Array:
    return np.ascontiguousarray(Rounded().decode(b"", master.shape, DTYPE[dtype], master))


def config(dtype: str, zero: Mapping[str, Value] | None = None, **more: Value) -> dict[str, Value]:
    """A run's configuration."""
    precision: dict[str, Value] = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    return {**precision, "optimizer": optimizer, "zero_optimization": {"stage": 1, **(zero or {})}, **more}


SHAPES = [(0,), (1,), (2,), (7,), (13,), (1, 1), (5, 3), (4, 8), (3, 0, 2), (1, 9, 1), (2, 3, 4), (17, 3)]
MOMENTS = [(), ("momentum_buffer",), ("exp_avg", "exp_avg_sq")]
ZERO_OPTIONS: list[dict[str, Value]] = [
    {},
    {"round_robin_gradients": True},
    {"parameter_alignment": True},
    {"round_robin_gradients": True, "parameter_alignment": True},
    {"sub_group_size": 10},
    {"sub_group_size": 1},
    {"sub_group_size": 1e9},
]
DEGREES = st.integers(1, 5)


@st.composite
def sources(draw: st.DrawFn, unlike: bool = False, least: int = 0) -> Checkpoint:
    """One to three groups of odd tensors with any states, and what else a model has; sometimes for `BF16_Optimizer`.

    With `unlike`, no two tensors are alike, so that stage 0, which numbers its states, can be named again.
    Parameters have at least so many elements as `least` says.
    """
    dtype = draw(st.sampled_from(["bf16", "fp16"] if unlike else list(DTYPE)))
    shape_of = st.sampled_from([shape for shape in SHAPES if prod(shape) >= (2 if unlike else least)])
    parameters: list[Parameter] = []
    groups = []
    for g in range(draw(st.integers(1, 3))):
        moments = draw(st.sampled_from(MOMENTS))
        steps: dict[str, Any] = {}
        how = draw(st.sampled_from(["tensor", "number", "none"]))
        if moments and how == "tensor":
            steps["states"] = {"step": np.array(draw(st.integers(0, 1 << 20)), np.float32)}
        if moments and how == "number":
            steps["step"] = draw(st.integers(0, 1 << 40))
        shapes = draw(st.lists(shape_of, min_size=1, max_size=7))
        members = [
            trained(f"g{g}.p{i}", shape, dtype, len(parameters) + i, moments, **steps.copy())
            for i, shape in enumerate(shapes)
        ]
        parameters += members
        options = {"lr": draw(st.floats(0, 1)), "weight_decay": 0.1 * g, "betas": (0.9, 0.95)}
        groups.append(Group(options, tuple(member.name for member in members)))
    for i, shape in enumerate(draw(st.lists(shape_of, max_size=3))):
        frozen = rounded(np.random.default_rng(i).standard_normal(shape).astype(np.float32), dtype)
        parameters.append(parameter(f"frozen.{i}", {"model": frozen}, "frozen"))
    for i, kind in enumerate(draw(st.lists(st.sampled_from(["int64", "float32", "bool", "bfloat16"]), max_size=3))):
        shape = draw(st.sampled_from([(), (0,), (5,), (2, 3)]))
        parameters.append(parameter(f"buffers.{i}", {"model": array(DTYPES[kind], shape, i)}, "buffer"))
    names = [p.name for p in parameters if p.role != "buffer"]
    aliases = draw(st.dictionaries(st.sampled_from(["tied.a", "tied.b"]), st.sampled_from(names), max_size=2))
    accumulate = {"data_types": {"grad_accum_dtype": "fp32"}} if dtype == "bf16" and draw(st.booleans()) else {}
    extras = {"ds_config": config(dtype, draw(st.sampled_from(ZERO_OPTIONS)), **accumulate), "iteration": 7}
    return checkpoint(parameters, tuple(groups), extras, aliases, Origin("deepspeed", "0.19.8", 7))


# It is the same checkpoint


@given(sources(), st.integers(1, 3), DEGREES)
def test_reshard_at_any_stage_and_degree_reads_back_the_same(source: Checkpoint, stage: int, dp: int) -> None:
    with folder() as at:
        resharded = reshard(source, at / "out", zero=stage, dp=dp)
        assert_same(resharded, source)
        assert resharded.origin.layout == {"zero_stage": stage, "dp": dp, "tp": 1, "pp": 1}
        assert resharded.origin.step == 7


@settings(max_examples=examples(30))
@given(sources(unlike=True), DEGREES)
def test_stage_0_is_what_is_read_where_tensors_can_be_told_apart(source: Checkpoint, dp: int) -> None:
    with folder() as at:
        resharded = reshard(source, at / "out", zero=0, dp=dp)
        assert_same(resharded, source)
        assert resharded.origin.layout == {"zero_stage": 0, "dp": dp, "tp": 1, "pp": 1}


@settings(max_examples=examples(30))
@given(sources(least=1))
def test_stage_0_is_what_is_read_where_the_user_says_the_order(source: Checkpoint) -> None:
    """Also with tensors that are alike, and with names of parameters that this rank does not have."""
    order = ("of.another.stage", *(name for group in source.groups for name in group.names))
    with folder() as at:
        save_checkpoint(source, at / "out", writable("deepspeed", dp=1, zero=0), resources=EFFORT)
        assert_same(open_checkpoint(at / "out", ReadOptions(order=order)), source)


@pytest.mark.parametrize(
    ("change", "message"),
    {
        "too few": (lambda order: order[:-1], "too few names for group 1"),
        "too many": (lambda order: [*order, "frozen"], "`frozen`, but the optimizer has no more"),
        "another": (lambda order: order[::-1], "`b.bias` is next in group 0"),
    }.values(),
    ids=["too few", "too many", "another"],
)
def test_an_order_that_does_not_fit_stage_0_is_refused(
    change: Callable[[list[str]], list[str]], message: str, tmp_path: Path
) -> None:
    moments = ("exp_avg", "exp_avg_sq")
    weights = [trained(f"{name}.weight", (5, 3), "fp32", i, moments) for i, name in enumerate("ab")]
    biases = [trained(f"{name}.bias", (3,), "fp32", 2 + i, moments) for i, name in enumerate("ab")]
    names = [[one.name for one in members] for members in (weights, biases)]
    groups = tuple(Group({"lr": 0.1}, tuple(members)) for members in names)
    frozen = parameter("frozen", {"model": np.zeros(3, np.float32)}, "frozen")
    source = checkpoint([*weights, *biases, frozen], groups, {"ds_config": config("fp32", {})}, {}, Origin("deepspeed"))
    save_checkpoint(source, tmp_path / "out", writable("deepspeed", dp=1, zero=0), resources=EFFORT)
    with pytest.raises(RulesError, match=re.escape(message)):
        open_checkpoint(tmp_path / "out", ReadOptions(order=tuple(change([*names[0], *names[1]]))))


@settings(max_examples=examples(20))
@given(sources(), st.lists(st.tuples(st.integers(1, 3), DEGREES), min_size=2, max_size=4))
def test_a_chain_of_any_stages_and_degrees_is_the_identity(source: Checkpoint, links: list[tuple[int, int]]) -> None:
    with folder() as at:
        resharded = source
        for i, (stage, dp) in enumerate(links):
            resharded = reshard(resharded, at / str(i), zero=stage, dp=dp)
        assert_same(resharded, source)


def test_the_loss_scaler_stays_the_object_that_it_was(tmp_path: Path) -> None:
    source = open_checkpoint(ZERO1)
    optimizer = dict(source.extras["optimizer"])
    scaler = replace(optimizer["loss_scaler"], state={**optimizer["loss_scaler"].state, "own": 3.5})
    source = replace(source, extras={**source.extras, "optimizer": {**optimizer, "loss_scaler": scaler}})
    resharded = reshard(source, tmp_path / "made", zero=2, dp=3)
    assert plain(resharded.extras["optimizer"]["loss_scaler"]) == plain(scaler)


LINKS = [(3, 3), (2, 4), (0, 1), (1, 2)]


@pytest.mark.parametrize("sample", [ZERO1, ZERO3], ids=["zero1", "zero3"])
def test_a_real_checkpoint_comes_back_from_every_stage_as_it_was(sample: Path, tmp_path: Path) -> None:
    source = resharded = open_checkpoint(sample)
    for i, (stage, dp) in enumerate([*LINKS, (source.origin.layout["zero_stage"], source.origin.layout["dp"])]):
        resharded = reshard(resharded, tmp_path / str(i), zero=stage, dp=dp)
        assert_same(resharded, source)
    assert resharded.origin == source.origin
    assert unlaid(resharded.extras) == unlaid(source.extras)
    assert resharded.extras["ds_config"] == source.extras["ds_config"]
    if sample == ZERO1:
        assert plain(resharded.extras["optimizer"]) == plain(source.extras["optimizer"])


@pytest.mark.quick(1)
@pytest.mark.parametrize("sample", [ZERO1, ZERO3], ids=["zero1", "zero3"])
def test_the_universal_format_of_every_link_holds_the_same(sample: Path, tmp_path: Path) -> None:
    source = open_checkpoint(sample)
    expected = reshard(source, tmp_path / "expected", "universal")
    for stage, dp in LINKS:
        link = reshard(source, tmp_path / f"z{stage}", zero=stage, dp=dp)
        resharded = reshard(link, tmp_path / f"u{stage}", "universal")
        assert_same(resharded, expected)
        again = reshard(resharded, tmp_path / f"again{stage}", zero=3 - stage, dp=5 - dp)
        assert_same(again, source)


def test_a_pipeline_comes_back_from_other_stages_and_ranks(tmp_path: Path) -> None:
    source = resharded = open_checkpoint(PIPELINE)
    for i, (stages, tp, dp) in enumerate([((0,), 1, 3), ((0, 2, 3), 1, 1), ((0, 2), 4, 2), ((0, 3), 2, 1)]):
        resharded = reshard(resharded, tmp_path / str(i), pp=len(stages), stages=stages, tp=tp, dp=dp)
        assert contents(resharded) == contents(source)
        assert {key: resharded.origin.layout[key] for key in ("pp", "tp", "dp")} == {
            "pp": len(stages),
            "tp": tp,
            "dp": dp,
        }
    assert resharded.origin.layout == source.origin.layout
    assert values(resharded) == values(source)


def test_values_of_single_ranks_go_back_to_them(tmp_path: Path) -> None:
    source = open_checkpoint(ZERO1)
    ranks = {"zero_pp_rank_1_mp_rank_00": {"optimizer": {"overflow_seen": [1, 2]}}}
    resharded = reshard(replace(source, extras={**source.extras, "ranks": ranks}), tmp_path / "out")
    assert resharded.extras["ranks"] == ranks


def test_notes_name_values_of_ranks_that_are_no_more(tmp_path: Path) -> None:
    source = open_checkpoint(ZERO1)
    ranks = {f"zero_pp_rank_{i}_mp_rank_00": {"optimizer": {"overflow_seen": [1, i]}} for i in (0, 1)}
    source = replace(source, extras={**source.extras, "ranks": ranks})
    assert writable("deepspeed").plan(source).dropped == ()
    (lost,) = writable("deepspeed", dp=1).plan(source).dropped
    assert lost.names == ("zero_pp_rank_1_mp_rank_00",)


# The files are DeepSpeed's


def root(at: Path, pattern: str) -> dict[Any, Any]:
    (path,) = at.rglob(pattern)
    return open_file(path).root


def flat(value: TensorRef) -> Array:
    return read(tensor_of(value)).reshape(-1)


def line(source: Checkpoint, group: Group, state: str) -> Array:
    """The flat buffer of a group."""
    return np.concatenate([read(source.parameters[name].states[state]).reshape(-1) for name in group.names])


def small(dtype: str = "bf16", zero: Mapping[str, Value] | None = None, **more: Value) -> Checkpoint:
    """Two groups of 22 and 3 elements, Adam's states, one common step."""
    step = held(np.array(4, np.float32))
    shapes = [[(5, 3), (7,)], [(1,), (2,)]]
    parameters, groups = [], []
    for g, row in enumerate(shapes):
        members = [
            trained(f"g{g}.p{i}", shape, dtype, 10 * g + i, ("exp_avg", "exp_avg_sq")) for i, shape in enumerate(row)
        ]
        parameters += [replace(member, states={**member.states, "step": step}) for member in members]
        groups.append(Group({"lr": 0.5, "weight_decay": 0.1 * g}, tuple(member.name for member in members)))
    extras = {"ds_config": config(dtype, zero, **more), "iteration": 7}
    return checkpoint(parameters, tuple(groups), extras, None, Origin("deepspeed", "0.19.8", 7))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 5])
def test_stages_1_and_2_cut_the_flat_groups_in_even_parts_of_even_length(stage: int, dp: int, tmp_path: Path) -> None:
    source = small()
    reshard(source, tmp_path / "out", zero=stage, dp=dp)
    files = [root(tmp_path, f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt") for r in range(dp)]
    states = [file["optimizer_state_dict"] for file in files]
    for g, group in enumerate(source.groups):
        total = sum(source.parameters[name].weight.size for name in group.names)
        length = -(-total // (2 * dp)) * 2
        for r, state in enumerate(states):
            master = flat(state["single_partition_of_fp32_groups"][g])
            assert state["partition_count"] == [dp, dp]
            assert state["group_paddings"][g] == length - len(master)
            for moment in ("exp_avg", "exp_avg_sq"):
                whole = np.pad(line(source, group, moment), (0, length * dp - total))
                stored = flat(state["base_optimizer_state"]["state"][g][moment])
                assert stored.tobytes() == whole[r * length : (r + 1) * length].tobytes()
        masters = [flat(state["single_partition_of_fp32_groups"][g]) for state in states]
        assert np.concatenate(masters).tobytes() == line(source, group, "master").tobytes()
    model = root(tmp_path, "mp_rank_00_model_states.pt")
    assert [dict(shapes) for shapes in model["param_shapes"]] == [
        {name: source.parameters[name].weight.shape for name in group.names} for group in source.groups
    ]
    assert (model["dp_world_size"], model["mp_world_size"]) == (dp, 1)
    assert model["ds_config"]["zero_optimization"]["stage"] == stage
    assert all(int(state["zero_stage"].args[0]) == stage for state in states)


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_the_bf16_optimizer_keeps_the_padding_and_no_loss_scaler(dp: int, tmp_path: Path) -> None:
    source = small(data_types={"grad_accum_dtype": "fp32"})
    reshard(source, tmp_path / "out", zero=1, dp=dp)
    for r in range(dp):
        state = root(tmp_path, f"bf16_zero_pp_rank_{r}_*")["optimizer_state_dict"]
        assert not state.keys() & {"loss_scaler", "dynamic_loss_scale", "overflow", "zero_stage"}
        for g, total in enumerate((22, 3)):
            length = -(-total // (2 * dp)) * 2
            assert len(flat(state["single_partition_of_fp32_groups"][g])) == length
            assert len(flat(state["base_optimizer_state"]["state"][g]["exp_avg"])) == length
            assert state["group_paddings"][g] == (length * dp - total if r == dp - 1 else 0)


@pytest.mark.parametrize(("most", "expected"), [(None, 2), (10, 3), (1, 4), (10**9, 2)])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_stage_3_cuts_every_parameter_and_closes_sub_groups_that_are_full(
    dp: int, most: int | None, expected: int, tmp_path: Path
) -> None:
    source = small(zero={} if most is None else {"sub_group_size": most // dp or 1})
    reshard(source, tmp_path / "out", zero=3, dp=dp)
    for r in range(dp):
        rank = f"zero_pp_rank_{r}_mp_rank_00"
        model, state = root(tmp_path, f"{rank}_model_states.pt"), root(tmp_path, f"*{rank}_optim_states.pt")
        outer = state["optimizer_state_dict"]
        assert outer["partition_count"] == dp
        assert len(outer["fp32_flat_groups"]) == len(model["param_shapes"]) == expected
        held_by = [group["params"] for group in outer["optimizer_state_dict"]["param_groups"]]
        assert [s for numbers in held_by for s in numbers] == list(range(expected))
        for s, shapes in enumerate(model["param_shapes"]):
            for key, stored in {
                "master": outer["fp32_flat_groups"][s],
                "exp_avg": outer["optimizer_state_dict"]["state"][s]["exp_avg"],
            }.items():
                pieces = [slice_of(read(source.parameters[name].states[key]), dp, r) for name in shapes]
                assert flat(stored).tobytes() == np.concatenate(pieces).tobytes()


def slice_of(whole: Array, dp: int, rank: int) -> Array:
    size = -(-whole.size // dp)
    return np.pad(whole.reshape(-1), (0, size * dp - whole.size))[rank * size : (rank + 1) * size]


def test_round_robin_deals_the_parameters_out(tmp_path: Path) -> None:
    shapes = {"a": (3,), "b": (4,), "c": (5,), "d": (6,), "e": (7,)}
    members = [trained(name, shape, "bf16", i, ()) for i, (name, shape) in enumerate(shapes.items())]
    extras = {"ds_config": config("bf16", {"round_robin_gradients": True})}
    source = checkpoint(members, (Group({"lr": 0.5}, tuple(shapes)),), extras, None, Origin("deepspeed", "0.19.8", 7))
    resharded = reshard(source, tmp_path / "out", zero=2, dp=2)
    assert list(root(tmp_path, "mp_rank_00_model_states.pt")["param_shapes"][0]) == ["a", "c", "e", "b", "d"]
    assert resharded.groups[0].names == tuple(shapes)


def test_alignment_begins_every_parameter_at_16_bytes(tmp_path: Path) -> None:
    source = small(zero={"parameter_alignment": True})
    reshard(source, tmp_path / "out", zero=1, dp=1)
    state = root(tmp_path, "bf16_zero*")["optimizer_state_dict"]
    assert state["param_alignment_paddings"] == [[1, 0], [7, 0]]
    assert len(flat(state["single_partition_of_fp32_groups"][0])) == 16 + 7
    addresses = [mapping.args for mapping in state["param_slice_mappings"][0].values()]
    assert addresses == [(15, 0), (7, 16)]


SHARING = {"stage 0": {"zero": 0}, "stage 3 in sub-groups": {"zero": 3, "dp": 1}, "torch": {"to": "torch"}}


@pytest.mark.parametrize("kind", SHARING)
def test_a_step_that_parameters_have_in_common_is_stored_for_each(kind: str, tmp_path: Path) -> None:
    """PyTorch loads what is stored once as one tensor, in which an optimizer would count every parameter's step."""
    goal = SHARING[kind]
    to = str(goal.get("to", "deepspeed"))
    degrees = {key: value for key, value in goal.items() if key != "to"}
    target = tmp_path / ("out.pt" if to == "torch" else "out")
    reshard(small("fp16", {"sub_group_size": 1}), target, to, **degrees)
    files = [target] if target.is_file() else list(target.rglob("*.pt"))
    steps = [storage for file in files for storage in step_storages(open_file(file).root)]
    assert len(steps) == len(set(steps)) == 4


def step_storages(tree: Any) -> Iterable[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "step" and isinstance(value, TensorRef):
                yield value.storage.key
            else:
                yield from step_storages(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from step_storages(value)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    reshard(open_checkpoint(ZERO3), tmp_path / "out", zero=1, dp=1)
    module = root(tmp_path, "mp_rank_00_model_states.pt")["module"]
    assert module["head.weight"].storage.key == module["word.weight"].storage.key


SCALER: dict[str, Value] = {"cur_scale": 512.0, "cur_iter": 6, "last_overflow_iter": 2}
SCALER |= {"scale_factor": 2.0, "scale_window": 3}


@pytest.mark.parametrize("stages", [(0, 0), (0, 1, 0), (0, 3, 2, 0), (1, 2), (3, 0, 1)])
def test_the_loss_scaler_goes_on_from_stage_to_stage(stages: tuple[int, ...], tmp_path: Path) -> None:
    source = small("fp16", fp16={"enabled": True, "hysteresis": 3, "min_loss_scale": 2})
    resharded = replace(source, extras={**source.extras, "optimizer": {"dynamic_loss_scale": True, **SCALER}})
    for i, stage in enumerate(stages):
        resharded = reshard(resharded, tmp_path / str(i), zero=stage, dp=2)
        own = resharded.extras["optimizer"]
        scaler = own.get("loss_scaler")
        assert own["dynamic_loss_scale"] is True
        assert {key: scaler.get(key) if stage else own[key] for key in SCALER} == SCALER
        if stage:
            assert str(scaler.cls) == "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
            assert (scaler.get("delayed_shift"), scaler.get("min_scale")) == (3, 2)


@pytest.mark.parametrize(
    ("section", "dynamic", "scale"),
    [({}, True, 2.0**16), ({"initial_scale_power": 8}, True, 256.0), ({"loss_scale": 128}, False, 128)],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_source_without_a_loss_scaler_gets_the_configured_one(
    section: dict[str, Value], dynamic: bool, scale: float, stage: int, tmp_path: Path
) -> None:
    resharded = reshard(small("fp16", fp16={"enabled": True, **section}), tmp_path / "out", zero=stage, dp=2)
    own = resharded.extras["optimizer"]
    assert own["dynamic_loss_scale"] is dynamic
    assert (own["loss_scaler"].get("cur_scale") if stage else own["cur_scale"]) == scale


@pytest.mark.engines
def test_torch_and_deepspeed_load_every_file(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = open_checkpoint(ZERO3)
    for stage in range(4):
        reshard(source, tmp_path / f"z{stage}", zero=stage, dp=3)
        reshard(small("fp16"), tmp_path / f"fp16_z{stage}", zero=stage, dp=2)
    script = """
import deepspeed, pathlib, sys, torch
for path in pathlib.Path(sys.argv[1]).rglob("*.pt"):
    print(path, *torch.load(path, weights_only=False))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, **launch.ENVIRONMENT},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    loaded = [line for line in done.stdout.splitlines() if line.startswith(str(tmp_path))]
    assert len(loaded) == len(list(tmp_path.rglob("*.pt"))) == (1 + 4 + 4 + 6) + (1 + 3 + 3 + 4)


# Tensor parallelism

HIDDEN = 8
INFO: dict[str, Value] = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 10,
    "padded_vocab_size": 10,
    "vocabulary_parameter_patterns": [r"embedding\.word\.weight", r"head\.weight"],
    "tp_replicated_parameter_patterns": [r".*norm\.weight", r".*down\.bias"],
    "parameter_with_row_parallelism_patterns": [r".*down\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*gate_up\.weight"],
    "parameter_with_sub_params": [
        {"patterns": [r".*qkv\.weight"], "shape": ((16, 4, 4), HIDDEN), "partition_dim": 0},
        {"patterns": [r".*qkv\.bias"], "shape": ((16, 4, 4),), "partition_dim": 0},
    ],
}
MODEL_SHAPES = {
    "embedding.word.weight": (10, HIDDEN),
    "block.qkv.weight": (24, HIDDEN),
    "block.qkv.bias": (24,),
    "block.norm.weight": (HIDDEN,),
    "block.gate_up.weight": (24, HIDDEN),
    "block.down.weight": (HIDDEN, 12),
    "block.down.bias": (HIDDEN,),
    "head.weight": (10, HIDDEN),
}
PIECES = {"block.qkv.weight": [16, 4, 4], "block.qkv.bias": [16, 4, 4], "block.gate_up.weight": [12, 12]}
REPLICATED = {"block.norm.weight", "block.down.bias"}
RULES = """
[[rule]]
match = '.*norm\\.weight|.*down\\.bias'
how = "replicated"
[[rule]]
match = '.*qkv\\.(weight|bias)'
fused = [16, 4, 4]
[[rule]]
match = '.*gate_up\\.weight'
fused = 2
[[rule]]
match = '.*down\\.weight'
axis = 1
[[rule]]
match = '(embedding\\.word|head)\\.weight'
vocabulary = 10
"""


def fused_model(info: Mapping[str, Value] | None = INFO) -> Checkpoint:
    """Grouped-query attention, SwiGLU and a vocabulary that no even number but 2 divides."""
    step = {"step": np.array(3, np.float32)}
    members = [
        trained(name, shape, "bf16", i, ("exp_avg", "exp_avg_sq"), states=step)
        for i, (name, shape) in enumerate(MODEL_SHAPES.items())
    ]
    groups = tuple(
        Group({"lr": 0.1, "weight_decay": decay}, tuple(p.name for p in members if len(p.weight.shape) == axes))
        for axes, decay in ((2, 0.1), (1, 0.0))
    )
    extras: dict[str, Value] = {"ds_config": config("bf16"), "iteration": 3}
    if info is not None:
        extras["universal_checkpoint_info"] = dict(info)
    return checkpoint(members, groups, extras, None, Origin("deepspeed", "0.19.8", 3, {"tp": 1}))


def cut(name: str, whole: Array, tp: int, rank: int) -> Array:
    """A rank's shard, cut by hand."""
    if name in REPLICATED:
        return whole
    if "word" in name or "head" in name:
        whole = np.pad(whole, ((0, -len(whole) % tp), (0, 0)))
    axis = 1 if name == "block.down.weight" else 0
    ends = np.cumsum(PIECES.get(name, [whole.shape[axis]]))[:-1]
    return np.concatenate([np.split(piece, tp, axis)[rank] for piece in np.split(whole, ends, axis)], axis)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_fused_pieces_and_padded_tables_are_cut_each_on_its_own(stage: int, tp: int, tmp_path: Path) -> None:
    source = fused_model()
    assert_same(reshard(source, tmp_path / "out", zero=stage, tp=tp, dp=2), source)
    for rank in range(tp):
        module = root(tmp_path, f"mp_rank_{rank:02}_model_states.pt")["module"]
        for name in MODEL_SHAPES:
            expected = cut(name, read(source.parameters[name].weight), tp, rank)
            assert read(tensor_of(module[name])).tobytes() == expected.tobytes(), name
            assert tensor_of(module[name]).shape == expected.shape, name


TP, ROWS = st.sampled_from([1, 2, 4]), st.sampled_from([None, 12, 16, 20])


@settings(max_examples=examples(15))
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), TP, ROWS), min_size=1, max_size=3))
def test_splitting_over_tensor_parallel_ranks_and_merging_is_the_identity(
    links: list[tuple[int, int, int, int | None]],
) -> None:
    source = resharded = fused_model()
    with folder() as at:
        for i, (stage, dp, tp, rows) in enumerate(links):
            resharded = reshard(resharded, at / str(i), zero=stage, dp=dp, tp=tp, vocab_rows=rows)
            assert contents(resharded) == contents(source)
            assert resharded.origin.layout["tp"] == tp
        assert [g.names for g in resharded.groups] == [g.names for g in source.groups]


def test_a_table_has_as_many_rows_as_asked_for(tmp_path: Path) -> None:
    reshard(fused_model(), tmp_path / "out", tp=2, zero=1, dp=1, vocab_rows=64)
    module = root(tmp_path, "mp_rank_01_model_states.pt")["module"]
    assert tensor_of(module["head.weight"]).shape == (32, HIDDEN)
    assert not read(tensor_of(module["head.weight"])).any()


def test_the_users_rules_cut_and_join_what_has_none_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    source = fused_model(None)
    reshard(source, tmp_path / "source", "universal")
    with_rules = ("--rules", tmp_path / "rules.toml")
    wanted = ("--to", "deepspeed", "--tp", 2, "--dp", 3)
    done = ckpt("reshard", tmp_path / "source", tmp_path / "out", *wanted, *with_rules)
    assert done.code == 0, done.err
    assert ckpt("verify", tmp_path / "out").code == 23
    assert ckpt("verify", tmp_path / "out", *with_rules).code == 0
    assert ckpt("convert", tmp_path / "out", tmp_path / "again", *with_rules).code == 0
    assert contents(open_checkpoint(tmp_path / "again")) == contents(source)


# The dry run


def plan_of(*arguments: object) -> dict[str, Any]:
    done = ckpt("reshard", *arguments, "--dry-run", "--json")
    assert done.code == 0, done.err
    fields: dict[str, Any] = json.loads(done.out)
    return fields


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_the_plan_names_the_files_that_will_be_and_what_moves(stage: int, dp: int, tmp_path: Path) -> None:
    options = (ZERO1, tmp_path / "out", "--zero", stage, "--dp", dp)
    plan = plan_of(*options)
    assert list(tmp_path.iterdir()) == []
    assert ckpt("reshard", *options).code == 0
    sizes = {str(p.relative_to(tmp_path / "out")): p.stat().st_size for p in (tmp_path / "out").rglob("*.pt")}
    assert {row["file"]: row["nbytes"] for row in plan["files"]} == sizes
    assert plan["nbytes"] == sum(sizes.values())
    assert (plan["format"], plan["target"]) == ("deepspeed", str(tmp_path / "out"))
    assert all(row["local_nbytes"] + row["moved_nbytes"] <= row["nbytes"] for row in plan["files"])
    optimizers = [row for row in plan["files"] if row["role"] == "optimizer"]
    assert [row["rank"]["dp"] for row in optimizers] == list(range(dp if stage else 0))


def test_reshard_to_the_same_layout_changes_step_counts_only(tmp_path: Path) -> None:
    plan = plan_of(ZERO1, tmp_path / "out")
    held_before = sum(tensor.nbytes for p, state, tensor in open_checkpoint(ZERO1).tensors() if p.role != "extra")
    assert [row["moved_nbytes"] for row in plan["files"]] == [0, 0, 8]  # the two groups', read on the first rank
    assert sum(row["local_nbytes"] for row in plan["files"]) >= held_before * 0.9
    apart = plan_of(ZERO1, tmp_path / "out", "--dp", 4)
    assert sum(row["moved_nbytes"] for row in apart["files"]) > 0


def test_the_picture_shows_every_rank_before_and_after(tmp_path: Path) -> None:
    done = ckpt("reshard", ZERO1, tmp_path / "out", "--dp", 3, "--zero", 3, "--dry-run")
    assert done.code == 0
    assert list(tmp_path.iterdir()) == []
    before, after = done.out.removeprefix("before\n").split("after\n")
    rows = re.compile(r"^  (?P<rank>(?:\w+ \d+ ?)+) +(?P<role>model|optimizer) +[█·]{48} +\S.*$", re.MULTILINE)
    assert [row["role"] for row in rows.finditer(before)] == ["model", "optimizer", "optimizer"]
    assert sorted(row["role"] for row in rows.finditer(after)) == ["model"] * 3 + ["optimizer"] * 3
    assert {row["rank"].strip() for row in rows.finditer(after)} == {f"pp 0 tp 0 dp {r}" for r in range(3)}
    assert "from other ranks" in after
    assert "nothing was written" in done.out


# What cannot be


def save(source: Checkpoint, at: Path) -> None:
    reshard(source, at, "universal")


def with_states(source: Checkpoint, name: str, **states: Array) -> Checkpoint:
    one = source.parameters[name]
    changed = replace(one, states={**one.states, **{state: held(content) for state, content in states.items()}})
    return replace(source, parameters={**source.parameters, name: changed})


def without_masters(source: Checkpoint) -> Checkpoint:
    kept = {
        name: replace(p, states={s: t for s, t in p.states.items() if s != "master"})
        for name, p in source.parameters.items()
    }
    return replace(source, parameters=kept)


def without_group(source: Checkpoint) -> Checkpoint:
    return replace(source, groups=source.groups[:1])


def without_rate(source: Checkpoint) -> Checkpoint:
    return replace(source, groups=tuple(replace(group, options={}) for group in source.groups))


def expert(source: Checkpoint) -> Checkpoint:
    name = "mlp.deepspeed_moe.experts.deepspeed_experts.0.w"
    one = replace(source.parameters["g0.p0"], name=name)
    groups = (replace(source.groups[0], names=(*source.groups[0].names, name)), source.groups[1])
    return replace(source, parameters={**source.parameters, name: one}, groups=groups)


def missing_rank(at: Path) -> None:
    shutil.copytree(ZERO1, at)
    next(at.rglob("*zero_pp_rank_1_*")).unlink()


MADE: dict[str, Callable[[Path], object]] = {
    "ZERO1": lambda at: shutil.copytree(ZERO1, at),
    "PIPELINE": lambda at: shutil.copytree(PIPELINE, at),
    "MISSING": missing_rank,
    "MIXED": lambda at: shutil.copytree(SAMPLES / "damaged" / "mixed-steps", at),
    "FUSED": lambda at: reshard(fused_model(), at, zero=1, dp=1),
    "WEIGHTS": lambda at: save(replace(without_masters(small()), groups=()), at),
    "MASTERLESS": lambda at: save(without_masters(small()), at),
    "STEPS": lambda at: save(with_states(small(), "g0.p1", step=np.array(5, np.float32)), at),
    "MOMENTS": lambda at: save(with_states(small(), "g0.p1", extra=np.zeros(7, np.float32)), at),
    "UNGROUPED": lambda at: save(without_group(small()), at),
    "RATELESS": lambda at: save(without_rate(small()), at),
    "EXPERT": lambda at: save(expert(small()), at),
    "RULES": lambda at: at.write_text("[[rule]]\nmatch = '.*'\naxis = 0\n"),
    "FAR": lambda at: at.write_text("[[rule]]\nmatch = '.*'\naxis = 5\n"),
    "EMPTY": lambda at: at.mkdir(),
}
TO = ("--to", "deepspeed")
WRONG: dict[str, tuple[tuple[object, ...], int, str]] = {
    "no ranks": (("ZERO1", "out", "--dp", 0), 2, "--dp"),
    "fewer than no ranks": (("ZERO1", "out", "--dp", -2), 2, "--dp"),
    "more ranks than there are machines": (("ZERO1", "out", "--dp", 10**9), 2, "--dp"),
    "no tensor-parallel ranks": (("ZERO1", "out", "--tp", 0), 2, "--tp"),
    "a degree in words": (("ZERO1", "out", "--dp", "two"), 2, "'two'"),
    "a stage that is none": (("ZERO1", "out", "--zero", 4), 2, "--zero"),
    "a format without ranks": (("ZERO1", "out", "--to", "safetensors", "--dp", 2), 2, "has no option --dp"),
    "a format without stages": (("ZERO1", "out", "--to", "torch", "--zero", 1), 2, "has no option --zero"),
    "a universal format without ranks": (("ZERO1", "out", "--to", "universal", "--tp", 2), 2, "has no option --tp"),
    "stages of what is no pipeline": (("ZERO1", "out", "--pp", 2), 22, "not a pipeline"),
    "a ZeRO stage that pipelines have not": (("PIPELINE", "out", "--zero", 2), 22, "pipeline"),
    "more pipeline stages than layers": (("PIPELINE", "out", "--pp", 64), 22, "layers"),
    "a rank that is missing": (("MISSING", "out", "--dp", 4), 20, "rank"),
    "steps that are mixed": (("MIXED", "out", "--dp", 4), 20, "mixed"),
    "no rules": (("ZERO1", "out", "--tp", 2), 23, "no rule states how tensor"),
    "an odd length": (("ZERO1", "out", "--tp", 2, "--rules", "RULES"), 23, "does not divide"),
    "an axis that is not there": (("ZERO1", "out", "--tp", 2, "--rules", "FAR"), 23, "no axis 5"),
    "pieces that do not divide": (("FUSED", "out", "--tp", 8), 23, "does not divide over 8 ranks"),
    "weights alone": (("WEIGHTS", "out", *TO), 22, "needs the optimizer's groups"),
    "weights in halves without masters": (("MASTERLESS", "out", *TO), 22, "no fp32 master"),
    "a group with two steps": (("STEPS", "out", *TO, "--zero", 2), 22, "`step` differs"),
    "a group with other states": (("MOMENTS", "out", *TO, "--zero", 3), 22, "different optimizer states"),
    "a parameter without a group": (("UNGROUPED", "out", *TO), 22, "not in exactly one group"),
    "groups without a learning rate": (("RATELESS", "out", *TO), 22, "learning rate"),
    "experts": (("EXPERT", "out", *TO), 22, "experts"),
    "a target that exists": (("ZERO1", "EMPTY", "--dp", 4), 30, "exists already"),
    "a target within the source": (("ZERO1", "ZERO1/new", "--dp", 4), 30, "the target is inside the source"),
    "a target without a folder": (("ZERO1", "gone/out", "--dp", 4), 30, "does not exist"),
}


@pytest.fixture(scope="module")
def wrong_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("made")
    for name, make in MADE.items():
        make(at / name)
    return at


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["for real", "dry"])
@pytest.mark.parametrize("name", WRONG)
def test_reshard_refuses_what_cannot_be_written_before_it_writes(
    name: str, dry: tuple[str, ...], wrong_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(wrong_sources)
    arguments, code, says = WRONG[name]
    before = sorted(wrong_sources.rglob("*"))
    done = ckpt("reshard", *arguments, *dry)
    assert done.code == code, done.err
    assert says in done.err
    assert done.err.lower().count("error: ") == 1
    assert "fault of ckpt" not in done.err
    assert done.out == ""
    assert sorted(wrong_sources.rglob("*")) == before


def test_stage_0_holds_what_a_flat_group_cannot(tmp_path: Path) -> None:
    source = with_states(small(), "g0.p1", step=np.array(5, np.float32))
    assert_same(reshard(source, tmp_path / "out", zero=0, dp=2), source)
