"""Megatron-FSDP's `fsdp_dtensor`: the keys are those of Megatron core's own functions, in both directions."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt.job import save
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Record, Value
from ckpt_formats.engines.dcp.megatron_fsdp import is_of_megatron_fsdp, to_core
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.state_dicts.keys import MEGATRON_FSDP, keys_of
from held import array, bits, tensor
from megatron_models import F32, args_of, model

HERE = Path("/held")
JOBS = Path(__file__).parents[1] / "jobs"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def written(source: Checkpoint, folder: Path, **options: Any) -> Path:
    save(source, folder, writable("dcp", keys="megatron-fsdp", **options))
    return folder


def trained(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """The bits of what the optimizer updates, and of its states, by name."""
    return {
        name: {
            state: bits(read(one))
            for state, one in {**own.states, MODEL: own.states.get(MASTER, own.weight)}.items()
            if state not in (MASTER, "step")
        }
        for name, own in checkpoint.parameters.items()
        if own.role == "parameter"
    }


# Halves and prefixes


def tree(**changes: Value) -> dict[str, Any]:
    """The smallest tree of Megatron-FSDP."""
    halves = {f"{FC1}{half}": tensor(array(F32, (3, 2), i)) for i, half in enumerate(("_w", "_v"))}
    names = {name: f"module.module.module.{name}" for name in (FC1, *halves)}
    return {
        "model": {f"module.{name}": half for name, half in halves.items()},
        "optimizer": {
            "state": {names[name]: {"exp_avg": half} for name, half in halves.items()},
            "param_to_group_meta": {names[FC1]: {"lr": 1e-3, "step": 5}},
        },
        **changes,
    }


def test_gate_and_other_half_are_joined_with_their_moments() -> None:
    result: Any = to_core(tree(), HERE)
    want = [bits(array(F32, (3, 2), i)) for i in range(2)]
    for joined in (result["model"][FC1], result["optimizer"]["state"][FC1]["exp_avg"]):
        values = read(joined)
        assert [bits(values[:3]), bits(values[3:])] == want
    assert result["optimizer"]["param_groups"] == [{"lr": 1e-3, "params": [FC1]}]
    assert result["optimizer"]["state"][FC1]["step"] == 5


def without_other_half() -> dict[str, Any]:
    wrong = tree()
    del wrong["model"][f"module.{FC1}_v"]
    return wrong


def without_gate() -> dict[str, Any]:
    wrong = tree()
    del wrong["model"][f"module.{FC1}_w"]
    return wrong


def with_another_shape() -> dict[str, Any]:
    wrong = tree()
    wrong["model"][f"module.{FC1}_v"] = tensor(array(F32, (2, 2)))
    return wrong


def with_a_whole_tensor_too() -> dict[str, Any]:
    wrong = tree()
    wrong["model"][f"module.{FC1}"] = tensor(array(F32, (6, 2)))
    return wrong


def with_other_options() -> dict[str, Any]:
    wrong = tree()
    wrong["optimizer"]["param_to_group_meta"] = {FC1: 3}
    return wrong


def with_options_twice() -> dict[str, Any]:
    wrong = tree()
    wrong["optimizer"]["param_to_group_meta"][FC1] = {"lr": 1e-4}  # without the prefix
    return wrong


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (without_other_half, IncompleteError),
        (without_gate, IncompleteError),
        (with_another_shape, CorruptError),
        (with_a_whole_tensor_too, CorruptError),
        (with_other_options, CorruptError),
        (with_options_twice, CorruptError),
    ],
)
def test_contradictory_halves_are_refused(make: Any, error: type[CkptError]) -> None:
    wrong = make()
    assert is_of_megatron_fsdp(wrong)
    with pytest.raises(error):
        to_core(wrong, HERE)


@pytest.mark.parametrize("other", [{"model": {"a.weight": 1}}, {"optimizer": {"state": {}, "param_groups": []}}, {}])
def test_trees_of_others_are_left_alone(other: Mapping[str, Value]) -> None:
    rest: dict[str, Any] = {"model": {"module.a.weight": tensor(array(F32, (2,)))}, **other}
    assert not is_of_megatron_fsdp(rest)


# Files


def test_megatron_fsdp_needs_names_of_megatron_and_arguments(tmp_path: Path) -> None:
    source = model("moe", args_of("moe", 1, 1))
    with pytest.raises(IncompleteError, match="swiglu"):
        written(replace(source, extras={}), tmp_path / "a")
    with pytest.raises(UnsupportedError, match="names of Megatron core") as refused:
        written(source.rename({name: f"x.{name}" for name in source.parameters}), tmp_path / "b")
    assert "--names megatron" in (refused.value.hint or "")


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_megatron_loads_what_ckpt_writes_and_ckpt_reads_what_megatron_saves(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from engines.launch import run_script
    from torch_values import as_torch

    arguments = {**args_of("shared_moe", 2, 2), "add_bias_linear": False}
    source = model("shared_moe", arguments)
    ours = written(source, tmp_path / "ours", dp=3)
    own = {name: p for name, p in source.parameters.items() if p.role == "parameter"}
    states = {
        "model": {name: as_torch(read(p.states[MASTER])) for name, p in own.items()},
        "state": {
            name: {state: as_torch(read(p.states[state])) for state in ("exp_avg", "exp_avg_sq")}
            for name, p in own.items()
        },
        "options": {name: {**group.options, "step": 9} for group in source.groups for name in group.names},
        "args": {key: value for key, value in arguments.items() if isinstance(value, (int, float, str, type(None)))},
    }
    torch.save(states, tmp_path / "states.pt")
    script = JOBS / "megatron_jobs" / "fsdp_dtensor.py"
    run_script(script, [str(tmp_path / "states.pt"), str(ours), str(tmp_path / "theirs")], 1)
    again, theirs = open_checkpoint(ours), open_checkpoint(tmp_path / "theirs")
    assert trained(again) == trained(source) == trained(theirs)
    assert theirs.origin.engine == "megatron-fsdp"
    assert keys_of(theirs.origin.layout["keys"]) == MEGATRON_FSDP
    assert {name for group in theirs.groups for name in group.names} == own.keys()
    assert {p.values.get("step") for p in theirs.parameters.values()} == {9}
    assert isinstance(theirs.extras["args"], Record)
