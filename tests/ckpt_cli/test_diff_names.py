"""`ckpt diff --names`: checkpoints of one model that different libraries wrote."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt as library
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.tensor import Array, ArrayBlob, Tensor, read
from ckpt_formats.names.config import CONFIG, configured_model
from ckpt_formats.names.packings import stored_shape
from damage import ckpt
from held import checkpoint, parameter
from jax_jobs.maxtext_models import config_of, weight

pytestmark = [pytest.mark.slow]

QUERY = "model.layers.1.self_attn.q_proj.weight"
LAYERS = 4


def model(name: str, change: Callable[[str, str, Array], None] = lambda name, state, values: None) -> Checkpoint:
    """A model of transformers with Adam's moments, whose values `change` may change in place."""
    configured = configured_model(config_of(name))
    assert configured is not None
    tie = configured.model.tie("hf")
    parameters = []
    for one in configured.model.stored("hf"):
        if tie and tie.alias in one.names:
            continue
        shape = stored_shape(one.packing, one.scope, configured.model.shape)
        states = {state: weight(f"{one.names[0]} {state}", shape) for state in ("model", "exp_avg", "exp_avg_sq")}
        states["exp_avg_sq"] = np.abs(states["exp_avg_sq"])
        for state, values in states.items():
            change(one.names[0], state, values)
        parameters.append(parameter(one.names[0], states))
    return checkpoint(parameters, (), {CONFIG: config_of(name)})


def change(name: str, state: str, values: Array) -> None:
    """The first value of one query becomes one more, in the weight and its first moment."""
    if name == QUERY and state != "exp_avg_sq":
        values.reshape(-1)[0] += 1


def with_layers_one_by_one(source: Checkpoint) -> Checkpoint:
    """A checkpoint with MaxText's names as MaxText saves it with `scan_layers=False`."""
    parameters: dict[str, Parameter] = {}
    for name, one in source.parameters.items():
        if not name.startswith("decoder.layers."):
            parameters[name] = one
            continue
        for number in range(LAYERS):
            own = name.replace("layers.", f"layers_{number}.")
            cut = {state: ArrayBlob(read(tensor)[:, number].copy()) for state, tensor in one.states.items()}
            parameters[own] = replace(one, name=own, states={state: Tensor.of(blob) for state, blob in cut.items()})
    return replace(source, parameters=parameters)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model as torch, Orbax (layers scanned or not) and Megatron have it; and in Orbax, one with changed values."""
    folder = tmp_path_factory.mktemp("runs")
    source, changed = model("llama2"), model("llama2", change)
    scanned = library.use_names(source, "maxtext")
    for one, name, engine in (
        (source, "run.pt", "torch"),
        (scanned, "scanned", "orbax"),
        (with_layers_one_by_one(scanned), "one-by-one", "orbax"),
        (library.use_names(source, "megatron"), "of-megatron", "universal"),
        (library.use_names(changed, "maxtext"), "changed", "orbax"),
    ):
        library.save(replace(one, extras={}), folder / name, engine)
    (folder / "config.json").write_text(json.dumps(config_of("llama2")))
    return folder


def diff(runs: Path, *arguments: object) -> dict[str, Any]:
    paths = [runs / one if isinstance(one, str) and (runs / one).exists() else one for one in arguments]
    report: dict[str, Any] = json.loads(ckpt("diff", *paths, "--tensors-only", "--json").out)
    return report


@pytest.mark.parametrize("naming", ["hf", "maxtext", "megatron"])
def test_runs_of_jax_and_torch_are_the_same_under_the_names_of_any_library(runs: Path, naming: str) -> None:
    names = ("--names", naming, "--config", "config.json")
    rows = diff(runs, "run.pt", "scanned", "one-by-one", "of-megatron", *names)["checkpoints"]
    assert [(row["same"], row["missing"], row["added"]) for row in rows] == [(True, 0, 0)] * 3
    assert len({row["compared"] for row in rows}) == 1
    assert rows[0]["compared"] % 3 == 0
    source = library.open(runs / "run.pt")
    assert rows[0]["total"]["elements"] == 3 * sum(one.weight.size for one in source.parameters.values())


@pytest.mark.parametrize(("naming", "scale"), [("hf", 1), ("maxtext", 4)])
def test_differences_are_those_of_the_weights_and_moments_of_the_named_library(
    runs: Path, naming: str, scale: int
) -> None:
    report = diff(runs, "run.pt", "changed", "--names", naming, "--config", "config.json")
    changed = {(one["name"], one["state"]): one for one in report["tensors"] if one["kind"] != "equal"}
    name = QUERY if naming == "hf" else "decoder.layers.self_attention.query.kernel"
    assert changed.keys() == {(name, "model"), (name, "exp_avg")}
    figures = {state: (one["changed"], one["max"]) for (_, state), one in changed.items()}
    assert figures == {"model": (1, 1 / scale), "exp_avg": (1, scale)}


def test_configuration_that_one_of_them_has_is_that_of_the_others(runs: Path, tmp_path: Path) -> None:
    source = model("llama2").weights_only()
    library.save(source, tmp_path / "hf", "hf")
    arguments = ("--names", "hf", "--state", "model", "--only", "model|lm_head", "--json")
    report = json.loads(ckpt("diff", runs / "scanned", tmp_path / "hf", *arguments).out)
    weights = [one["kind"] for one in report["tensors"] if one["name"] != "step"]
    assert weights == ["equal"] * len(source)
    assert [value["text"] for value in report["values"] if CONFIG in value["text"]], "only one has it"
    ran = ckpt("diff", runs / "scanned", runs / "run.pt", "--names", "hf")
    assert ran.code == 20
    assert "--config" in ran.err


def test_models_that_round_are_compared_if_that_is_allowed(tmp_path: Path) -> None:
    source = model("gemma2")
    library.save(
        replace(library.use_names(source, "maxtext", allow_rounding=True), extras={}), tmp_path / "jax", "orbax"
    )
    library.save(source, tmp_path / "run.pt", "torch")
    refused = ckpt("diff", tmp_path / "run.pt", tmp_path / "jax", "--names", "hf")
    assert refused.code == 22
    assert "--allow-rounding" in refused.err
    report = diff(tmp_path, "run.pt", "jax", "--names", "hf", "--allow-rounding")
    assert all(one["kind"] in ("equal", "changed") for one in report["tensors"])
    assert all(one["relative"] < 1e-6 for one in report["tensors"] if one["kind"] == "changed")


def test_layers_one_by_one_without_a_configuration_and_sizes_of_another_model_are_refused(
    runs: Path, tmp_path: Path
) -> None:
    ran = ckpt("diff", runs / "scanned", runs / "one-by-one", "--names", "maxtext")
    assert ran.code == 20
    assert "--config" in ran.err
    assert "where: " + str(runs / "one-by-one") in ran.err
    assert ckpt("diff", runs / "scanned", runs / "scanned", "--names", "maxtext").code == 0
    other = tmp_path / "config.json"
    other.write_text(json.dumps({**config_of("llama2"), "hidden_size": 128}))
    ran = ckpt("diff", runs / "run.pt", runs / "scanned", "--names", "hf", "--config", other)
    assert ran.code in (20, 21)
    assert "where: " + str(runs / "scanned") in ran.err


def test_note_of_different_names_does_not_advise_what_was_done(runs: Path, tmp_path: Path) -> None:
    library.save(checkpoint([parameter("odd", {"model": np.ones(3, np.float32)})]), tmp_path / "odd.pt", "torch")
    plain = ckpt("diff", tmp_path / "odd.pt", runs / "run.pt").err
    named = ckpt("diff", tmp_path / "odd.pt", runs / "run.pt", "--names", "hf").err
    assert "no tensor is in both; are their names" in plain
    assert "no tensor is in both; names that no library" in named


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--config", "config.json"), "--config is about"),
        (("--allow-rounding",), "--allow-rounding is about"),
        (("--names", "hf", "-o", "x.delta"), "-o writes SECOND under its own names"),
    ],
)
def test_options_without_names_and_a_delta_under_other_names_are_refused(
    runs: Path, options: tuple[str, ...], text: str
) -> None:
    ran = ckpt("diff", runs / "run.pt", runs / "scanned", *options)
    assert ran.code == 2
    assert text in ran.err
