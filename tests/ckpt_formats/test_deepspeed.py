"""What DeepSpeed's own files say, piece by piece: whose a value is, what may differ, and what must not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_formats.containers.torchfile import TorchFile, open_file
from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.layout import ShardBlock
from ckpt_formats.core.tensor import Array, Tensor
from ckpt_formats.engines.deepspeed.experts import expert_ranks
from ckpt_formats.engines.deepspeed.extras import collect_extras
from ckpt_formats.engines.deepspeed.optimizer_states import check_options, ranks_disagree
from ckpt_formats.engines.deepspeed.pipeline import find_pipeline
from ckpt_formats.engines.deepspeed.read import check_same_run
from ckpt_formats.state_dicts.universal_info import rules_of
from held import lay


def saved(path: Path, value: Any) -> TorchFile:
    torch.save(value, path)
    return open_file(path)


def in_file(path: Path, values: Array) -> Tensor:
    return Tensor.of(lay(path, values, 0, (values.itemsize,)))


@pytest.mark.parametrize("shift", [0, 1])
def test_deepspeed_refuses_masters_of_another_run(shift: int, tmp_path: Path) -> None:
    masters = np.arange(5, dtype=np.float32) + 1
    copies = (masters + shift).astype(DTYPES["bfloat16"])
    states = {MASTER: in_file(tmp_path / "optim", masters), MODEL: in_file(tmp_path / "model", copies)}
    alone = Parameter("frozen", "frozen", {MODEL: states[MODEL]}, {})
    parameters = {"frozen": alone, "w": Parameter("w", "parameter", states, {})}
    if shift:
        with pytest.raises(CorruptError, match="the masters in optim do not belong to the weights in model"):
            check_same_run(parameters, tmp_path)
    else:
        check_same_run(parameters, tmp_path)


def test_deepspeed_refuses_options_that_differ_between_ranks(tmp_path: Path) -> None:
    files = [saved(tmp_path / name, {"t": torch.ones(2), "lr": 0.1}) for name in "ab"]
    tensors = [file.root["t"] for file in files]
    for kind in (lambda tensor: tensor, lambda tensor: [0.5, tensor], lambda tensor: (tensor, tensor)):
        check_options([{"lr": 0.1, "seen": kind(tensor)} for tensor in tensors], files, 0)
    with pytest.raises(CorruptError, match="lr of group 0"):
        check_options([{"lr": 0.1}, {"lr": 0.2}], files, 0)
    with pytest.raises(CorruptError, match="betas of group 0"):
        check_options([{"betas": [0.1, 0.2]}, {"betas": [0.1, 0.3]}], files, 0)


def piece(at: int, length: int) -> dict[str, Any]:
    """Rows of a shard that are rows `at` and on of a matrix with 3 columns."""
    return {"shape": [length, 3], "dest": [0, [3, 1]], "source": [3 * at, [3, 1]]}


def test_an_affine_map_says_where_the_block_of_every_rank_lies() -> None:
    ranks = {str(rank): {"shard_shape": [2, 3], "pieces": [piece(2 * rank, 2)]} for rank in range(3)}
    (rule, _) = rules_of({"affine_map": {"params": {"w": {"logical_shape": [6, 3], "ranks": ranks}}}}, Path("model"))
    assert rule.how == "blocks"
    assert rule.shape == (6, 3)
    shard = Box((0, 0), (2, 3))
    assert rule.blocks == tuple((ShardBlock(shard, Box((2 * r, 0), (2 * r + 2, 3))),) for r in range(3))
    whole = {str(rank): {"shard_shape": [6, 3], "pieces": [piece(0, 6)]} for rank in range(2)}
    (rule, _) = rules_of({"affine_map": {"params": {"w": {"logical_shape": [6, 3], "ranks": whole}}}}, Path("model"))
    assert rule.how == "replicated"
    del ranks["1"]
    with pytest.raises(CorruptError, match="not numbered from 0"):
        rules_of({"affine_map": {"params": {"w": {"logical_shape": [6, 3], "ranks": ranks}}}}, Path("model"))


def test_pipeline_stages_have_the_layers_of_their_names_and_tied_modules() -> None:
    pipeline = find_pipeline(
        [["1.w", "tied_modules.embed.w"], ["3.w", "4.b", "tied_modules.embed.w"]], {"embed": (0, 5)}
    )
    assert pipeline.stages == ((0, 1), (3, 4, 5))
    assert pipeline.tied == {"embed": (0, 5)}
    assert pipeline.users == {"embed": (0, 1)}


def test_deepspeed_carries_values_that_differ_between_ranks(tmp_path: Path) -> None:
    models = {str(rank): saved(tmp_path / f"{rank}.pt", {"note": rank // 2, "same": 7}) for rank in range(4)}
    optims = {str(rank): saved(tmp_path / f"{rank}.optim", {"scale": rank // 2}) for rank in range(4)}
    other = {"note": 1, "optimizer": {"scale": 1}}
    assert collect_extras(models, optims, {}) == {
        "same": 7,
        "note": 0,
        "optimizer": {"scale": 0},
        "ranks": {"2": other, "3": other},
    }


@pytest.mark.parametrize(("contiguous", "ranks"), [(False, [1, 4]), (True, [2, 3])])
def test_ranks_of_experts_are_those_that_hold_the_same(contiguous: bool, ranks: list[int]) -> None:
    """Of six data-parallel ranks in three groups: DeepSpeed deals them in turn, or to neighbours if told so."""
    assert expert_ranks(1, 2, 6, contiguous) == ranks


def test_mixed_names_the_first_rank_that_disagrees() -> None:
    files: Any = [SimpleNamespace(path=Path(f"step/{name}.pt")) for name in "abc"]
    error = ranks_disagree("lr", files, ["1", "2", "2"])
    assert error.what == "ranks disagree: `lr` is 1 in a.pt but 2 in b.pt"
    assert str(error.where) == "step"
    assert ranks_disagree("lr", files, ["1", "1", "2"]).what.endswith("is 1 in a.pt but 2 in c.pt")
