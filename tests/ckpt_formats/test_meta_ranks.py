"""A model of Meta's in several files, `consolidated.NN.pth`: the parts are joined by name, or the folder is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, RulesError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from damage import ckpt

DIM, HEADS, GROUPS, FFN, VOCABULARY = 32, 8, 4, 24, 32
PARAMS = {"dim": DIM, "n_heads": HEADS, "n_kv_heads": GROUPS, "n_layers": 1, "vocab_size": VOCABULARY}
LAYER = {
    "attention.wq.weight": ((DIM, DIM), 0),
    "attention.wk.weight": ((GROUPS * DIM // HEADS, DIM), 0),
    "attention.wv.weight": ((GROUPS * DIM // HEADS, DIM), 0),
    "attention.wo.weight": ((DIM, DIM), 1),
    "feed_forward.w1.weight": ((FFN, DIM), 0),
    "feed_forward.w2.weight": ((DIM, FFN), 1),
    "feed_forward.w3.weight": ((FFN, DIM), 0),
    "attention_norm.weight": ((DIM,), None),
    "ffn_norm.weight": ((DIM,), None),
}


def save(folder: Path, ranks: int, by_rows: bool, params: dict[str, Any] | None = PARAMS) -> dict[str, torch.Tensor]:
    """The files as llama/model.py shards a model over ranks. Returns the whole model."""
    shapes = {
        "tok_embeddings.weight": ((VOCABULARY, DIM), 0 if by_rows else 1),
        **{f"layers.0.{name}": one for name, one in LAYER.items()},
        "norm.weight": ((DIM,), None),
        "output.weight": ((VOCABULARY, DIM), 0),
        "rope.freqs": ((DIM // HEADS // 2,), None),
    }
    whole = {name: torch.randn(shape).to(torch.bfloat16) for name, (shape, _) in shapes.items()}
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        parts = {
            name: one if (axis := shapes[name][1]) is None else one.chunk(ranks, axis)[rank].clone()
            for name, one in whole.items()
        }
        torch.save(parts, folder / f"consolidated.{rank:02}.pth")
    if params is not None:
        (folder / "params.json").write_text(json.dumps(params))
    return whole


@pytest.mark.parametrize(("ranks", "by_rows"), [(2, False), (2, True), (1, True)])
@pytest.mark.parametrize("params", [PARAMS, None])
def test_meta_ranks_are_read_as_one_model(
    ranks: int, by_rows: bool, params: dict[str, Any] | None, tmp_path: Path
) -> None:
    whole = save(tmp_path / "m", ranks, by_rows, params)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert set(checkpoint) == set(whole)
    for name, tensor in whole.items():
        assert np.array_equal(read(checkpoint[name].weight).view(np.uint16), tensor.view(torch.uint16).numpy()), name
    assert ("hf/params.json" in checkpoint.extras) is (params is not None)
    assert not checkpoint.notices


def test_a_model_of_several_files_is_converted_and_verified(tmp_path: Path) -> None:
    save(tmp_path / "m", 2, True)
    assert ckpt("convert", tmp_path / "m", tmp_path / "m.safetensors").code == 0
    ran = ckpt("verify", tmp_path / "m")
    assert ran.code == 0
    assert "checksums over" in ran.out


def change(path: Path, **values: Any) -> None:
    tensors = torch.load(path)
    for name, value in values.items():
        tensors[name.replace("__", ".")] = value
    torch.save({name: one for name, one in tensors.items() if one is not None}, path)


@pytest.mark.parametrize(
    ("harm", "error", "words"),
    [
        (lambda m: (m / "consolidated.00.pth").unlink(), IncompleteError, r"consolidated\.00\.pth is missing"),
        (lambda m: (m / "consolidated.01.pth").unlink(), IncompleteError, r"consolidated\.01\.pth is missing"),
        (lambda m: (m / "consolidated.03.pth").unlink(), IncompleteError, "others are missing"),
        (lambda m: change(m / "consolidated.01.pth", extra=torch.ones(1)), CorruptError, "`extra` is in one of"),
        (lambda m: change(m / "consolidated.01.pth", norm__weight=None), CorruptError, "`norm.weight` is in one of"),
        (
            lambda m: change(m / "consolidated.01.pth", norm__weight=torch.ones(DIM)),
            CorruptError,
            "different element types",
        ),
        (lambda m: [change(f, x=torch.ones(1)) for f in m.glob("*.pth")], RulesError, "no rule states .* `x`"),
        (lambda m: (m / "params.json").write_text(json.dumps(PARAMS | {"n_kv_heads": 3})), RulesError, "wk.weight"),
    ],
)
def test_meta_ranks_are_refused_when_the_model_is_incomplete(
    harm: Any, error: type[CkptError], words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    save(folder, 4, False)
    harm(folder)
    with pytest.raises(error, match=words):
        open_checkpoint(folder)


def test_meta_ranks_follow_the_users_rules_first(tmp_path: Path) -> None:
    save(tmp_path / "m", 2, True)
    for rank, file in enumerate(sorted((tmp_path / "m").glob("*.pth"))):
        change(file, x=torch.full((1, 2), float(rank)))
    checkpoint = open_checkpoint(tmp_path / "m", ReadOptions(rules=(Rule("x", axis=1),)))
    assert read(checkpoint["x"].weight).tolist() == [[0.0, 0.0, 1.0, 1.0]]
