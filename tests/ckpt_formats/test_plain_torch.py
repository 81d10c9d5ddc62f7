"""Files of `torch.save`, against torch: what it saves we read, what we write it loads, and training goes on."""

import copy as copying
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from torch import nn

from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Group, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, CorruptError, NotFoundError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.engines.torch_save import Torch
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from held import SHAPES, array, checkpoint, contents, everything, folder, parameter, plain, tensor
from typed_values import values

EFFORT = Execution(2, 1 << 20)
TORCH_TYPES = [d for d in DTYPES.values() if hasattr(torch, d.name)]


class Net(nn.Module):
    """Tied, frozen, with buffers, and with several parameters of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 5)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(self.embed(tokens))))
        return self.head(torch.tanh(self.second(hidden)) * self.scale)


def decay_groups(net: nn.Module) -> list[dict[str, Any]]:
    """As everyone has them: matrices decay, vectors do not; a third group has its own rate."""
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in trained if p.dim() == 0], "lr": 0.01},
    ]


def flat_group(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def all_of_it(net: nn.Module) -> list[nn.Parameter]:
    return list(net.parameters())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda given: torch.optim.Adam(given, lr=0.01, amsgrad=True),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.01, betas=(0.8, 0.99)),
    "adafactor": lambda given: torch.optim.Adafactor(given, lr=0.01),
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=0.01),
    "rmsprop": lambda given: torch.optim.RMSprop(given, lr=0.01, centered=True, momentum=0.5),
}
GROUPINGS: dict[str, Callable[[nn.Module], Any]] = {
    "one group": flat_group,
    "three groups": decay_groups,
    "frozen too": all_of_it,
    "by name": lambda net: [(n, p) for n, p in net.named_parameters() if p.requires_grad],
}


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(11, (8,), generator=random), torch.randint(11, (8,), generator=random)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[bytes]:
    """The losses, in bits."""
    losses = []
    for step in steps:
        tokens, targets = batch(step)
        loss = nn.functional.cross_entropy(net(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().numpy().tobytes())
    return losses


def trained(optimizer: str, grouping: str, steps: int = 3) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = Net()
    torch_optimizer = OPTIMIZERS[optimizer](GROUPINGS[grouping](net))
    train(net, torch_optimizer, range(steps))
    return net, torch_optimizer


def raw(values: torch.Tensor) -> bytes:
    flat = values.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_holds(actual: Checkpoint, state: dict[str, torch.Tensor]) -> None:
    """All of a state dict, tied names and all, bit for bit."""
    assert {*actual.parameters, *actual.aliases} >= set(state)
    for name, expected in state.items():
        stored = actual.parameters[actual.aliases.get(name, name)].states[MODEL]
        assert (stored.dtype.name, stored.shape) == (str(expected.dtype)[6:], tuple(expected.shape)), name
        assert read(stored).tobytes() == raw(expected), name


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True, map_location="cpu")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: dict(state),
        lambda state: {"model": state, "epoch": 3},
        lambda state: {"state_dict": state},
        lambda state: {"module": {"encoder": state}},
        lambda state: {"net": {k: v.clone() for k, v in state.items()}},
    ],
    ids=["flat", "dict", "model", "state_dict", "nested", "cloned"],
)
def test_any_usual_form_of_a_state_dict_reads_bit_for_bit(
    wrap: Callable[[Any], Any], legacy: bool, tmp_path: Path
) -> None:
    net, _ = trained("sgd", "one group")
    path = tmp_path / "file.pt"
    saved = wrap(net.state_dict())
    torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
    restored = open_checkpoint(path)
    inner = next((v for v in saved.values() if isinstance(v, dict)), saved)
    if "encoder" in inner:
        inner = {f"encoder.{k}": v for k, v in inner["encoder"].items()}
    assert_holds(restored, {k: v for k, v in inner.items() if isinstance(v, torch.Tensor)})
    roles = {name.removeprefix("encoder."): p.role for name, p in restored.parameters.items()}
    assert roles["table"] == roles["norm.running_mean"] == roles["norm.num_batches_tracked"] == "buffer"
    assert roles["embed.weight"] == "parameter"
    if "epoch" in saved:
        assert restored.extras["epoch"] == 3


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_tensors_of_every_type_and_shape_read_and_are_written_true(legacy: bool, tmp_path: Path) -> None:
    state = {}
    for dtype in TORCH_TYPES:
        for shape in SHAPES:
            values = array(dtype, shape)
            original = torch.frombuffer(bytearray(values.tobytes() or b"\0" * 16), dtype=getattr(torch, dtype.name))
            state[f"{dtype.name}{shape}"] = original[: values.size].reshape(shape).clone()
    if legacy:
        state = {
            n: t
            for n, t in state.items()
            if t.dtype not in (torch.uint16, torch.uint32, torch.uint64) and "float8" not in n
        }
    torch.save(state, tmp_path / "theirs.pt", _use_new_zipfile_serialization=not legacy)
    original = open_checkpoint(tmp_path / "theirs.pt")
    assert_holds(original, state)
    save(original, tmp_path / "ours.pt", Torch(), resources=EFFORT)
    assert {n: raw(t) for n, t in load(tmp_path / "ours.pt")["model"].items()} == {n: raw(t) for n, t in state.items()}


def test_transposed_and_expanded_tensors_and_views_read_true(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "t": base.t(),
        "row": base[2],
        "column": base[:, 3],
        "step": base[::2, 1::3],
        "all": base,
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "zero": base[4:],
        "scalar": base[1, 1],
    }
    torch.save(state, tmp_path / "file.pt")
    restored = open_checkpoint(tmp_path / "file.pt")
    assert_holds(restored, state)
    save(restored, tmp_path / "ours.pt", Torch(), resources=EFFORT)
    assert_holds(open_checkpoint(tmp_path / "ours.pt"), state)


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("name", "grouping"), [(n, g) for i, n in enumerate(OPTIMIZERS) for j, g in enumerate(GROUPINGS) if (i + j) % 2]
)
def test_training_goes_on_bit_for_bit_through_universal_and_back(name: str, grouping: str, tmp_path: Path) -> None:
    """Saved by number, read by name, written by name, loaded by number again."""
    net, optimizer = trained(name, grouping)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "saved.pt")
    source = open_checkpoint(tmp_path / "saved.pt")
    if "optimizer" in source.extras:  # more names than states, and nothing that tells them apart
        assert name == "sgd"
        assert grouping in ("one group", "three groups")
        assert source.notices
        return
    assert source.origin.step == 3
    save(source, tmp_path / "universal", Universal(), resources=EFFORT)
    save(open_checkpoint(tmp_path / "universal"), tmp_path / "back.pt", Torch(), resources=EFFORT)
    back = load(tmp_path / "back.pt")

    torch.manual_seed(99)
    fresh = Net()
    fresh.load_state_dict(back["model"])
    resumed = OPTIMIZERS[name](GROUPINGS[grouping](fresh))
    numbered = resumed.state_dict()
    # Names in the order of the groups, as this optimizer numbers them.
    names = {id(p): n for n, p in fresh.named_parameters()}
    order = [names[id(p)] for group in resumed.param_groups for p in group["params"]]
    saved_groups = back["optimizer"]["param_groups"]
    assert [n for group in saved_groups for n in group["params"]] == order
    for group, saved in zip(numbered["param_groups"], saved_groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    numbered["state"] = {
        i: back["optimizer"]["state"][n] for i, n in enumerate(order) if n in back["optimizer"]["state"]
    }
    resumed.load_state_dict(numbered)

    original = copying.deepcopy(optimizer.state_dict())
    assert repr(resumed.state_dict()["param_groups"]) == repr(original["param_groups"])
    assert train(fresh, resumed, range(3, 9)) == train(net, optimizer, range(3, 9))
    for (n, ours), theirs in zip(fresh.state_dict().items(), net.state_dict().values(), strict=True):
        assert raw(ours) == raw(theirs), n


def test_a_complex_parameter_is_trained(tmp_path: Path) -> None:
    net = nn.ParameterDict({"a": torch.zeros(3), "c": torch.ones(2, dtype=torch.complex64)})
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    (net["c"].abs().sum() + net["a"].sum()).backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    complex_parameter = open_checkpoint(tmp_path / "c.pt").parameters["c"]
    assert complex_parameter.role == "parameter"
    with Reader() as reader:
        assert read(complex_parameter.states["exp_avg"], reader).tobytes() == raw(optimizer.state[net["c"]]["exp_avg"])


def test_a_pickle_without_tensors_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "values.pt").write_bytes(b"\x80\x02N.")
    with pytest.raises(NotFoundError, match="not a checkpoint"):
        open_checkpoint(tmp_path / "values.pt")


def test_an_optimizer_whose_numbers_could_mean_two_things_is_carried_not_guessed(tmp_path: Path) -> None:
    """Two trained of three of one shape: which?"""
    net = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    optimizer = torch.optim.Adam([net[0].weight, net[2].weight])
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    restored = open_checkpoint(tmp_path / "saved.pt")
    assert restored.notices
    assert all(set(p.states) == {MODEL} for p in restored.parameters.values() if p.role != "extra")
    save(restored, tmp_path / "ours.pt", Torch(), resources=EFFORT)
    carried, saved = load(tmp_path / "ours.pt")["extras"]["optimizer"], optimizer.state_dict()
    assert carried["param_groups"] == saved["param_groups"]
    for number, state in saved["state"].items():
        assert {k: raw(v) for k, v in carried["state"][number].items()} == {k: raw(v) for k, v in state.items()}


def test_tied_weights_share_their_storage_again(tmp_path: Path) -> None:
    net, _ = trained("sgd", "one group")
    torch.save(net.state_dict(), tmp_path / "saved.pt")
    restored = open_checkpoint(tmp_path / "saved.pt")
    assert restored.aliases == {"head.weight": "embed.weight"}
    save(restored, tmp_path / "universal", Universal(), resources=EFFORT)
    save(open_checkpoint(tmp_path / "universal"), tmp_path / "back.pt", Torch(), resources=EFFORT)
    model = load(tmp_path / "back.pt")["model"]
    assert model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()
    assert model["first.weight"].data_ptr() != model["second.weight"].data_ptr()
    Net().load_state_dict(model)


@pytest.mark.parametrize("values_of", [lambda p: p.data, lambda p: p], ids=["tensors", "parameters"])
def test_written_file_loads_with_weights_only(values_of: Callable[[Any], Any], tmp_path: Path) -> None:
    net, optimizer = trained("adamw", "three groups")
    torch.save(
        {"model": {n: values_of(p) for n, p in net.named_parameters()}, "optimizer": optimizer.state_dict()},
        tmp_path / "saved.pt",
    )
    save(open_checkpoint(tmp_path / "saved.pt"), tmp_path / "ours.pt", Torch(), resources=EFFORT)
    ours = load(tmp_path / "ours.pt")
    assert {n: raw(t) for n, t in ours["model"].items()} == {n: raw(p) for n, p in net.named_parameters()}
    assert [g["weight_decay"] for g in ours["optimizer"]["param_groups"]] == [0.1, 0.0, 0.01]
    assert [g["betas"] for g in ours["optimizer"]["param_groups"]] == [(0.8, 0.99)] * 3


def through(source: Checkpoint, at: Path) -> Checkpoint:
    save(source, at / "file.pt", Torch(), resources=EFFORT)
    load(at / "file.pt")
    return Torch().read(at / "file.pt", ReadOptions())


def test_written_checkpoint_is_read_back_the_same(tmp_path: Path) -> None:
    source = everything()
    reopened = through(source, tmp_path)
    assert contents(reopened) == contents(source)
    assert list(reopened.parameters) == list(source.parameters)
    assert {n: (p.role, plain(dict(p.values))) for n, p in reopened.parameters.items()} == {
        n: (p.role, plain(dict(p.values))) for n, p in source.parameters.items()
    }
    assert (reopened.groups, reopened.extras, reopened.aliases, reopened.origin) == (
        source.groups,
        source.extras,
        source.aliases,
        source.origin,
    )


def has_tensor_name(value: Value) -> bool:
    return "TensorName" in repr(value)


@given(values.filter(lambda value: not has_tensor_name(value)))
@example({"$b": 1})
@example({"a": {"$b": 1}})
@example([{"$tuple": [1]}])
@example({"$dict": []})
@example(np.str_("a"))
@example(10**6000)
@example(-(10**700))
@example(b"\x00\xff")
@example({1: {2: {3.5: 4}}})
@example("\ud800")
def test_any_value_survives_among_the_extras_the_options_and_the_values(value: Value) -> None:
    one = Parameter("w", "parameter", {MODEL: tensor(np.zeros(2, np.float32))}, {"a": value, "$b": value})
    source = checkpoint(
        [one], (Group({"lr": value, "$c": value}, ("w",)),), {"x": value, "$y": value, "z": [value], "ckpt": value}
    )
    with folder() as at:
        reopened = through(source, at)
        assert plain(dict(reopened.extras)) == plain(dict(source.extras))
        assert plain(dict(reopened.parameters["w"].values)) == plain(dict(one.values))
        assert plain(dict(reopened.groups[0].options)) == plain(dict(source.groups[0].options))


def test_tensors_among_the_extras_keep_their_places(tmp_path: Path) -> None:
    rng = torch.get_rng_state()
    shared = torch.arange(3)
    saved = {"model": {"w": torch.ones(2)}, "rng": rng, "deep": [1, {"a": (shared, shared)}], "empty": torch.zeros(0)}
    torch.save(saved, tmp_path / "saved.pt")
    restored = open_checkpoint(tmp_path / "saved.pt")
    assert isinstance(restored.extras["rng"], TensorName)
    save(restored, tmp_path / "universal", Universal(), resources=EFFORT)
    back = through(open_checkpoint(tmp_path / "universal"), tmp_path)
    assert plain(dict(back.extras)) == plain(dict(restored.extras))
    extras = load(tmp_path / "file.pt")["extras"]
    assert raw(extras["rng"]) == raw(rng)
    assert [raw(t) for t in extras["deep"][1]["a"]] == [raw(shared)] * 2


def test_ordered_dicts_among_the_extras_may_hold_tensors(tmp_path: Path) -> None:
    """Averages of the weights, as a second state dict with all its metadata."""
    net, _ = trained("sgd", "one group")
    torch.save(
        {"model": net.state_dict(), "ema": net.state_dict(), "sets": [{1, 2}], "counts": Counter("aab")},
        tmp_path / "saved.pt",
    )
    restored = open_checkpoint(tmp_path / "saved.pt")
    back = through(restored, tmp_path)
    assert plain(dict(back.extras)) == plain(dict(restored.extras))
    ema = load(tmp_path / "file.pt")["extras"]["ema"]
    assert isinstance(ema, OrderedDict)
    assert {n: raw(t) for n, t in ema.items()} == {n: raw(t) for n, t in net.state_dict().items()}
    assert ema._metadata == net.state_dict()._metadata


def test_tensors_among_options_and_values_are_carried(tmp_path: Path) -> None:
    """A learning rate in a tensor, a history in a list."""
    net, _ = trained("sgd", "one group")
    lr = torch.tensor(0.125)
    optimizer = torch.optim.AdamW(flat_group(net), lr=lr, foreach=False)  # the first is `scale`, the module's own
    train(net, optimizer, range(2))
    state = optimizer.state_dict()
    state["state"][0]["history"] = [torch.arange(2), {"deep": torch.ones(1)}]
    torch.save({"model": net.state_dict(), "optimizer": state}, tmp_path / "saved.pt")
    restored = open_checkpoint(tmp_path / "saved.pt")
    save(restored, tmp_path / "universal", Universal(), resources=EFFORT)
    back = through(open_checkpoint(tmp_path / "universal"), tmp_path)
    ours = load(tmp_path / "file.pt")["optimizer"]
    assert raw(ours["param_groups"][0]["lr"]) == raw(lr)
    assert raw(ours["state"]["scale"]["history"][0]) == raw(torch.arange(2))
    assert plain(dict(back.groups[0].options)) == plain(dict(restored.groups[0].options))
    assert plain(dict(back.parameters["scale"].values)) == plain(dict(restored.parameters["scale"].values))


def test_empty_tensors_among_the_extras_are_told_apart() -> None:
    """They share no storage, or all the same none."""
    extras = {name: TensorName(name) for name in ("a", "b", "c")}
    parameters = [parameter(name, {MODEL: np.zeros((0, i), np.float32)}, "extra") for i, name in enumerate(extras)]
    with folder() as at:
        assert through(checkpoint(parameters, extras=extras), at).extras == extras


def laughs(levels: int = 60) -> Any:
    value: Any = {"ha": 1}
    for _ in range(levels):
        value = {"a": value, "b": value}
    return value


def cycle() -> Any:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


def tensor_laughs(levels: int = 40) -> Any:
    value: Any = {"t": torch.ones(1)}
    for _ in range(levels):
        value = {"a": value, "b": value}
    return value


def nested(levels: int = 400) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.timeout(60)
@pytest.mark.parametrize("target", [Universal(), Torch()], ids=["universal", "torch"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda bad: {"w": torch.ones(2), "bad": bad},
        lambda bad: {"model": {"w": torch.ones(2), "bad": bad}},
        lambda bad: {"model": bad, "w": torch.ones(2)},
        lambda bad: {"w": torch.ones(2), "bad": [bad]},
        lambda bad: {
            "model": {"w": torch.ones(2)},
            "optimizer": {"state": {0: bad}, "param_groups": [{"params": [0], "x": bad}]},
        },
    ],
    ids=["beside", "inside", "as the model", "in a list", "in the optimizer"],
)
@pytest.mark.parametrize("bad", [laughs, tensor_laughs, cycle, nested], ids=lambda bad: bad.__name__)
def test_values_without_end_are_refused_or_carried_but_never_hang(
    bad: Callable[[], Any], wrap: Callable[[Any], Any], target: Any, tmp_path: Path
) -> None:
    torch.save(wrap(bad()), tmp_path / "bad.pt")
    with pytest.raises(CkptError):
        save(open_checkpoint(tmp_path / "bad.pt"), tmp_path / "target", target, resources=EFFORT)
    assert not (tmp_path / "target").exists()


OURS_DAMAGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a role": lambda root: root["extras"]["ckpt"]["roles"].update(w="king"),
    "a name": lambda root: root["extras"]["ckpt"]["roles"].update(nobody="parameter"),
    "no roles": lambda root: root["extras"]["ckpt"].pop("roles"),
    "no tensors": lambda root: root["extras"]["ckpt"].pop("tensors"),
    "no origin": lambda root: root["extras"]["ckpt"].pop("origin"),
    "an origin": lambda root: root["extras"]["ckpt"].update(origin=[1]),
    "a weight": lambda root: root["model"].update(w=5),
    "groups": lambda root: root["optimizer"].update(param_groups=3),
    "a group": lambda root: root["optimizer"]["param_groups"][0].pop("params"),
    "names of a group": lambda root: root["optimizer"]["param_groups"][0].update(params=7),
    "a state": lambda root: root["optimizer"]["state"].update(w=[1]),
    "an alias": lambda root: root["extras"]["ckpt"].update(aliases=[]),
    "typed values": lambda root: root["extras"].update(a={"$array": {}}),
    "a strange tensor": lambda root: root["extras"].update(a=torch.ones(1)),
}


@pytest.mark.parametrize("kind", OURS_DAMAGED)
def test_a_file_in_our_form_that_contradicts_itself_is_corrupt(kind: str, tmp_path: Path) -> None:
    one = parameter("w", {"model": np.ones(2, np.float32), "exp_avg": np.ones(2, np.float32)}, step=1)
    save(checkpoint([one], (Group({}, ("w",)),)), tmp_path / "ours.pt", Torch(), resources=EFFORT)
    root = load(tmp_path / "ours.pt")
    torch.save(root, tmp_path / "same.pt")
    assert contents(open_checkpoint(tmp_path / "same.pt")) == contents(checkpoint([one]))
    OURS_DAMAGED[kind](root)
    torch.save(root, tmp_path / "bad.pt")
    with pytest.raises(CorruptError):
        open_checkpoint(tmp_path / "bad.pt")


def test_a_flipped_bit_of_a_tensor_is_never_copied(tmp_path: Path) -> None:
    net, _ = trained("sgd", "one group")
    torch.save(net.state_dict(), tmp_path / "saved.pt")
    raw_blob = next(open_checkpoint(tmp_path / "saved.pt").parameters["first.weight"].states[MODEL].sources())
    good = (tmp_path / "saved.pt").read_bytes()
    bad = bytearray(good)
    bad[raw_blob.offset + 5] ^= 4
    (tmp_path / "saved.pt").write_bytes(bytes(bad))
    with pytest.raises(CorruptError, match="crc32"):
        save(open_checkpoint(tmp_path / "saved.pt"), tmp_path / "target", Universal(), resources=EFFORT)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "x.ckpt", "no-suffix"])
def test_the_format_is_told_by_content(name: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / name)
    assert detect(tmp_path / name).name == "torch"
    assert not Torch().detect(tmp_path)
    assert not Torch().detect(tmp_path / "absent.pt")


@pytest.mark.parametrize("average", ["teacher", "target_encoder", "other"])
def test_optimizer_is_matched_to_the_trained_one_of_two_models(average: str, tmp_path: Path) -> None:
    trained, copy = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)) for _ in range(2))
    trained[0].register_parameter("scale", torch.nn.Parameter(torch.ones(7, 1), requires_grad=False))
    own = [one for one in trained.parameters() if one.requires_grad]
    groups = [{"params": [one for one in own if (one.ndim > 1) is large]} for large in (True, False)]
    optimizer = torch.optim.AdamW(groups)
    trained(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    file = {"student": trained.state_dict(), average: copy.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(file, tmp_path / "model.pt")
    run = open_checkpoint(tmp_path / "model.pt")
    texts = [str(notice) for notice in run.notices]
    if average == "other":
        assert any("could not be matched" in text for text in texts)
        return
    assert f"the one model that, by its key, is not an average of another, as these are: {average}" in " ".join(texts)
    for name, one in trained.named_parameters():
        states = run.parameters[f"student.{name}"].states
        assert ("exp_avg" in states) is one.requires_grad
        if one.requires_grad:
            assert np.array_equal(read(states["exp_avg"]), optimizer.state[one]["exp_avg"].numpy())
    assert {p.role for name, p in run.parameters.items() if name.startswith(f"{average}.")} == {"frozen"}


@pytest.mark.parametrize("is_master", [True, False])
def test_states_called_fp32_are_masters_if_they_round_to_the_weights(is_master: bool, tmp_path: Path) -> None:
    masters = {name: torch.linspace(-1, 1, 3000).reshape(30, 100) * scale for name, scale in (("a", 1), ("b", 3))}
    weights = {name: (master if is_master else master * 1.1).bfloat16() for name, master in masters.items()}
    states = {name: {"fp32": master, "exp_avg": master * 0.5} for name, master in masters.items()}
    file = tmp_path / "state.pt"
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": list(masters)}]}
    torch.save({"model": weights, "optimizer": optimizer}, file)
    source = open_checkpoint(file)
    notices = " ".join(map(str, source.notices))
    assert ("are read as masters" in notices, "are carried as values" in notices) == (is_master, not is_master)
    assert [("master" in source[name].states) for name in masters] == [is_master] * 2
    save(source, tmp_path / "out", Universal())
    stored = open_checkpoint(tmp_path / "out")
    packs = sum(one.stat().st_size for one in (tmp_path / "out" / "packs").iterdir())
    assert (packs < 2 * 30 * 100 * (4 + 4 + 1)) == is_master, "the weights take no space if they are rounded masters"
    save(stored, tmp_path / "back.pt", Torch())
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    for name, own in states.items():
        assert torch.equal(back["model"][name], weights[name])
        assert torch.equal(back["optimizer"]["state"][name]["fp32"], own["fp32"])
