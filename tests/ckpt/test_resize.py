"""Tables with other numbers of rows: what new rows are, what follows them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckpt as library
from ckpt_formats.core.checkpoint import Checkpoint, Group
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError, UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import read
from damage import SAMPLES, ckpt
from held import bits, checkpoint, parameter

ZERO1 = next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2"))
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def trained(tied: bool = False) -> Checkpoint:
    rng = np.random.default_rng(4)

    def states(name: str, shape: tuple[int, ...]) -> Any:
        master = rng.standard_normal(shape).astype(np.float32)
        moment = rng.standard_normal(shape).astype(np.float32)
        return parameter(
            name, {"master": master, "model": master.astype(ml_dtypes.bfloat16), "exp_avg": moment}, step=3
        )

    names = {EMBED: (10, 4), NORM: (4,), **({} if tied else {HEAD: (10, 4)})}
    extras = {"hf/config.json": {"vocab_size": 10, "text_config": {"vocab_size": 10, "hidden_size": 10}}}
    aliases = {HEAD: EMBED} if tied else {}
    parameters = [states(name, shape) for name, shape in names.items()]
    return checkpoint(parameters, (Group({"lr": 1.0}, tuple(names)),), extras=extras, aliases=aliases)


@pytest.mark.parametrize("fill", ["zero", "mean"])
def test_new_rows_are_zero_or_the_mean(fill: Any) -> None:
    source = trained()
    result = library.resize(source, pad_vocab=8, fill=fill)
    assert {name: one.shape for name, one in result.items()} == {EMBED: (16, 4), HEAD: (16, 4), NORM: (4,)}
    for name in (EMBED, HEAD):
        states = {state: read(tensor) for state, tensor in result.parameters[name].states.items()}
        for state, values in states.items():
            assert list(result.parameters[name].states[state].problems()) == []
            assert bits(values[:10]) == bits(read(source.parameters[name].states[state]))
            box = Box((9, 1), (13, 3))
            assert bits(read(result.parameters[name].states[state].crop(box))) == bits(values[box.index])
        assert not states["exp_avg"][10:].any()
        mean = read(source.parameters[name].states["master"]).astype(np.float64).mean(axis=0).astype(np.float32)
        expected = np.zeros(4, np.float32) if fill == "zero" else mean
        assert (states["master"][10:] == expected).all()
        assert (states["model"][10:] == expected.astype(ml_dtypes.bfloat16)).all()
    assert result.extras["hf/config.json"] == {
        "vocab_size": 16,
        "text_config": {"vocab_size": 16, "hidden_size": 10},
    }
    new = "zero" if fill == "zero" else "the mean of the others; new rows of the optimizer's states are zero"
    assert [str(notice) for notice in result.notices] == [
        *(f"16 rows instead of 10: new rows are {new}: {name}" for name in (EMBED, HEAD)),
        "vocab_size of config.json is the new number of rows",
    ]
    same = library.resize(source, pad_vocab=5)
    assert (same.notices, same.parameters) == ((), source.parameters)


def test_a_tied_head_stays_tied_and_names_the_same_table() -> None:
    result = library.resize(trained(tied=True), {HEAD: 12})
    assert (dict(result.aliases), result[HEAD].shape, result[EMBED].shape) == ({HEAD: EMBED}, (12, 4), (12, 4))
    with pytest.raises(InvalidArgumentError, match="is tied to"):
        library.resize(trained(tied=True), {HEAD: 12, EMBED: 13})


def test_rows_are_cut_only_if_this_is_allowed() -> None:
    source = trained()
    with pytest.raises(InvalidArgumentError, match="7 would cut 3 of them"):
        library.resize(source, {EMBED: 7})
    result = library.resize(source, {EMBED: 7}, cut=True)
    for state, tensor in result.parameters[EMBED].states.items():
        assert bits(read(tensor)) == bits(read(source.parameters[EMBED].states[state])[:7])
    assert f"rows 7 to 9 are cut: {EMBED}" in map(str, result.notices)


def test_states_of_rows_follow_and_others_are_refused() -> None:
    weight, row, column = np.ones((10, 4), np.float32), np.ones(10, np.float32), np.ones(4, np.float32)
    factors = {"model": weight, "exp_avg_sq_row": row, "exp_avg_sq_col": column, "step": np.float32(1)}
    result = library.resize(checkpoint([parameter("wte.weight", factors)]), pad_vocab=8)
    shapes = {state: tensor.shape for state, tensor in result.parameters["wte.weight"].states.items()}
    assert shapes == {"model": (16, 4), "exp_avg_sq_row": (16,), "exp_avg_sq_col": (4,), "step": ()}
    assert read(result.parameters["wte.weight"].states["exp_avg_sq_row"])[10:].tolist() == [0] * 6
    with pytest.raises(UnsupportedError, match="the state absmax"):
        library.resize(checkpoint([parameter("wte.weight", {"model": weight, "absmax": row[:5]})]), pad_vocab=8)


def test_tensors_without_rows_or_a_mean_are_refused() -> None:
    source = checkpoint([parameter("scale", {"model": np.float32(1)}), parameter("ids", {"model": np.arange(4)})])
    with pytest.raises(NoMatchError, match="no tensor has the name of a vocabulary table"):
        library.resize(source, pad_vocab=8)
    with pytest.raises(NoMatchError, match="no tensor is called `x`"):
        library.resize(source, {"x": 8})
    with pytest.raises(UnsupportedError, match="has no rows"):
        library.resize(source, {"scale": 8})
    with pytest.raises(UnsupportedError, match="has no mean row"):
        library.resize(source, {"ids": 8}, fill="mean")
    with pytest.raises(InvalidArgumentError, match="at least one row"):
        library.resize(source, {"ids": 0}, cut=True)


def test_a_checkpoint_of_ranks_gets_more_rows(tmp_path: Path) -> None:
    rows = library.open(ZERO1)["word.weight"].shape[0]
    done = ckpt("reshard", ZERO1, tmp_path / "out", "--dp", 3, "--resize", f"word.weight={rows + 3}")
    assert done.code == 0, done.err
    assert f"{rows + 3} rows instead of {rows}: new rows are zero: word.weight" in done.err
    before, after = (library.open(path).parameters["word.weight"].states for path in (ZERO1, tmp_path / "out"))
    assert list(after) == list(before)
    for state in (state for state, tensor in before.items() if tensor.shape):
        assert bits(read(after[state])[:rows]) == bits(read(before[state]))
        assert not read(after[state])[rows:].any()
    assert ckpt("verify", tmp_path / "out").code == 0


def test_a_model_of_hugging_face_is_padded_with_its_configuration(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    folder = tmp_path / "model"
    folder.mkdir()
    table = np.arange(20, dtype=np.float32).reshape(10, 2)
    save_file({EMBED: table, HEAD: table + 1}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 10, "hidden_size": 2}))
    done = ckpt("convert", folder, tmp_path / "padded", "--to", "hf", "--pad-vocab", 64, "--fill", "mean")
    assert done.code == 0, done.err
    result = library.open(tmp_path / "padded")
    assert result[HEAD][62].tolist() == [10, 11]
    assert json.loads((tmp_path / "padded" / "config.json").read_text())["vocab_size"] == 64
    alone = ckpt("convert", folder, tmp_path / "one", "--to", "hf", "--resize", f"{EMBED}=12")
    assert (alone.code, "lm_head.weight" in alone.err) == (22, True)  # the head no longer fits the configuration
    cut = ("convert", folder, tmp_path / "cut.safetensors", "--resize", f"{EMBED}=7", "--resize", f"{HEAD}=7")
    assert (ckpt(*cut).code, ckpt(*cut, "--allow-cut").code) == (2, 0)
    assert library.open(tmp_path / "cut.safetensors")[EMBED].shape == (7, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resize", "x"), "is not NAME=ROWS"),
        (("--resize", "x=0"), "is not NAME=ROWS"),
        (("--pad-vocab", "0"), "--pad-vocab"),
        (("--fill", "mean"), "are about --pad-vocab and --resize"),
        (("--resize", "a=1", "--resize", "a=2"), "names a tensor twice"),
    ],
)
def test_wrong_options_are_wrong_usage(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = ckpt("convert", ZERO1, tmp_path / "out", *options)
    assert (done.code, message in done.err) == (2, True), done.err
