"""No bit that is flipped in a source becomes a value of the run: a sample of `tests/campaigns/load_flips.py`."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import CorruptError
from ckpt_training import load
from engines.launch import run_script

SCRIPT = Path(__file__).parents[1] / "campaigns/load_flips.py"
COUNT = 80


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


class Loader:
    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state


def run() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("value", ["step", "lr", "seen"])
def test_load_refuses_a_damaged_tensor_that_is_no_local_shard(value: str, tmp_path: Path) -> None:
    """A count of steps, an option of a group, an extra."""
    model, optimizer = run()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": {"seen": torch.arange(4.0)}}
    torch.save(content, tmp_path / "source.pt")
    parameters = ckpt.open(tmp_path / "source.pt").parameters
    names = {"lr": "optimizer/param_groups/0/lr", "seen": "loader/seen"}
    tensor = parameters["weight"].states["step"] if value == "step" else parameters[names[value]].weight
    (piece,) = tensor.sources()
    flip(piece.path, piece.offset)
    with pytest.raises(CorruptError, match=r"source\.pt.*checksum"):
        load(tmp_path / "source.pt", *run(), loader=Loader())


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_load_returns_no_other_values_after_flips(tmp_path: Path) -> None:
    run_script(SCRIPT, [str(tmp_path), "--flips", str(COUNT), "--json", str(tmp_path / "flips.json")], COUNT // 4)
    flips = json.loads((tmp_path / "flips.json").read_text())
    assert len(flips) == COUNT
    refused = [one for one in flips if one["seal"] and one["result"] == "CorruptError"]
    assert len(refused) > COUNT // 4
