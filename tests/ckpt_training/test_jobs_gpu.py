"""A run on a GPU, saved while it trains and loaded into another one. Skipped where there is none."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_training import Saver, load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
WIDTH, STEPS = 1031, 6


def run(seed: int, dtype: torch.dtype, **flags: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, 7)).to("cuda", dtype)
    return model, torch.optim.AdamW(model.parameters(), 1e-3, **flags)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator("cuda").manual_seed(step)
        dtype = next(model.parameters()).dtype
        values = torch.randn(32, WIDTH, device="cuda", generator=generator, dtype=dtype)
        loss = model(values).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("target", ["run.chain", "saves"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
def test_a_save_of_a_gpu_loads_into_another_run_with_its_losses(
    flags: dict[str, bool], dtype: torch.dtype, target: str, tmp_path: Path
) -> None:
    model, optimizer = run(0, dtype, **flags)
    losses = []
    with Saver(model, optimizer, tmp_path / target) as saver:
        for step in range(STEPS):
            losses += train(model, optimizer, range(step, step + 1))
            saver.save(step + 1)  # the next update may begin before the copy has ended
    source = f"{tmp_path / target}@3" if target == "run.chain" else tmp_path / target / "step-00000003"
    other, optimizer = run(1, dtype, **flags)
    loaded = load(source, other, optimizer)
    assert loaded.step == 3
    assert train(other, optimizer, range(3, STEPS)) == losses[3:]
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_a_model_on_the_meta_device_gets_memory_on_the_gpu(tmp_path: Path) -> None:
    model, optimizer = run(0, torch.bfloat16)
    with Saver(model, optimizer, tmp_path / "saves") as saver:
        train(model, optimizer, range(1))
        saver.save(1)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, 7)).bfloat16()
    source = tmp_path / "saves" / "step-00000001"
    load(source, empty, device="cuda", strict=False)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), empty.parameters(), strict=True))
