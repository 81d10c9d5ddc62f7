"""Steps of weights in bfloat16 and float16 without masters, replayed from their gradients."""

from pathlib import Path

import torch
from torch import nn

from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain import states
from ckpt_formats.universal.gradients.layout import CHUNK
from ckpt_formats.universal.gradients.segment import open_segment
from ckpt_recorder import Recorder
from damage import ckpt

Truth = dict[tuple[str, str], bytes]
STEPS = 6


def content(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def truth_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Truth:
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        (names[p], key): content(value) for p, of in optimizer.state.items() for key, value in of.items() if value.dim()
    }
    return {(name, "model"): content(parameter) for parameter, name in names.items()} | moments


def assert_restored(chain: Path, truths: list[Truth]) -> None:
    for step, truth in enumerate(truths):
        parameters = states.open_state(chain, index.read(chain), step).parameters
        for (name, state), expected in truth.items():
            assert read(parameters[name].states[state]).tobytes() == expected, (step, name, state)


def record(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, chain: Path, **options: object
) -> tuple[Recorder, list[Truth]]:
    """Train and record. Returns the recorder, and all states by their steps."""
    truths = [truth_of(model, optimizer)]
    with Recorder(model, optimizer, chain, random_states=False, **options) as recorder:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
            truths.append(truth_of(model, optimizer))
    return recorder, truths


def method_of(chain: Path) -> set[str]:
    segments = (open_segment(chain / one.folder) for one in index.read(chain).segments)
    return {optimizer.method for one in segments for optimizer in one.layout.optimizers}


def mixed() -> nn.Module:
    """Weights in bfloat16 of more than one chunk, and a norm in float32."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(601, 451), nn.LayerNorm(451))
    assert model[0].weight.numel() > CHUNK  # type: ignore[operator, union-attr]
    model[0].bfloat16().register_forward_hook(lambda module, args, out: out.float())
    return model


def test_adamw_is_replayed_for_weights_in_bfloat16_beside_others(tmp_path: Path) -> None:
    model, chain = mixed(), tmp_path / "run.chain"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x = torch.randn(5, 601).bfloat16()
    recorder, truths = record(model, optimizer, x, chain, base="at once", base_every=3)
    assert (recorder.broken, recorder.exactness, method_of(chain)) == (None, "same library", {"torch"})
    assert_restored(chain, truths)
    done = ckpt("verify", chain, "--replay")
    assert done.code == 0, done.err


def test_a_replay_begins_with_a_stored_state_in_float16(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(9, 5).half()
    optimizer, chain = torch.optim.Adamax(model.parameters(), 1e-2, eps=1e-4), tmp_path / "run.chain"
    x = torch.randn(5, 9).half()
    record(model, optimizer, x, chain)
    assert ckpt("restore", chain, tmp_path / "base", "--step", STEPS).code == 0
    other = tmp_path / "other.chain"
    assert ckpt("append", other, tmp_path / "base").code == 0
    _, truths = record(model, optimizer, x, other, step=STEPS)
    parent = open_segment(other / index.read(other).segments[0].folder).layout.parent
    assert parent is not None
    assert states.last_step(other, index.read(other)) == 2 * STEPS
    for step, truth in enumerate(truths, STEPS):
        parameters = states.open_state(other, index.read(other), step).parameters
        assert all(read(parameters[n].states[s]).tobytes() == value for (n, s), value in truth.items())
