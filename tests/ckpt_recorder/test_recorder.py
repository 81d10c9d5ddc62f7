"""What one process records of its own loop is, at every step, what it had; and what cannot be recorded is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import chain_file, states
from ckpt_recorder import Recorder
from ckpt_training import load

STEPS = 6
MIDDLE = 3
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Model(nn.Module):
    """Of odd sizes, with a buffer that changes, a frozen parameter, and one that has gradients in even steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, 131), nn.BatchNorm1d(131), nn.Linear(131, 1)
        self.sometimes = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor, with_sometimes: bool = True) -> torch.Tensor:
        y = self.down(self.norm(torch.tanh(self.up(x)))).squeeze(-1) * self.frozen.mean()
        return y * self.sometimes.mean() if with_sometimes else y


@pytest.fixture
def model() -> Model:
    torch.manual_seed(1)
    return Model()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Tests may set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(9, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
    return nn.functional.mse_loss(model(x, step % 2 == 0), x.sum(-1))


Truth = dict[str, dict[str, np.ndarray]]


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The values; those of bfloat16, which NumPy itself lacks, as float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy().copy()


def truth_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Truth:
    """All states as they are now, by parameter and by state; the count of steps is one of them."""
    named = [*model.named_parameters(), *model.named_buffers()]
    truth = {name: {MODEL: _bits(tensor)} for name, tensor in named}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            truth[names[id(parameter)]] |= {
                key: _bits(torch.as_tensor(value)) for key, value in state.items() if value is not None
            }
    return truth


def state_at(chain: Path, step: int) -> Checkpoint:
    return states.open_state(chain, chain_file.read(chain), step)


def assert_same(actual: Checkpoint, truth: Truth) -> None:
    assert {name for name in actual.parameters if not name.startswith("param_groups/")} == truth.keys()
    for name, expected in truth.items():
        parameter = actual.parameters[name]
        mine: dict[str, Any] = {state: read(held) for state, held in parameter.states.items()}
        mine |= {key: np.array(value) for key, value in parameter.values.items()}
        if len(expected) == 1:  # no optimizer has begun to step it
            mine = {key: value for key, value in mine.items() if key == MODEL or value.any()}
        assert mine.keys() == expected.keys(), name
        for state, value in expected.items():
            assert np.array_equal(mine[state], value, equal_nan=True), (name, state)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[int, Truth]:
    """A plain loop; the truth after each step."""
    truths = {}
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if not isinstance(model, Sparse):
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        truths[step + 1] = truth_of(model, optimizer)
    return truths


def trained(parameters: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in parameters.parameters() if parameter.requires_grad]


AdamW, Sgd = torch.optim.AdamW, torch.optim.SGD
OPTIMIZERS: dict[str, Make] = {
    "adamw-fused": lambda p: AdamW(p, 1e-2, fused=True),
    "adamw-foreach": lambda p: AdamW(p, 1e-2, foreach=True),
    "sgd-nesterov-fused": lambda p: Sgd(p, 0.1, momentum=0.9, nesterov=True, fused=True),
}


def test_steps_with_a_rate_in_a_tensor_are_restored(model: Model, tmp_path: Path) -> None:
    optimizer = AdamW(trained(model), torch.tensor(1e-2), fused=True)
    train(model, optimizer, range(1))
    with Recorder(model, optimizer, tmp_path / "run.chain", step=1, fingerprint=2) as recorder:
        truths = train(model, optimizer, range(1, STEPS))
    assert recorder.broken is None
    for step in (MIDDLE, STEPS):
        assert_same(state_at(tmp_path / "run.chain", step), truths[step])


class Wide(nn.Module):
    """Two threads share its weights when they are stepped."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 20_011), nn.Linear(20_011, 1)

    def forward(self, x: torch.Tensor, _: bool = True) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).squeeze(-1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_threads_that_share_a_tensor_change_nothing(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(1)
    model = Wide()
    optimizer = OPTIMIZERS[name](trained(model))
    with Recorder(model, optimizer, tmp_path / "run.chain"):
        truths = train(model, optimizer, range(MIDDLE))
    assert_same(state_at(tmp_path / "run.chain", MIDDLE), truths[MIDDLE])


def test_a_recording_may_begin_before_the_first_step(model: Model, tmp_path: Path) -> None:
    optimizer = AdamW(trained(model), 1e-2, fused=True)
    begun = truth_of(model, optimizer)
    with Recorder(model, optimizer, tmp_path / "run.chain"):
        truths = train(model, optimizer, range(STEPS))
    for step, truth in {0: begun, **truths}.items():
        assert_same(state_at(tmp_path / "run.chain", step), truth)


def test_groups_that_are_added_later_are_recorded_from_there(model: Model, tmp_path: Path) -> None:
    optimizer = AdamW(model.up.parameters(), 1e-2, fused=True)
    with Recorder(model, optimizer, tmp_path / "run.chain"):
        truths = train(model, optimizer, range(MIDDLE))
        optimizer.add_param_group({"params": list(model.down.parameters()), "lr": 1e-3})
        truths |= train(model, optimizer, range(MIDDLE, STEPS))
    for step, truth in truths.items():
        assert_same(state_at(tmp_path / "run.chain", step), truth)
    assert [group.options["lr"] for group in state_at(tmp_path / "run.chain", STEPS).groups] == [1e-2, 1e-3]


def test_of_several_optimizers_each_call_is_a_step(model: Model, tmp_path: Path) -> None:
    one = AdamW(model.up.parameters(), 1e-2, fused=True)
    other = Sgd([*model.down.parameters(), model.sometimes], 0.1, momentum=0.9)
    truths = {}
    with Recorder(model, [one, other], tmp_path / "run.chain") as recorder:
        for step in range(STEPS):
            optimizer = (one, other, one)[step % 3]
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            truths[recorder.step] = truth_of(model, one, other)
    assert list(truths) == list(range(1, STEPS + 1))
    for step, truth in truths.items():
        state = state_at(tmp_path / "run.chain", step)
        assert_same(state, truth)
        assert [group.options["lr"] for group in state.groups] == [1e-2, 0.1]


def test_a_step_has_the_rates_that_a_schedule_set_after_it(model: Model, tmp_path: Path) -> None:
    optimizer = AdamW(trained(model), 1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rates = {}
    with Recorder(model, optimizer, tmp_path / "run.chain") as recorder:
        for step in range(STEPS):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
            if step != MIDDLE:  # nothing is noted of one step: it has the rates of the next
                recorder.note(scheduler=scheduler)
            rates[step + 1] = optimizer.param_groups[0]["lr"]
    by_step = {step: state_at(tmp_path / "run.chain", step) for step in rates}
    assert {step: state.groups[0].options["lr"] for step, state in by_step.items()} == rates
    assert by_step[STEPS].extras["scheduler"]["last_epoch"] == STEPS


def test_noted_tensors_come_back_as_tensors_and_arrays_as_arrays(model: Model, tmp_path: Path) -> None:
    """Of types that NumPy lacks, too, in the opened step and in what `load` gives."""
    notes = {
        "rate": torch.tensor(0.5),
        "halves": [torch.arange(3).bfloat16(), (torch.zeros(0, 2),)],
        "array": np.arange(2),
    }
    optimizer = AdamW(trained(model), 1e-2, fused=True)
    with Recorder(model, optimizer, tmp_path / "run.chain") as recorder:
        train(model, optimizer, range(1))
        recorder.note(held=notes)
    state = state_at(tmp_path / "run.chain", 1)
    assert state.parameters["held/halves/0"].states["model"].dtype.name == "bfloat16"
    held = load(tmp_path / "run.chain", model, optimizer).extras["held"]
    (halves, (empty,)), array = held["halves"], held["array"]
    assert torch.equal(held["rate"], notes["rate"])
    assert torch.equal(halves, torch.arange(3).bfloat16())
    assert (halves.dtype, empty.shape) == (torch.bfloat16, (0, 2))
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [0, 1]


def test_a_run_goes_on_from_a_restored_step_as_if_nothing_was(model: Model, tmp_path: Path) -> None:

    optimizer = AdamW(trained(model), 1e-2, fused=True)
    with Recorder(model, optimizer, tmp_path / "run.chain"):
        truths = train(model, optimizer, range(STEPS))
    again = Model()
    optimizer = AdamW(trained(again), 1e-2, fused=True)
    assert load(f"{tmp_path}/run.chain@{MIDDLE}", again, optimizer).step == MIDDLE
    later = train(again, optimizer, range(MIDDLE, STEPS))
    for step, truth in later.items():
        for name, expected in truths[step].items():
            for state, value in expected.items():
                assert np.array_equal(truth[name][state], value), (step, name, state)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3, sparse=True)

    def forward(self, x: torch.Tensor, _: bool = True) -> torch.Tensor:
        return self.table(torch.arange(len(x))).mean(-1)


class Halves(torch.optim.Optimizer):
    """Keeps what is not one number for each element."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                norm = parameter.grad.norm()
                self.state[parameter]["norm"] = norm.reshape(1).expand(2).clone()
                parameter.data -= group["lr"] * parameter.grad / norm


UPDATED: dict[str, tuple[Callable[[nn.Module], nn.Module], Make]] = {
    "bfloat16": (lambda model: model.bfloat16(), lambda p: Sgd(p, 0.1, momentum=0.9)),
    "float64": (lambda model: model.double(), lambda p: Sgd(p, 0.1, momentum=0.9)),
    "adafactor": (lambda model: model, lambda p: torch.optim.Adafactor(p)),
    "nadam": (lambda model: model, lambda p: torch.optim.NAdam(p)),
    "own": (lambda model: model, lambda p: Halves(p, 0.1)),
    "sparse": (lambda model: Sparse(), lambda p: torch.optim.SparseAdam(p)),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", UPDATED)
def test_recorder_records_states_when_steps_cannot_be_replayed(name: str, model: Model, tmp_path: Path) -> None:
    change, make = UPDATED[name]
    changed = change(model)
    optimizer = make(trained(changed))
    with Recorder(changed, optimizer, tmp_path / "run.chain") as recorder:
        truths = train(changed, optimizer, range(STEPS))
    assert recorder.broken is None
    assert recorder.exactness == "exact"
    for step in (1, MIDDLE, STEPS):
        assert_same(state_at(tmp_path / "run.chain", step), truths[step])


def test_recorder_refuses_an_optimizer_of_another_model(model: Model, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="not a parameter of the"):
        Recorder(model, Sgd([nn.Parameter(torch.ones(3))], 0.1), tmp_path / "run.chain")
    assert not (tmp_path / "run.chain" / chain_file.NAME).exists()


def test_rename_refuses_one_name_for_two_tensors(model: Model, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"gives `.*` and `.*` the same name `w`"):
        Recorder(model, Sgd(trained(model), 0.1), tmp_path / "run.chain", rename=lambda name: "w")
