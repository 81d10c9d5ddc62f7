"""`ckpt check` says what `load_state_dict(strict=True)` says, and its renamings do what they promise."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt as library
from ckpt.compare.fitting.renamings import find_renamings
from ckpt_formats.core.errors import InvalidArgumentError
from damage import SAMPLES, ckpt

TRAINER = SAMPLES / "transformers-5.23-trainer"


class Model(torch.nn.Module):
    """An embedding with a head that may be tied to it, and a layer with a buffer."""

    def __init__(self, width: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, width)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(2)])
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def saved(state: dict[str, Any], path: Path) -> Path:
    torch.save(state, path)
    return path


def said_by_torch(state: dict[str, Any], model: torch.nn.Module) -> dict[str, set[str]]:
    """The names in the error of a strict load."""
    try:
        model.load_state_dict(state, strict=True)
        text = ""
    except RuntimeError as error:
        text = str(error)
    parts = {
        "missing": r"Missing key\(s\) in state_dict: (.*?)\. ?$",
        "unexpected": r"Unexpected key\(s\).*?: (.*?)\. ?$",
    }
    names = {kind: re.search(pattern, text, re.MULTILINE) for kind, pattern in parts.items()}
    sets = {kind: set(re.findall(r'"(.*?)"', match[1])) if match else set() for kind, match in names.items()}
    return sets | {"reshaped": set(re.findall(r"size mismatch for (.*?):", text))}


@pytest.mark.parametrize("tied", [False, True])
def test_check_names_what_a_strict_load_refuses(tied: bool, tmp_path: Path) -> None:
    state = Model(tied=tied).state_dict()
    for change in (
        {},
        {"head.weight": None},
        {"extra.weight": torch.ones(1), "layers.1.bias": None},
        {"embed.weight": torch.ones(7, 4), "norm.running_mean": torch.ones(5), "head.bias": torch.ones(6)},
    ):
        changed = {name: one for name, one in {**state, **change}.items() if one is not None}
        model = Model(tied=tied)
        wanted = said_by_torch(changed, model)
        fit = library.check(library.open(saved(changed, tmp_path / "state.pt")), model)
        names = {"missing": set(fit.missing), "unexpected": set(fit.unexpected)}
        assert names | {"reshaped": {one.name for one in fit.reshaped}} == wanted
        assert fit.ok == (not any(wanted.values()))
        (tmp_path / "state.pt").unlink()


def test_a_tied_head_may_be_missing_and_other_types_are_no_misfit(tmp_path: Path) -> None:
    state = Model(tied=True).state_dict()
    like = library.open(saved(state, tmp_path / "like.pt"))
    half = {
        name: one.half() if one.is_floating_point() else one for name, one in state.items() if name != "head.weight"
    }
    fit = library.check(library.open(saved(half, tmp_path / "half.pt")), like)
    assert (fit.ok, fit.tied, fit.missing) == (True, ("head.weight",), ())
    assert {one.name for one in fit.retyped} == {name for name, one in half.items() if one.is_floating_point()}
    assert {(one.dtype, one.expected) for one in fit.retyped} == {("float16", "float32")}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("module.{}", "{}"),
        ("{}", "model.{}"),
        ("module._orig_mod.{}", "model.{}"),
        ("{}", "base_model.model.{}"),
        ("_fsdp_wrapped_module.{}", "{}"),
        ("a+b(c).{}", "new\\1.{}"),
    ],
)
def test_a_renaming_that_check_prints_makes_everything_fit(before: str, after: str, tmp_path: Path) -> None:
    names = list(Model().state_dict())
    source = {before.format(name): torch.ones(2) for name in names} | {"lm_head.weight": torch.ones(2)}
    model = {after.format(name): torch.ones(2) for name in names} | {"lm_head.weight": torch.ones(2)}
    path, keys = saved(source, tmp_path / "source.pt"), tmp_path / "keys.txt"
    keys.write_text("\n".join(model))
    done = ckpt("check", path, "--like", keys, "--json")
    report = json.loads(done.out)
    assert (done.code, report["fits"], report["mismatches_after"]) == (1, False, 0)
    options = [word for one in report["renamings"] for word in ("--rename", one)]
    assert ckpt("convert", path, tmp_path / "renamed.safetensors", "--model-only", *options).code == 0
    assert ckpt("check", tmp_path / "renamed.safetensors", "--like", keys).code == 0


def test_a_wrapper_inside_of_names_is_removed_too() -> None:
    names = ["layers.0._orig_mod.w.weight", "layers.1._orig_mod.w.weight", "head.weight"]
    wanted = ["layers.0.w.weight", "layers.1.w.weight", "head.weight"]
    assert find_renamings(names, wanted) == ((r"_orig_mod\.", ""),)
    assert find_renamings(names, ["other.weight"]) == ()


def test_a_configuration_states_names_and_shapes(tmp_path: Path) -> None:
    config = json.loads((TRAINER / "config.json").read_text())
    run = library.open(TRAINER)
    assert library.check(run, config).ok
    assert ckpt("check", TRAINER, "--like", TRAINER / "config.json").code == 0
    deeper = library.check(run, {**config, "n_layer": config["n_layer"] + 1})
    last = f"transformer.h.{config['n_layer']}."
    assert deeper.missing
    assert all(name.startswith(last) for name in deeper.missing)
    wider = library.check(run, {**config, "vocab_size": config["vocab_size"] + 8})
    assert "transformer.wte.weight" in {one.name for one in wider.reshaped}
    assert wider.reshaped[0].expected[0] == config["vocab_size"] + 8


def test_an_index_of_safetensors_and_a_list_state_names(tmp_path: Path) -> None:
    path = saved({"a.weight": torch.ones(2)}, tmp_path / "a.pt")
    for name, content in (
        ("list.json", ["a.weight"]),
        ("model.safetensors.index.json", {"weight_map": {"a.weight": "x.safetensors"}}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        assert ckpt("check", path, "--like", tmp_path / name).code == 0, name
    (tmp_path / "text.json").write_text('"text"')
    assert ckpt("check", path, "--like", tmp_path / "text.json").code == 23
    with pytest.raises(InvalidArgumentError, match="describes no model"):
        library.check(library.open(path), 3)
