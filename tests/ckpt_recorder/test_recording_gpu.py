"""A run on a GPU, recorded, and replayed on the CPU. Skipped where there is none."""

import json
import statistics
import time
from pathlib import Path

import pytest
import torch

from ckpt import Chain
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.members import open_member
from ckpt_recorder import Bases, Recorder
from ckpt_recorder.probe import probe
from damage import ckpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
STEPS = 12
FLAGS = [{"fused": True}, {"foreach": True}, {"foreach": False}, {"foreach": True, "capturable": True}]


def net_of(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, 3 * width), torch.nn.GELU(), torch.nn.Linear(3 * width, 7)).cuda()


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    optimizer.zero_grad()
    net(torch.randn(32, width, device="cuda")).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_the_probe_says_how_well_steps_of_a_gpu_are_done_again(flags: dict[str, bool]) -> None:
    net = net_of(64)
    result = probe(torch.optim.AdamW(net.parameters(), lr=1e-3, **flags), torch.device("cuda"))
    print(json.dumps({"flags": flags, "method": result.method, "exactness": result.exactness, **result.figures}))
    assert result.exactness in ("exact", "same library", "approximate")


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_run_is_replayed_as_well_as_the_probe_said(flags: dict[str, bool], tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = net_of(301)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, **flags)
    with Recorder(net, optimizer, tmp_path / "run.chain") as recorder:
        for _ in range(STEPS):
            train(net, optimizer, 301)
    assert ckpt("restore", tmp_path / "run.chain", tmp_path / "out").code == 0
    parameters = open_checkpoint(tmp_path / "out").parameters
    for name, parameter in net.named_parameters():
        values, true = torch.from_numpy(read(parameters[name].weight)), parameter.detach().cpu()
        if recorder.exactness == "approximate":
            assert torch.allclose(values, true, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(values, true)


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_a_replay_is_shared_by_cores(workers: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(16)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    with Recorder(net, optimizer, tmp_path / "run.chain", random_states=False):
        for _ in range(STEPS):
            for parameter in net.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    began = time.perf_counter()
    assert ckpt("restore", tmp_path / "run.chain", tmp_path / "out", "--workers", workers).code == 0
    seconds = time.perf_counter() - began
    numel = sum(parameter.numel() for parameter in net.parameters())
    print(json.dumps({"workers": workers, "seconds": seconds, "Mparam/s": numel * STEPS / seconds / 1e6}))


def test_the_hook_costs_little(tmp_path: Path) -> None:
    net = net_of(2048)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        began = time.perf_counter()
        train(net, optimizer, 2048)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    alone = statistics.median([step() for _ in range(30)])
    with Recorder(net, optimizer, tmp_path / "run.chain", random_states=False):
        recorded = statistics.median([step() for _ in range(30)])
    print(json.dumps({"alone": alone, "recorded": recorded, "ratio": recorded / alone}))


@pytest.mark.parametrize("spread", [1, 4])
def test_bases_of_a_gpu_run_have_the_bits_of_their_step(spread: int, tmp_path: Path) -> None:
    """Where no CPU replays the steps of the GPU, bases in the background are refused.

    With a spread of 1, late pieces are staged on the device.
    """
    torch.manual_seed(1)
    net = net_of(1001)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    truths = {}
    bases = Bases(every=5, spread=spread, memory=1)
    if probe(optimizer, torch.device("cuda")).exactness == "approximate":
        with pytest.raises(UnsupportedError, match="cannot be replayed"):
            Recorder(net, optimizer, tmp_path / "run.chain", bases=bases, random_states=False)
        return
    with Recorder(net, optimizer, tmp_path / "run.chain", bases=bases, random_states=False) as recorder:
        for _ in range(20):
            train(net, optimizer, 1001)
            truths[recorder.step] = {name: one.detach().cpu().clone() for name, one in net.named_parameters()}
            time.sleep(0.05)
    chain = chain_file.read(tmp_path / "run.chain")
    assert chain.members
    for member in chain.members:
        stored = open_member(tmp_path / "run.chain", chain, member).parameters
        for name, true in truths[member.step].items():
            assert torch.equal(torch.from_numpy(read(stored[name].weight)), true), (member.step, name)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_every_step_of_a_gpu_run_is_restored_bit_for_bit(flags: dict[str, bool], tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = net_of(301)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, **flags)
    truths = []
    with Recorder(net, optimizer, tmp_path / "run.chain") as recorder:
        for _ in range(STEPS):
            train(net, optimizer, 301)
            truths.append((recorder.step, {name: one.detach().cpu().clone() for name, one in net.named_parameters()}))
    chain = Chain(tmp_path / "run.chain")
    for step, truth in truths:
        for name, true in truth.items():
            assert torch.equal(torch.from_numpy(chain[step][name][...]), true), (step, name)
