"""Writing `torch_dist`: what is written is read again bit for bit, at any degrees, and what does not fit is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import pipeline
from ckpt.job import save
from ckpt.pipeline import plan
from ckpt_formats.core.checkpoint import Checkpoint, Group, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Record
from ckpt_formats.core.views import LayersBlob
from ckpt_formats.engines.dcp.metadata import read_metadata
from ckpt_formats.engines.megatron import MegatronDist
from ckpt_formats.engines.megatron.shared.names import expert_of
from ckpt_formats.engines.megatron.shared.write_layout import resolve_layout
from ckpt_formats.engines.megatron.torch_dist.buffers import BufferedModel, ReplicaGroup, model_chunk
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from effort import examples
from held import array, bits, boxes, folder, parameter, plain, tensor
from megatron_models import EACH_FAMILY, args_of, model

LAYERS = 4


def written(source: Checkpoint, at: Path, **degrees: Any) -> Checkpoint:
    """What is read of a checkpoint after it was written at these degrees."""
    save(source, at, MegatronDist(**degrees))
    return open_checkpoint(at)


def contents(source: Checkpoint) -> dict[tuple[str, str], Any]:
    """Every bit of every state, but for masters of weights that are masters themselves."""
    by_state = {}
    for p, state, one in source.tensors():
        if p.role != "extra" and state != "step" and (state != "master" or p.weight.dtype.name != "float32"):
            by_state[p.name, state] = bits(read(one))
    return by_state


def steps(source: Checkpoint) -> dict[str, float]:
    by_name = {}
    for name, p in source.parameters.items():
        if "exp_avg" in p.states:
            by_name[name] = float(p.values["step"]) if "step" in p.values else float(read(p.states["step"]))
    return by_name


def groups(source: Checkpoint) -> list[Any]:
    return sorted((sorted(group.names), plain(dict(group.options))) for group in source.groups)


@st.composite
def degrees(draw: st.DrawFn, family: str, unit: int) -> dict[str, Any]:
    """Ranks that a model may be cut over, with stages of any lengths, and either optimizer."""
    tp, pp, vpp = draw(st.sampled_from([1, unit])), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    vpp = vpp if pp > 1 else 1
    inner = draw(st.lists(st.integers(0, LAYERS), min_size=pp * vpp - 1, max_size=pp * vpp - 1))
    ep = etp = None
    if family in ("moe", "shared_moe"):
        ep, etp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, unit]))
    dp = draw(st.integers(1, 2)) * (ep or 1) * (etp or 1)
    zero = draw(st.sampled_from([0, 1]))
    stages = (0, *sorted(inner))
    return {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "vpp": vpp, "ep": ep, "etp": etp, "stages": stages}


@pytest.mark.quick(1)
@EACH_FAMILY
@settings(max_examples=examples(3))
@given(data=st.data())
def test_any_degrees_and_back_is_the_identity(family: str, data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from([2, 3]))
    impl = data.draw(st.sampled_from(["local", "transformer_engine"]))
    low = data.draw(st.booleans())
    source = model(family, args_of(family, LAYERS, unit) | {"transformer_impl": impl, "bf16": low})
    with folder() as at:
        there = written(source, at / "there", **data.draw(degrees(family, unit)))
        assert contents(there) == contents(source)
        back = written(there, at / "back", **{**data.draw(degrees(family, unit)), "zero": 1})
        assert contents(back) == contents(source)
        assert steps(back) == steps(source)
        assert groups(back) == groups(replace(source, groups=flagged(source, back)))
        for key in ("opt_param_scheduler", "num_floating_point_operations_so_far", "checkpoint_version", "iteration"):
            assert back.extras[key] == source.extras[key]
        assert back.aliases == source.aliases


def flagged(source: Checkpoint, of: Checkpoint) -> tuple[Group, ...]:
    """The groups with experts apart if the run has them apart."""
    if of.origin.layout["ep"] == 1:
        return source.groups
    flags = []
    for group in source.groups:
        for experts in (False, True):
            names = tuple(name for name in group.names if (".experts." in name) == experts)
            if names:
                flags.append(Group({**group.options, "is_expert_parallel": experts}, names))
    return tuple(flags)


def keys(at: Path) -> dict[str, Any]:
    """What `.metadata` lists: the shape and the blocks of each tensor; None for objects."""
    stated = read_metadata(next(at.glob("iter_*")) / ".metadata")
    tensors = {name: (one.shape, sorted(str(box) for box, _ in one.blocks)) for name, one in stated.tensors.items()}
    return {**tensors, **dict.fromkeys(stated.objects)}


def test_layers_that_are_alike_are_stacked_and_each_rank_writes_its_blocks(tmp_path: Path) -> None:
    written(model("llama", args_of("llama", 2, 2)), tmp_path / "run", tp=2, pp=2)
    layout = keys(tmp_path / "run")
    assert layout["decoder.layers.mlp.linear_fc1.weight"] == (
        (2, 20, 6),
        sorted(f"[{i}:{i + 1}, {row}:{row + 5}, 0:6]" for i in (0, 1) for row in (0, 5, 10, 15)),
    )
    assert layout["optimizer.state.param.decoder.layers.self_attention.linear_qkv.layer_norm_weight"] == (
        (2, 6),
        ["[0:1, 0:6]", "[1:2, 0:6]"],
    )
    assert {key for key in layout if key.startswith("rng_state")} == {
        f"rng_state/shard_{pp}.{tp}_2.2" for pp in (0, 1) for tp in (0, 1)
    }
    files = sorted(file.name for file in (tmp_path / "run" / "iter_0000009").iterdir())
    data = [f"__{rank}_{k}.distcp" for rank in range(4) for k in (0, 1)]
    assert files == [".metadata", *data, "common.pt", "metadata.json"]
    assert detect(tmp_path / "run").name == "megatron"


def test_experts_are_stacked_along_the_next_axis_and_random_states_are_of_every_rank(tmp_path: Path) -> None:
    written(model("moe", args_of("moe", 2, 2)), tmp_path / "run", ep=2, dp=2)
    layout = keys(tmp_path / "run")
    shape, blocks = layout["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    assert (shape, len(blocks)) == ((2, 4, 6, 6), 8)
    assert "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.3_2.4" in layout
    assert {key for key in layout if key.startswith("rng_state")} == {
        f"rng_state/shard_0.0.{dp}_1.1.2" for dp in (0, 1)
    }


def test_layers_of_several_kinds_have_keys_of_their_own(tmp_path: Path) -> None:
    written(model("mamba", args_of("mamba", 2, 2)), tmp_path / "mamba", tp=2)
    layout = keys(tmp_path / "mamba")
    name = "decoder.layers.0.mixer.in_proj.weight."
    pieces = {key.removeprefix(name): entry[0] for key, entry in layout.items() if key.startswith(name)}
    assert pieces == {"z": (12, 6), "x": (12, 6), "B": (10, 6), "C": (10, 6), "dt": (4, 6)}
    assert "decoder.layers.1.mlp.linear_fc1.weight" in layout
    arguments = args_of("moe", 2, 2) | {"moe_layer_freq": [1, 1]}
    written(model("moe", arguments), tmp_path / "moe")
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in keys(tmp_path / "moe")


def test_layers_that_differ_though_the_arguments_say_nothing_are_declared(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 2, 2))
    extra = parameter("decoder.layers.1.self_attention.q_layernorm.weight", {"model": array(DTYPES["bfloat16"], (3,))})
    source = replace(source, parameters={**source.parameters, extra.name: extra})
    reopened = written(source, tmp_path / "run")
    assert "decoder.layers.1.mlp.linear_fc1.weight" in keys(tmp_path / "run")
    assert common(tmp_path / "run")["content_metadata"]["non_homogeneous_layers"] is True
    assert contents(reopened) == contents(source)
    assert "exp_avg" not in reopened.parameters[extra.name].states


def test_a_frozen_layer_has_no_optimizer_state(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 3, 2))
    frozen = {name for name in source.parameters if ".layers.1." in name}
    parameters = {
        name: replace(p, states={"model": p.weight}, values={}) if name in frozen else p
        for name, p in source.parameters.items()
    }
    kept = tuple(replace(g, names=tuple(n for n in g.names if n not in frozen)) for g in source.groups)
    source = replace(source, parameters=parameters, groups=kept)
    there = written(source, tmp_path / "there", tp=2, pp=3)
    back = written(there, tmp_path / "back", tp=1, pp=1)
    pipeline.check_complete(back)
    assert contents(there) == contents(back) == contents(source)
    assert groups(back) == groups(source)


def common(at: Path) -> Any:
    return torch.load(next(at.glob("iter_*")) / "common.pt", weights_only=False)


@pytest.mark.parametrize(("impl", "dense", "experts"), [("local", True, True), ("transformer_engine", True, False)])
def test_norms_are_called_as_the_runs_layers_call_them(tmp_path: Path, impl: str, dense: bool, experts: bool) -> None:
    for family, fused in (("llama", dense), ("moe", experts), ("latent", impl != "local")):
        written(model(family, args_of(family, 2, 2) | {"transformer_impl": impl}), tmp_path / family)
        layout = keys(tmp_path / family)
        assert ("decoder.layers.mlp.linear_fc1.layer_norm_weight" in layout) == fused, family
        assert ("decoder.layers.pre_mlp_layernorm.weight" in layout) != fused, family
        inside = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
        assert (inside in layout) == (family != "latent"), family


def test_keys_begin_with_the_wrapper_that_the_source_had(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 2, 2))
    source = replace(source, origin=replace(source.origin, layout={**source.origin.layout, "wrapped": True}))
    again = written(source, tmp_path / "run")
    assert again.origin.layout["wrapped"] is True
    assert contents(again) == contents(source)
    layout = keys(tmp_path / "run")
    assert "optimizer.state.param.module.output_layer.weight" in layout
    assert "module.decoder.layers.mlp.linear_fc2._extra_state/shard_1_2" in layout


def test_the_arguments_and_the_optimizer_are_those_of_the_new_run(tmp_path: Path) -> None:
    source = model("moe", args_of("moe", 2, 2))
    written(source, tmp_path / "one", tp=2, ep=2, etp=1, dp=2)
    state = common(tmp_path / "one")
    assert (state["args"].tensor_model_parallel_size, state["args"].expert_model_parallel_size) == (2, 2)
    assert state["optimizer"].keys() == {0, 1}
    flags = {n: {g["is_expert_parallel"] for g in state["optimizer"][n]["optimizer"]["param_groups"]} for n in (0, 1)}
    assert flags == {0: {False}, 1: {True}}
    assert state["optimizer"][1]["param_state_sharding_type"] == "fully_reshardable"
    assert all(group["step"] == 9 for group in state["optimizer"][0]["optimizer"]["param_groups"])
    content = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}
    assert state["content_metadata"] == {**content, "chained_optim_avoid_prefix": True}


@pytest.mark.parametrize(("low", "where"), [(True, ("optimizer",)), (False, ())])
def test_the_plain_optimizer_counts_steps_once_for_all(tmp_path: Path, low: bool, where: tuple[str, ...]) -> None:
    source = model("llama", args_of("llama", 2, 2) | {"bf16": low}, distributed=False)
    counted = {
        name: replace(p, values={"step": 9.0}) if p.role == "parameter" else p for name, p in source.parameters.items()
    }
    written(replace(source, parameters=counted), tmp_path / "run")
    inner = common(tmp_path / "run")["optimizer"]
    for key in where:
        inner = inner[key]
    assert inner["state"]["common_step"].equal(torch.tensor(9.0))
    assert all("step" not in group for group in inner["param_groups"])
    masters = [key for key in keys(tmp_path / "run") if key.startswith("optimizer.state.fp32_param.")]
    assert bool(masters) == low


def test_further_states_of_an_optimizer_are_written(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 2, 2))
    scaler = {"grad_scaler": {"scale": 65536.0, "growth_tracker": 3}}
    source = replace(source, extras={**source.extras, "optimizer": scaler})
    for zero in (0, 1):
        reopened = written(source, tmp_path / str(zero), zero=zero)
        assert reopened.extras["optimizer"] == scaler


def test_a_model_without_an_optimizer_says_so_to_megatron(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 2, 2))
    bare = {n: Parameter(n, p.role, {"model": p.weight}) for n, p in source.parameters.items()}
    extras = {key: value for key, value in source.extras.items() if key != "rng_state"}
    source = replace(source, parameters=bare, groups=(), extras=extras)
    assert contents(written(source, tmp_path / "run", tp=2)) == contents(source)
    state = common(tmp_path / "run")
    assert "optimizer" not in state
    assert state["args"].no_save_optim is state["args"].no_save_rng is True
    notes = MegatronDist().plan(source).notes
    assert any("--no-load-optim" in note for note in notes)
    assert any("no random states" in note for note in notes)


def test_objects_of_other_kinds_and_unknown_items_are_carried(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 2, 2))
    items = {"rerun_state_machine_state/shard_0_1": {"seen": 3}, "mine": {"a": [1, (2, 3)]}}
    ranks = {"tp1_pp0": {"mine": {"a": 4}, "args": Record(source.extras["args"].cls, state={"rank": 1})}}
    source = replace(source, extras={**source.extras, **items, "ranks": ranks})
    reopened = written(source, tmp_path / "run")
    assert {key: reopened.extras[key] for key in items} == items
    (dropped,) = MegatronDist().plan(source).dropped
    assert "`mine`" in dropped


def test_random_states_go_to_the_ranks_that_had_them(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 2, 2))
    there = written(source, tmp_path / "there", tp=2)
    other = {"ranks": {"tp1_pp0": {"rng_state": [{"random_rng_state": "other"}]}}}
    again = written(replace(there, extras={**there.extras, **other}), tmp_path / "again", tp=2, pp=2)
    own = again.extras["ranks"]
    assert own["tp1_pp0"]["rng_state"] == own["tp1_pp1"]["rng_state"] == [{"random_rng_state": "other"}]
    assert own["tp0_pp1"]["rng_state"][0]["random_rng_state"] == source.extras["rng_state"][0]["random_rng_state"]


def _without_master(source: Checkpoint) -> Checkpoint:
    name = "output_layer.weight"
    states = {s: t for s, t in source.parameters[name].states.items() if s != "master"}
    return _changed(source, name, states)


def _changed(source: Checkpoint, name: str, states: dict[str, Any]) -> Checkpoint:
    return replace(source, parameters={**source.parameters, name: replace(source.parameters[name], states=states)})


def _with_state(source: Checkpoint, shape: tuple[int, ...]) -> Checkpoint:
    for name, p in source.parameters.items():
        if p.role == "parameter":
            source = _changed(source, name, {**p.states, "other": tensor(np.zeros(shape, "f4"))})
    return source


def _renamed(source: Checkpoint) -> Checkpoint:
    name = "language_model.encoder.layers.0.mlp.dense_4h_to_h.weight"
    return replace(source, parameters={**source.parameters, name: parameter(name, {"model": np.zeros((6, 10), "f4")})})


def _uneven_steps(source: Checkpoint) -> Checkpoint:
    p = source.parameters["output_layer.weight"]
    return replace(source, parameters={**source.parameters, p.name: replace(p, values={"step": 10})})


def test_extras_beside_the_model_may_have_any_name(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 2, 2))
    beside = parameter("language_model.statistics", {"model": np.arange(3.0)}, "extra")
    source = replace(source, parameters={**source.parameters, beside.name: beside})
    assert "output_layer.weight" in written(source, tmp_path / "out").parameters


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "heads": (lambda s: s, {"tp": 3}, "do not divide over 3 ranks"),
    "layers": (lambda s: s, {"pp": 3}, "cannot be divided evenly over 3 pipeline stages"),
    "experts": (lambda s: s, {"ep": 2}, "no experts"),
    "a ZeRO stage": (lambda s: s, {"zero": 3}, "no ZeRO stage 3"),
    "no arguments": (lambda s: replace(s, extras={}), {}, "no arguments of a Megatron run"),
    "no groups": (lambda s: replace(s, groups=()), {}, "the source has no parameter groups"),
    "no master": (_without_master, {}, "no optimizer state|no fp32 master|has no"),
    "a state of another shape": (
        lambda s: _with_state(s, (1,)),
        {"zero": 0},
        "no place for the optimizer state",
    ),
    "names of old": (_renamed, {}, "before Megatron core"),
    "steps that differ": (_uneven_steps, {}, "at step 9|at step 10"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_write_refuses_what_megatron_could_not_load_before_it_begins(tmp_path: Path, kind: str) -> None:
    change, options, message = REFUSED[kind]
    source = change(model("llama", args_of("llama", 2, 2)))
    with pytest.raises(CkptError, match=message):
        plan(source, tmp_path / "run", MegatronDist(**options))
    assert list(tmp_path.iterdir()) == []


def test_wrong_rules_are_refused(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 2, 2))
    for rule in (Rule(r".*\.linear_fc2\.weight", axis=3), Rule(r".*\.linear_fc2\.weight", "unique")):
        with pytest.raises(CkptError, match=re.escape("linear_fc2.weight")):
            MegatronDist(tp=2, rules=(rule,)).plan(source)
    mamba, odd = model("mamba", args_of("mamba", 2, 2)), Rule(r".*\.in_proj\.weight")
    with pytest.raises(UnsupportedError, match="parts z, x, B, C, dt"):
        MegatronDist(rules=(odd,)).plan(mamba)


def test_the_same_checkpoint_is_written_the_same(tmp_path: Path) -> None:
    source = model("moe", args_of("moe", 2, 2))
    for name in ("a", "b"):
        written(source, tmp_path / name, tp=2, ep=2, etp=1, dp=2)
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*") if p.is_file()) for n in "ab"]
    assert files[0] == files[1]
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files[0])
    report = json.loads((tmp_path / "a" / "iter_0000009" / "metadata.json").read_text())
    assert report["sharded_backend"] == "torch_dist"


@given(data=st.data())
def test_a_pile_is_its_tensors_by_place(data: st.DataObject) -> None:
    lengths, shape = (3, 2), (4, 5)
    whole = array(DTYPES["float32"], (*lengths, *shape), data.draw(st.integers(0, 99)))
    pile = LayersBlob(lengths, {(i, j): tensor(whole[i, j]) for i in range(3) for j in range(2)})
    box: Box = data.draw(boxes(pile.shape).filter(lambda box: box.size > 0))
    assert bits(read(pile)) == bits(whole)
    assert bits(read(pile.crop(box))) == bits(np.ascontiguousarray(whole[box.index]))


def test_experts_have_buffers_of_their_own() -> None:
    """With experts whose ranks are other than those of the rest, each has an optimizer, and buffers, of its own."""
    source = model("moe", args_of("moe", LAYERS, 4))
    target = resolve_layout(source, MegatronDist(ep=2, dp=2))
    weights = {name: p.weight for name, p in source.parameters.items() if p.role == "parameter"}
    buffered = BufferedModel(target.args, target.parallel, target.stages, target.layout, weights)
    groups = [ReplicaGroup(0, 0, 0, 0), *(ReplicaGroup(1, ep, 0, 0, ep) for ep in (0, 1))]
    dense, *experts = (set(model_chunk(buffered, group, 0, True).tensors) for group in groups)
    assert dense == {name for name in weights if ".experts." not in name}
    for ep, own in enumerate(experts):
        assert {expert_of(name) for name in own} == {2 * ep, 2 * ep + 1}
    assert dense.union(*experts) == weights.keys()
