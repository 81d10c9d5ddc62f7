"""Megatron's legacy layout, written: whatever the degrees, it is the same checkpoint, and what Megatron would write."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, CorruptError, InvalidArgumentError, RulesError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.registry import writable
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from effort import examples
from held import contents, folder, parameter, plain
from megatron_files import loaded, write
from megatron_models import EACH_FAMILY, args_of, model

EFFORT = Execution(1, 1 << 20)
UNIT = 12
"""Degrees of tensor parallelism divide it."""


def reshard(source: Checkpoint, target: Path, **degrees: Any) -> Checkpoint:
    save(source, target, writable("megatron-legacy", **degrees), resources=EFFORT)
    assert detect(target).name == "megatron-legacy"
    return open_checkpoint(target)


@st.composite
def degrees(draw: st.DrawFn, family: str, layers: int) -> dict[str, Any]:
    tp, pp = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([1, 2, 3]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    options: dict[str, Any] = {"tp": tp, "pp": pp, "vpp": vpp, "zero": draw(st.sampled_from([0, 1]))}
    if draw(st.booleans()) or layers % (pp * vpp):
        cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
        options["stages"] = (0, *cuts)
    if "moe" in family:
        options["ep"] = draw(st.sampled_from([1, 2, 4]))
        options["etp"] = (
            tp if options["ep"] * tp % tp else draw(st.sampled_from([tp] + [1] * (options["ep"] % tp == 0)))
        )
    return options


@pytest.mark.slow
@settings(max_examples=examples(6))
@given(data=st.data())
@EACH_FAMILY
def test_reshard_there_and_back_over_any_degrees_is_the_identity(family: str, data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 4))
    arguments = args_of(family, layers, UNIT)
    arguments["transformer_impl"] = data.draw(st.sampled_from(["local", "transformer_engine"]))
    if "moe" in family and arguments["add_bias_linear"] is False:
        arguments["moe_grouped_gemm"] = data.draw(st.booleans())
    if data.draw(st.booleans()):
        arguments |= {"overlap_grad_reduce": True, "ddp_bucket_size": data.draw(st.integers(1, 3000))}
    distributed = data.draw(st.booleans())
    source = model(family, arguments, distributed=distributed)
    with folder() as out:
        first = reshard(source, out / "first", zero=int(distributed))
        assert contents(first) == contents(source)
        other = reshard(first, out / "other", **data.draw(degrees(family, layers)))
        assert tensors(other) == tensors(source)
        back = reshard(other, out / "back", tp=1, pp=1, vpp=1, ep=1, etp=1, dp=1, zero=int(distributed), stages=(0,))
        assert_same(back, first)
        assert files(out / "back") == files(out / "first")


def assert_same(actual: Checkpoint, source: Checkpoint) -> None:
    assert contents(actual) == contents(source)
    assert {n: plain(dict(p.values)) for n, p in actual.parameters.items()} == {
        n: plain(dict(p.values)) for n, p in source.parameters.items()
    }
    assert [(plain(dict(g.options)), g.names) for g in actual.groups] == [
        (plain(dict(g.options)), g.names) for g in source.groups
    ]
    assert actual.aliases == source.aliases
    assert plain(actual.extras) == plain(source.extras)


def tensors(checkpoint: Checkpoint) -> dict[tuple[str, str], Any]:
    """Every bit of model and optimizer, wherever the optimizer keeps its steps."""
    extra = {name for name, p in checkpoint.parameters.items() if p.role == "extra"}
    return {place: held for place, held in contents(checkpoint).items() if place[0] not in extra}


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


SAMPLE = Path(__file__).parents[2] / "sample_checkpoints" / "megatron-0.16-tp2-pp2-legacy"


def test_a_real_checkpoint_is_written_again_as_megatron_wrote_it(tmp_path: Path) -> None:
    """Every file, key for key and bit for bit; also by way of another layout."""
    first = reshard(open_checkpoint(SAMPLE), tmp_path / "first")
    assert loaded(tmp_path / "first") == loaded(SAMPLE)
    reshard(first, tmp_path / "other", tp=1, pp=4, zero=0)
    reshard(open_checkpoint(tmp_path / "other"), tmp_path / "back", tp=2, pp=2, zero=1)
    back, want = loaded(tmp_path / "back"), loaded(SAMPLE)
    assert back.keys() == want.keys()
    for file in want:
        differing = {key for key in want[file] | back[file] if want[file].get(key) != back[file].get(key)}
        # Of four ranks two were left on the way: random states of the others are theirs.
        assert all(key.startswith("/rng_state/") for key in differing), differing


def root(run: Path, rank: str, file: str = "model_optim_rng.pt") -> Any:
    return torch.load(run / "iter_0000009" / f"mp_rank_{rank}" / file, weights_only=False)


def test_fused_layers_and_grouped_experts_have_their_own_names(tmp_path: Path) -> None:
    fused = {"transformer_impl": "transformer_engine"}
    reshard(model("llama", args_of("llama", 2, 4) | fused), tmp_path / "llama", pp=2)
    names = list(root(tmp_path / "llama", "00_001")["model"])
    assert [name for name in names if "layers.0" in name and not name.endswith("_extra_state")] == [
        f"decoder.layers.0.{name}"
        for name in (
            "self_attention.linear_proj.weight",
            "self_attention.linear_qkv.layer_norm_weight",
            "self_attention.linear_qkv.weight",
            "mlp.linear_fc1.layer_norm_weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
        )
    ]
    arguments = args_of("moe", 1, 4) | fused | {"moe_grouped_gemm": True}
    reshard(model("moe", arguments), tmp_path / "moe", ep=2)
    held = root(tmp_path / "moe", "00_001")["model"]
    assert [name for name in held if ".experts." in name] == [
        f"decoder.layers.0.mlp.experts.{name}"
        for name in (
            "linear_fc1.weight0",
            "linear_fc1.weight1",
            "linear_fc1._extra_state",
            "linear_fc2.weight0",
            "linear_fc2.weight1",
            "linear_fc2._extra_state",
        )
    ]
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in held
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in held


def test_experts_in_one_tensor_lie_in_memory_as_megatron_has_them(tmp_path: Path) -> None:
    arguments = args_of("moe", 1, 4) | {"moe_grouped_gemm": True}
    source = model("moe", arguments)
    reshard(source, tmp_path / "run", ep=2)
    for rank in range(2):
        held = root(tmp_path / "run", f"00_00{rank}")["model"]
        for part, kept in (("linear_fc1", "weight1"), ("linear_fc2", "weight2")):
            stored = held[f"decoder.layers.0.mlp.experts.{kept}"]
            names = [f"decoder.layers.0.mlp.experts.local_experts.{2 * rank + i}.{part}.weight" for i in range(2)]
            experts = [read(source.parameters[name].weight) for name in names]
            assert stored.shape == ((12, 48) if part == "linear_fc1" else (24, 12))
            in_memory = stored.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert in_memory == b"".join(np.ascontiguousarray(expert.T).tobytes() for expert in experts)


def test_states_of_single_numbers_stay_so_where_experts_become_one_tensor(tmp_path: Path) -> None:
    source = model("moe", args_of("moe", 1, 4) | {"moe_grouped_gemm": True})
    step = parameter("step", {"step": np.array(9, np.float32)}).states
    counted = {
        name: replace(p, states={**p.states, **step}, values={}) if p.role == "parameter" else p
        for name, p in source.parameters.items()
    }
    source = replace(source, parameters=counted)
    resharded = reshard(source, tmp_path / "run", zero=0)
    saved = root(tmp_path / "run", "00")["optimizer"]["optimizer"]["state"]
    assert {(state["step"].shape, state["step"].item()) for state in saved.values()} == {((), 9)}
    assert tensors(resharded) == tensors(source)


def test_an_extra_state_follows_all_tensors_of_its_module(tmp_path: Path) -> None:
    """Also in the last module of a stage."""
    reshard(model("gpt", args_of("gpt", 2, 4)), tmp_path / "run", pp=2)
    assert list(root(tmp_path / "run", "00_000")["model"])[-3:] == [
        f"decoder.layers.0.mlp.linear_fc2.{name}" for name in ("weight", "bias", "_extra_state")
    ]


def test_a_flat_buffer_is_laid_out_in_reverse_at_multiples_of_64(tmp_path: Path) -> None:
    source = model("gpt", args_of("gpt", 2, 4))
    reshard(source, tmp_path / "run", pp=2)
    states = root(tmp_path / "run", "00_001", "distrib_optim.pt")
    ((dtypes, held),) = states[0].items()
    assert str(dtypes) == "(torch.bfloat16, torch.float32)"
    assert list(held) == ["param", "exp_avg", "exp_avg_sq", "numel_unpadded"]
    head = read(source.parameters["embedding.word_embeddings.weight"].states["master"]).reshape(-1)
    bias = read(source.parameters["decoder.final_layernorm.bias"].states["master"])
    norm = read(source.parameters["decoder.final_layernorm.weight"].states["master"])
    buffer = held["param"].numpy()
    assert held["numel_unpadded"] == len(buffer)
    # The shared table is the last parameter, so the first in the buffer, in a bucket of its own without padding.
    at = head.size
    assert np.array_equal(buffer[: head.size], head)
    assert np.array_equal(buffer[at : at + 12], bias)
    assert np.array_equal(buffer[at + 64 : at + 76], norm)


def test_tables_get_the_padding_that_megatron_gives_them(tmp_path: Path) -> None:
    arguments = args_of("llama", 1, 4) | {"vocab_size": 27, "make_vocab_size_divisible_by": 2, "padded_vocab_size": 28}
    source = model("llama", arguments)
    other = reshard(source, tmp_path / "other", tp=4)
    table = other.parameters["embedding.word_embeddings.weight"].states
    assert table["model"].shape == table["exp_avg"].shape == (32, 12)
    assert not read(table["exp_avg"])[28:].any()
    assert other.extras["args"].get("padded_vocab_size") == 32
    assert tensors(reshard(other, tmp_path / "back", tp=1)) == tensors(reshard(source, tmp_path / "same"))


def test_names_of_before_megatron_core_are_nested_as_they_were(tmp_path: Path) -> None:
    inner = "self_attention.query_key_value.weight"
    layers = {f"layers.{i}.{inner}": torch.full((24, 8), float(i)) for i in range(2)}
    tree = {
        "language_model": {
            "embedding": {
                "word_embeddings": {"weight": torch.ones(16, 8)},
                "position_embeddings": {"weight": torch.zeros(5, 8)},
            },
            "encoder": {**layers, "final_layernorm.weight": torch.ones(8), "final_layernorm.bias": torch.ones(8)},
        }
    }
    args = {"group_query_attention": False, "untie_embeddings_and_output_weights": False}
    run = write(tmp_path / "run", {}, args=args)
    file = run / "iter_0000005/mp_rank_00/model_optim_rng.pt"
    torch.save({**torch.load(file, weights_only=False), "model": tree}, file)
    source = open_checkpoint(run)
    resharded = reshard(source, tmp_path / "other", tp=2, pp=2)
    assert tensors(resharded) == tensors(source)
    first, last = (
        torch.load(tmp_path / f"other/iter_0000005/mp_rank_01_00{pp}/model_optim_rng.pt", weights_only=False)["model"]
        for pp in (0, 1)
    )
    assert list(first["language_model"]) == ["embedding", "encoder"]
    assert list(first["language_model"]["embedding"]) == ["word_embeddings", "position_embeddings"]
    assert f"layers.0.{inner}" in last["language_model"]["encoder"]
    assert last["word_embeddings_for_head"]["weight"].shape == (8, 8)
    assert tensors(reshard(resharded, tmp_path / "back", tp=1, pp=1)) == tensors(source)


@pytest.mark.parametrize("step", [9, 9.0])
def test_the_step_is_where_each_optimizer_keeps_it(tmp_path: Path, step: float) -> None:
    """Fused Adam counts for a group, in whole numbers; PyTorch's for each parameter."""
    source = model("llama", args_of("llama", 1, 4))
    trained = {n: replace(p, values={"step": step}) for n, p in source.parameters.items() if p.role == "parameter"}
    source = replace(source, parameters={**source.parameters, **trained})
    resharded = reshard(source, tmp_path / "plain", zero=0)
    saved = root(tmp_path / "plain", "00")["optimizer"]["optimizer"]
    assert ("step" in saved["param_groups"][0]) == isinstance(step, int)
    assert {float(s["step"]) for s in saved["state"].values()} == {9.0} if isinstance(step, float) else True
    back = reshard(resharded, tmp_path / "back", zero=1)
    assert {repr(p.values["step"]) for p in back.parameters.values() if p.role == "parameter"} == {repr(step)}


BAD: dict[str, tuple[dict[str, Any], type[CkptError], str]] = {
    "heads": ({"tp": 5}, RulesError, "units .* do not divide over 5 ranks|does not divide"),
    "layers": ({"pp": 4}, InvalidArgumentError, "layers cannot be divided"),
    "stages": ({"pp": 2, "stages": (0, 9)}, InvalidArgumentError, "--stages 0,9"),
    "experts": ({"ep": 3}, InvalidArgumentError, "4 experts do not divide over 3"),
    "a grid": ({"tp": 2, "dp": 2, "ep": 1, "etp": 1}, UnsupportedError, "cannot store tp 2 with ep 1 and etp 1"),
    "zero": ({"zero": 3}, InvalidArgumentError, "no ZeRO stage 3"),
    "ranks": ({"tp": 1, "dp": 3, "ep": 2}, InvalidArgumentError, "do not divide by etp 1 x ep 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_write_refuses_impossible_layouts_before_it_begins(tmp_path: Path, case: str) -> None:
    options, kind, message = BAD[case]
    refused(model("moe", args_of("moe", 3, 4)), tmp_path, message, kind, **options)


def refused(
    source: Checkpoint, tmp_path: Path, message: str, kind: type[CkptError] = UnsupportedError, **options: Any
) -> None:
    with pytest.raises(CkptError, match=message) as caught:
        reshard(source, tmp_path / "made", **options)
    assert type(caught.value) is kind
    assert list(tmp_path.iterdir()) == []


def test_states_that_some_parameters_lack_are_refused(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 1, 4))
    name = "decoder.layers.0.mlp.linear_fc2.weight"

    def without(state: str) -> Checkpoint:
        one = source.parameters[name]
        kept = replace(one, states={s: t for s, t in one.states.items() if s != state})
        return replace(source, parameters={**source.parameters, name: kept})

    refused(without("exp_avg"), tmp_path, f"`{name}` has no optimizer state `exp_avg`")
    refused(without("master"), tmp_path, f"`{name}` has optimizer states, but no fp32 master")
    refused(without("model"), tmp_path, f"`{name}` has a master, but no weights")
    ungrouped = replace(source.groups[0], names=tuple(n for n in source.groups[0].names if n != name))
    refused(replace(source, groups=(ungrouped, source.groups[1])), tmp_path, f"`{name}` is not in exactly one")
    differing = replace(source.parameters[name], values={"step": 8})
    refused(replace(source, parameters={**source.parameters, name: differing}), tmp_path, "stores one step", zero=1)


def test_tensors_that_contradict_the_arguments_are_refused(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 1, 4))
    args = source.extras["args"]
    wrong = replace(args, state={**args.state, "ffn_hidden_size": 24})
    refused(
        replace(source, extras={**source.extras, "args": wrong}),
        tmp_path,
        "linear_fc1.weight` has length 40",
        RulesError,
    )
    refused(replace(source, extras={}), tmp_path, "no arguments of a Megatron run")


@pytest.mark.parametrize("stated", [3, None])
def test_experts_that_the_arguments_do_not_have_are_never_left_out_in_silence(
    tmp_path: Path, stated: int | None
) -> None:
    source = model("moe", args_of("moe", 1, 4))
    args = source.extras["args"]
    fewer = replace(args, state={**args.state, "num_experts": stated})
    source = replace(source, extras={**source.extras, "args": fewer})
    stated = stated or 0
    refused(source, tmp_path, f"local_experts.{stated}.linear_fc1.weight` is of an expert .* {stated} experts")


def test_masters_of_fp32_weights_must_be_the_weights_to_be_left_out(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 1, 4) | {"bf16": False})
    plain_one = reshard(source, tmp_path / "plain", zero=0)
    assert all("master" not in p.states for p in plain_one.parameters.values())
    name = "decoder.final_layernorm.weight"
    other = parameter(name, {"master": read(source.parameters[name].weight) + 1}).states
    odd = replace(source.parameters[name], states={**source.parameters[name].states, **other})
    with pytest.raises(CorruptError, match="replicas of one tensor differ"):
        reshard(replace(source, parameters={**source.parameters, name: odd}), tmp_path / "odd", zero=0)


def test_a_grid_that_is_sparse_is_written_where_every_rank_finds_its_folder(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, each with the whole of one half of the experts: a diagonal of folders."""
    source = model("moe", args_of("moe", 2, 4))
    resharded = reshard(source, tmp_path / "run", tp=2, ep=2, etp=1, dp=2)
    assert sorted(path.name for path in (tmp_path / "run/iter_0000009").iterdir()) == [
        "mp_rank_00_000",
        "mp_rank_01_001",
    ]
    assert tensors(resharded) == tensors(source)


def test_ranks_that_were_not_there_go_on_with_anothers_random_states_and_that_is_said(tmp_path: Path) -> None:
    source = model("llama", args_of("llama", 2, 4))
    form = writable("megatron-legacy")
    notes = tuple(map(str, replace(form, tp=2, pp=2).plan(source).notes))
    assert notes == ("3 of 4 ranks have no random states in the source: they get those of another rank",)
    assert form.plan(source).notes == ()
    weights = replace(source, groups=(), extras={"args": source.extras["args"]}, parameters=bare(source))
    assert [str(note).split(":")[0] for note in form.plan(weights).notes] == [
        "the source has no random states",
        "the source has no optimizer",
    ]


def bare(source: Checkpoint) -> dict[str, Any]:
    held = {name: p for name, p in source.parameters.items() if p.role != "extra"}
    return {name: replace(p, states={"model": p.states["model"]}, values={}) for name, p in held.items()}


def test_a_loss_scaler_is_kept_by_however_many_optimizers_there_are(tmp_path: Path) -> None:
    scaler = {"scale": 65536.0, "growth_tracker": 3}
    source = model("moe", args_of("moe", 2, 4))
    source = replace(source, extras={**source.extras, "optimizer": {"grad_scaler": scaler}})
    two = reshard(source, tmp_path / "two", ep=2)
    assert [one["grad_scaler"] for one in root(tmp_path / "two", "00_001")["optimizer"]] == [scaler, scaler]
    one = reshard(two, tmp_path / "one", ep=1, zero=0)
    assert list(root(tmp_path / "one", "00")["optimizer"]) == ["optimizer", "grad_scaler", "fp32_from_fp16_params"]
    assert one.extras["optimizer"] == {"grad_scaler": scaler}


def test_context_parallel_ranks_are_among_those_that_share_the_optimizer(tmp_path: Path) -> None:
    arguments = args_of("llama", 2, 4) | {"context_parallel_size": 2, "world_size": 4, "data_parallel_size": 2}
    source = model("llama", arguments)
    source = replace(source, origin=replace(source.origin, layout={**source.origin.layout, "dp": 4}))
    for dp, counts in ((4, (2, 2, 8)), (3, (1, 3, 6))):
        args = reshard(source, tmp_path / str(dp), tp=2, dp=dp).extras["args"]
        names = ("context_parallel_size", "data_parallel_size", "world_size")
        assert tuple(args.get(name) for name in names) == counts
