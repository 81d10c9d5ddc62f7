"""Trees of state dicts: every tensor of a file is a weight, a state or an extra, and what was decided is said."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.tensor import Replicate

from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.tensor import Tensor, read
from ckpt_formats.core.values import tensor_names
from ckpt_formats.engines.torch_save import Torch
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from damage import BAD_RULES, NOT_FOUND, UNSUPPORTED, ckpt
from effort import examples
from rank_files import being, rows, spread, write

State = Mapping[str, torch.Tensor]


def net(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def trained(model: nn.Module, kind: Callable[..., Any] = optim.AdamW, groups: Any = None, **options: Any) -> Any:
    """An optimizer that has made a step, so that it has states."""
    optimizer = kind(list(model.parameters()) if groups is None else groups, **options)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total: torch.Tensor = sum((p.float() ** 2).sum() for p in model.parameters())
        total.backward()
        return total

    optimizer.step(loss)
    return optimizer


G, D, TWIN = net(4, 8, 3, seed=1), net(3, 7, 1, seed=2), net(4, 8, 3, seed=3)
OPT_G, OPT_D, OPT_TWIN = trained(G), trained(D), trained(TWIN)


def saved(folder: Path, tree: Any, name: str = "file.pt") -> Path:
    path = folder / name
    torch.save(tree, path)
    return path


def raw(values: torch.Tensor) -> bytes:
    return values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def is_same(actual: Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == tuple(expected.shape) and read(actual).tobytes() == raw(expected)


def has_states(checkpoint: Checkpoint, model: nn.Module, optimizer: Any, prefix: str = "") -> bool:
    """Is every state of the optimizer with its parameter, bit for bit?"""
    for name, parameter in model.named_parameters():
        own = checkpoint.parameters[prefix + name]
        for state, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor) and not is_same(own.states[state], value):
                return False
    return True


def has_weights(checkpoint: Checkpoint, state: State, prefix: str = "") -> bool:
    return all(is_same(checkpoint.parameters[prefix + name].states[MODEL], value) for name, value in state.items())


def weights(checkpoint: Checkpoint) -> set[str]:
    return {p.name for p in checkpoint.parameters.values() if p.role != "extra"}


def notices_of(checkpoint: Checkpoint) -> str:
    return "\n".join(map(str, checkpoint.notices))


# Optimizers, wherever they are


PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "opt": lambda m, o: {"model": m, "opt": o},
    "d_opt": lambda m, o: {"model": m, "d_opt": o},
    "solver": lambda m, o: {"net": m, "solver": o},
    "optimizers": lambda m, o: {"model": m, "optimizers": [o]},
    "optimizers of a dict": lambda m, o: {"model": m, "optimizers": {"main": o}},
    "lightning": lambda m, o: {
        "state_dict": m,
        "optimizer_states": [o],
        "lr_schedulers": [{"last_epoch": 1}],
        "loops": {},
    },
    "trainer": lambda m, o: {"model": m, "trainer": {"optimizer": o, "epoch": 3}},
    "actor": lambda m, o: {"actor": m, "actor_optimizer": o},
    "state": lambda m, o: {"state": {"model": m, "optim": o, "epoch": 2}},
    "weights": lambda m, o: {"weights": m, "optim_states": o, "rng": torch.get_rng_state()},
    "bare": lambda m, o: {**m, "anything": o},
    "joined": lambda m, o: {**m, **o},
    "inside the model": lambda m, o: {"model": {**m, "o": o}},
    "fairseq": lambda m, o: {"model": m, "last_optimizer_state": o, "optimizer_history": [{"num_updates": 3}]},
    "apex": lambda m, o: {"model": m, "optimizer": {"optimizer_state_dict": o, "loss_scaler": {"scale": 8.0}}},
    "tuple": lambda m, o: (m, o),
    "states by name": lambda m, o: {
        "model": m,
        "adam": {n: o["state"][i] for i, n in enumerate(m)},
    },
}
PREFIXES = {"actor": "actor.", "tuple": "0."}


@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_is_no_part_of_the_model_wherever_it_is(place: str, tmp_path: Path) -> None:
    path = saved(tmp_path, PLACES[place](G.state_dict(), OPT_G.state_dict()))
    checkpoint = open_checkpoint(path)
    prefix = PREFIXES.get(place, "")
    assert weights(checkpoint) == {prefix + name for name in G.state_dict()}
    assert has_weights(checkpoint, G.state_dict(), prefix)
    assert has_states(checkpoint, G, OPT_G, prefix)
    target = tmp_path / "model.safetensors"
    assert ckpt("convert", path, target, "--to", "safetensors").code == 0
    assert set(open_checkpoint(target).parameters) == weights(checkpoint)


OPTIMIZER_ALONE = {
    "the file": OPT_G.state_dict(),
    "under its key": {"optimizer": OPT_G.state_dict()},
    "list": {"optimizer_states": [OPT_G.state_dict()], "epoch": 3},
    "states": {"state": OPT_G.state_dict()["state"]},
}


@pytest.mark.parametrize("tree", OPTIMIZER_ALONE.values(), ids=OPTIMIZER_ALONE)
def test_an_optimizer_alone_is_carried_and_is_no_model(tree: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, tree)
    for command in (["inspect", path], ["verify", path], ["convert", path, tmp_path / "universal"]):
        ran = ckpt(*command)
        assert (ran.code, "no weights of a model" in ran.err) == (0, True), ran.err
    checkpoint = open_checkpoint(tmp_path / "universal")
    assert {parameter.role for parameter in checkpoint.parameters.values()} == {"extra"}
    moments = [state["exp_avg"] for state in OPT_G.state_dict()["state"].values()]
    carried = [parameter.weight for name, parameter in checkpoint.parameters.items() if name.endswith("exp_avg")]
    assert all(is_same(*pair) for pair in zip(carried, moments, strict=True))
    for format in ("safetensors", "hf", "deepspeed", "megatron"):
        ran = ckpt("convert", path, tmp_path / "target", "--to", format)
        assert (ran.code, "weights" in ran.err) == (UNSUPPORTED, True), ran.err
        assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
@pytest.mark.parametrize(
    ("tree", "code", "says"),
    [
        ({"python": 3, "cpu": torch.get_rng_state()}, UNSUPPORTED, "no weights"),
        ({"last_epoch": 3, "_last_lr": [0.1]}, NOT_FOUND, "without a tensor"),
        ({"_scale": 65536.0}, NOT_FOUND, "without a tensor"),
    ],
    ids=["rng", "scheduler", "scaler"],
)
def test_side_files_are_refused_without_their_model(
    command: str, tree: Any, code: int, says: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, tree)
    ran = ckpt(command, path, *([tmp_path / "target"] if command == "convert" else []))
    assert (ran.code, says in ran.err) == (code, True), ran.err
    assert not (tmp_path / "target").exists()


def test_notes_name_an_optimizer_of_unknown_form(tmp_path: Path) -> None:
    moments = {"mu": {"w": torch.ones(3, 2)}, "nu": [torch.zeros(3, 2)]}
    checkpoint = open_checkpoint(saved(tmp_path, {"weights": {"w": torch.rand(3, 2)}, "opt_state": moments}))
    assert weights(checkpoint) == {"w"}
    assert is_same(checkpoint.parameters["opt_state/mu/w"].states[MODEL], moments["mu"]["w"])
    assert "opt_state" in notices_of(checkpoint)


KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    kind.__name__: (kind, options)
    for kind, options in (
        (optim.NAdam, {}),
        (optim.RAdam, {}),
        (optim.Adafactor, {}),
        (optim.Adagrad, {}),
        (optim.RMSprop, {"centered": True}),
        (optim.ASGD, {}),
        (optim.Rprop, {}),
        (optim.SGD, {"momentum": 0.9}),
        (optim.Adamax, {}),
        (optim.Adadelta, {}),
        (optim.LBFGS, {}),
    )
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_states_of_every_optimizer_have_names(kind: str, tmp_path: Path) -> None:
    make, options = KINDS[kind]
    model = net(4, 8, 3)
    optimizer = trained(model, make, **options)
    checkpoint = open_checkpoint(saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    assert has_states(checkpoint, model, optimizer)
    assert len(checkpoint.groups) == 1
    assert set(checkpoint.groups[0].names) == weights(checkpoint)


def numbered(model: nn.Module, states: Callable[[torch.Tensor], Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer's state dict as those of other libraries have it."""
    parameters = list(model.parameters())
    kept = {i: dict(states(p.detach())) for i, p in enumerate(parameters)}
    return {"state": kept, "param_groups": [{"lr": 0.1, "params": list(range(len(parameters)))}]}


def hf_adafactor(p: torch.Tensor) -> dict[str, Any]:
    rows = {"exp_avg_sq_row": p.mean(-1), "exp_avg_sq_col": p.mean(-2)} if p.ndim > 1 else {"exp_avg_sq": p * p}
    return {"step": 3, "RMS": p.norm(), **rows}


LIBRARIES: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "Adafactor of transformers": hf_adafactor,
    "Lion": lambda p: {"exp_avg": p * 2},
    "8-bit Adam of bitsandbytes": lambda p: {
        "step": 3,
        "state1": p.to(torch.uint8),
        "state2": p.to(torch.uint8),
        "qmap1": torch.linspace(-1, 1, 8),
        "qmap2": torch.linspace(0, 1, 8),
        "absmax1": torch.ones(1),
        "absmax2": torch.ones(1),
    },
    "master weights beside": lambda p: {"step": torch.tensor(3.0), "exp_avg": p * 2, "master_param": p.float()},
    "a counter of another name": lambda p: {"count": torch.tensor(3), "momentum": p * 3},
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_states_of_other_libraries_optimizers_have_names(library: str, tmp_path: Path) -> None:
    model = net(4, 8, 3).bfloat16()
    optimizer = numbered(model, LIBRARIES[library])
    checkpoint = open_checkpoint(saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer}))
    for i, name in enumerate(model.state_dict()):
        for state, value in optimizer["state"][i].items():
            if isinstance(value, torch.Tensor):
                assert is_same(checkpoint.parameters[name].states[state], value), (name, state)
            else:
                assert checkpoint.parameters[name].values[state] == value


def test_numbers_that_shapes_do_not_tell_are_taken_in_order_and_that_is_said(tmp_path: Path) -> None:
    model = net(4, 4, 4)
    path = saved(tmp_path, {"model": model.state_dict(), "optimizer": trained(model).state_dict()})
    assert "several orders" in ckpt("inspect", path).err
    clear = net(4, 8, 3)
    path = saved(tmp_path, {"model": clear.state_dict(), "optimizer": trained(clear).state_dict()})
    assert "order" not in ckpt("inspect", path).err


# Several of each


def test_a_list_of_optimizers_of_one_model_is_matched_together(tmp_path: Path) -> None:
    """Muon has the matrices, AdamW the vectors."""
    model = net(4, 8, 3)
    matrices = trained(model, optim.Muon, [p for p in model.parameters() if p.ndim > 1], lr=0.1)
    vectors = trained(model, optim.AdamW, [p for p in model.parameters() if p.ndim < 2])
    tree = {"model": model.state_dict(), "optimizer": [matrices.state_dict(), vectors.state_dict()]}
    path = saved(tmp_path, tree)
    checkpoint = open_checkpoint(path)
    assert [set(group.names) for group in checkpoint.groups] == [{"0.weight", "1.weight"}, {"0.bias", "1.bias"}]
    assert all(
        is_same(checkpoint.parameters[n].states["momentum_buffer"], matrices.state[p]["momentum_buffer"])
        for n, p in model.named_parameters()
        if p.ndim > 1
    )
    assert "optimizer.0, optimizer.1" in notices_of(checkpoint)


def gan(second: nn.Module, opt: Any) -> dict[str, Any]:
    return {
        "netG": G.state_dict(),
        "netD": second.state_dict(),
        "optG": OPT_G.state_dict(),
        "optD": opt.state_dict(),
        "epoch": 3,
    }


def test_models_and_optimizers_are_tied_where_shapes_fit_in_one_way(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, gan(D, OPT_D)))
    assert has_states(checkpoint, G, OPT_G, "netG.")
    assert has_states(checkpoint, D, OPT_D, "netD.")
    assert "netG, netD" in notices_of(checkpoint)
    lightning = {
        "state_dict": {
            **{f"G.{k}": v for k, v in G.state_dict().items()},
            **{f"D.{k}": v for k, v in D.state_dict().items()},
        },
        "optimizer_states": [OPT_G.state_dict(), OPT_D.state_dict()],
        "global_step": 7,
    }
    checkpoint = open_checkpoint(saved(tmp_path, lightning))
    assert has_states(checkpoint, G, OPT_G, "G.")
    assert has_states(checkpoint, D, OPT_D, "D.")
    assert checkpoint.origin.step == 7


def test_models_that_are_alike_need_the_orders_of_their_optimizers(tmp_path: Path) -> None:
    path = saved(tmp_path, gan(TWIN, OPT_TWIN))
    ran = ckpt("inspect", path)
    assert (ran.code, "--param-order optG=FILE" in ran.err) == (0, True), ran.err
    carried = open_checkpoint(path)
    assert not carried.groups
    assert is_same(carried.parameters["optG/state/0/exp_avg"].states[MODEL], OPT_G.state[G[0].weight]["exp_avg"])
    order = tmp_path / "g.txt"
    order.write_text("\n".join(f"netG.{name}" for name in G.state_dict()))
    target = tmp_path / "target"
    assert ckpt("convert", path, target, "--param-order", f"optG={order}").code == 0
    checkpoint = open_checkpoint(target)
    assert has_states(checkpoint, G, OPT_G, "netG.")
    assert has_states(checkpoint, TWIN, OPT_TWIN, "netD.")
    wrong = ckpt("inspect", path, "--param-order", f"optX={order}")
    assert (wrong.code, "optG, optD" in wrong.err) == (BAD_RULES, True)
    unsaid = ckpt("inspect", path, "--param-order", order)
    assert (unsaid.code, "PLACE=FILE" in unsaid.err) == (BAD_RULES, True)
    twice = ckpt("inspect", path, "--param-order", f"optG={order}", "--param-order", f"optG={order}")
    assert (twice.code, "twice" in twice.err) == (BAD_RULES, True)


def test_two_optimizers_of_the_same_parameters_do_not_overwrite_each_other(tmp_path: Path) -> None:
    first, second = trained(G), trained(G, optim.SGD, momentum=0.9, lr=0.1)
    names = list(G.state_dict())

    def named(optimizer: Any) -> Any:
        state = optimizer.state_dict()
        return {"state": {names[i]: s for i, s in state["state"].items()}, "param_groups": [{"params": names}]}

    tree = {"model": G.state_dict(), "a_opt": named(first), "b_opt": named(second)}
    checkpoint = open_checkpoint(saved(tmp_path, tree))
    assert has_states(checkpoint, G, first)
    kept = checkpoint.parameters["b_opt/state/0.weight/momentum_buffer"].states[MODEL]
    assert is_same(kept, second.state[G[0].weight]["momentum_buffer"])
    assert "b_opt" in notices_of(checkpoint)


CHOICES: dict[str, tuple[Any, set[str], set[str], str]] = {
    # tree, names of weights begin with, extras, said
    "ema": ({"model": G.state_dict(), "ema": {"shadow": G.state_dict(), "decay": 0.9}}, {""}, {"ema"}, "ema"),
    "lightning": (
        {"state_dict": G.state_dict(), "ema_state_dict": TWIN.state_dict()},
        {""},
        {"ema_state_dict"},
        "ema_state_dict",
    ),
    "gan": ({"G": G.state_dict(), "D": D.state_dict()}, {"G.", "D."}, set(), "G, D"),
    "with averages": ({"G": G.state_dict(), "G_ema": TWIN.state_dict()}, {"G."}, {"G_ema"}, "G_ema"),
    "teacher": (
        {"teacher": G.state_dict(), "student": D.state_dict(), "rng": {"cpu": torch.get_rng_state()}},
        {"teacher.", "student."},
        {"rng"},
        "teacher, student",
    ),
    "esrgan": ({"params": G.state_dict(), "params_ema": TWIN.state_dict()}, {""}, {"params_ema"}, "params_ema"),
    "list": ({"models": [G.state_dict(), D.state_dict()], "epoch": 1}, {"models.0.", "models.1."}, {"epoch"}, "models"),
    "beside by name": ({"model": G.state_dict(), "loss_net": D.state_dict()}, {""}, {"loss_net"}, "loss_net"),
    "loss": ({"encoder": G.state_dict(), "loss": torch.tensor(0.5)}, {"encoder."}, {"loss"}, "encoder"),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_which_of_several_models_was_read_is_said_and_the_others_are_carried(choice: str, tmp_path: Path) -> None:
    tree, prefixes, extras, says = CHOICES[choice]
    checkpoint = open_checkpoint(saved(tmp_path, tree))
    ends = {**G.state_dict(), **D.state_dict()}
    assert weights(checkpoint) == {p + name for p in prefixes for name in ends}
    assert set(checkpoint.extras) == extras
    assert says in notices_of(checkpoint)
    assert lost(tree, checkpoint) == []


def lost(tree: Any, checkpoint: Checkpoint) -> list[str]:
    """The places of tensors whose bytes no weight, state or extra has."""
    have = {(t.dtype.name, t.shape, read(t).tobytes()) for _, _, t in checkpoint.tensors()}
    return [
        place
        for place, tensor in tensors_in(tree)
        if (str(tensor.dtype)[6:], tuple(tensor.shape), raw(tensor)) not in have
    ]


def tensors_in(tree: Any, place: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [(place, tree)]
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return [inner for key, item in items for inner in tensors_in(item, f"{place}/{key}")]


# Names that meet


@pytest.mark.parametrize("name", ["param", "fp32"])
@pytest.mark.parametrize("target", ["universal", "torch", "dcp"])
def test_a_state_that_is_called_as_weights_are_here_is_no_weight(name: str, target: str, tmp_path: Path) -> None:
    w, state = torch.rand(3, 2), torch.rand(3, 2)
    tree = {"model": {"w": w}, "optimizer": {"state": {"w": {name: state}}, "param_groups": [{"params": ["w"]}]}}
    path = saved(tmp_path, tree)
    assert f"w.{name}" in ckpt("inspect", path).err
    out = tmp_path / ("out.pt" if target == "torch" else "out")
    ran = ckpt("convert", path, out, "--to", target)
    assert ran.code == 0, ran.err
    checkpoint = open_checkpoint(out)
    assert is_same(checkpoint.parameters["w"].weight, w)
    (inside,) = tensor_names(checkpoint.parameters["w"].values[name])
    assert is_same(checkpoint.parameters[inside].states[MODEL], state)


def test_entries_that_have_the_names_of_ours_are_somebody_elses(tmp_path: Path) -> None:
    for tree in (
        {"model": G.state_dict(), "extras": {"ckpt": {"best": torch.ones(2), "path": "x"}}},
        {"model": G.state_dict(), "ckpt": {"record": "wandb/run-3", "best": torch.ones(2)}},
    ):
        checkpoint = open_checkpoint(saved(tmp_path, tree))
        assert weights(checkpoint) == set(G.state_dict())
        assert lost(tree, checkpoint) == []


@pytest.mark.parametrize(
    ("state", "groups", "says"),
    [
        ({0: {"m": torch.ones(2)}, "0": {"m": torch.zeros(2)}}, [{"params": [0]}], "type"),
        ({0: {1: torch.ones(2), "1": torch.zeros(2)}}, [{"params": [0]}], "type"),
        ({0: {"m": torch.ones(2)}}, [{"params": [0], 1: 2, "1": 3}], "type"),
        ({0: {"m": torch.ones(2)}}, [{"params": [0, 0]}], "twice"),
        ({0: {"m": torch.ones(2)}}, [{"params": [0]}, {"params": [0]}], "twice"),
        ({0: {"m": torch.ones(2)}}, [{"params": [0, 1], "param_names": ["w", "w"]}], "one name"),
        ({0: {"m": torch.ones(2)}}, [{"lr": 0.1}], "does not list"),
        ({7: {"m": torch.ones(2)}}, [{"params": [0]}], "no group lists"),
        ({"v": {"m": torch.ones(2)}}, [{"params": ["v"]}], "does not have"),
        ({0: {"m": torch.ones(5)}}, [{"params": [0]}], "no assignment"),
    ],
    ids=["keys", "states", "options", "twice", "two groups", "names", "no params", "unlisted", "unknown", "shape"],
)
def test_an_optimizer_that_contradicts_itself_or_the_model_is_carried_and_why_is_said(
    state: Any, groups: Any, says: str, tmp_path: Path
) -> None:
    tree = {"model": {"w": torch.rand(2)}, "optimizer": {"state": state, "param_groups": groups}}
    checkpoint = open_checkpoint(saved(tmp_path, tree))
    assert not checkpoint.groups
    assert says in notices_of(checkpoint)
    assert "optimizer" in checkpoint.extras
    assert lost(tree, checkpoint) == []


def test_states_of_another_shape_than_their_parameter_are_named(tmp_path: Path) -> None:
    states = {"w": {"exp_avg": torch.ones(5)}, "v": {"exp_avg": torch.ones(3)}}
    tree = {
        "model": {"w": torch.rand(2), "v": torch.rand(3), "x": torch.rand(4)},
        "optimizer": {"state": states, "param_groups": [{"params": ["w", "v", "x"]}]},
    }
    checkpoint = open_checkpoint(saved(tmp_path, tree))
    assert "another shape than their parameter: w.exp_avg\n" in notices_of(checkpoint) + "\n"
    assert "no state of these parameters: it never updated them, or their states are missing: x" in notices_of(
        checkpoint
    )


def test_tensors_that_share_values_but_are_trained_apart_are_two_parameters(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight.data = model["a"].weight.data
    optimizer = trained(model)
    optimizer.state[model["b"].weight]["exp_avg"] += 1
    for state in (optimizer.state_dict(), named_states(optimizer.state_dict(), ["a.weight", "b.weight"])):
        checkpoint = open_checkpoint(saved(tmp_path, {"model": model.state_dict(), "optimizer": state}))
        assert weights(checkpoint) == {"a.weight", "b.weight"}
        assert has_states(checkpoint, model, optimizer)
        assert "share values" in notices_of(checkpoint)


def named_states(state: Any, names: list[str]) -> Any:
    return {
        "state": {names[i]: kept for i, kept in state["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
    }


@pytest.mark.parametrize(
    "wrap",
    [lambda n: f"module.{n}", lambda n: f"_orig_mod.{n}", lambda n: f"model.{n}"],
    ids=["DDP", "compile", "prefix"],
)
def test_an_optimizer_by_name_is_told_to_a_model_that_was_wrapped(wrap: Callable[[str], str], tmp_path: Path) -> None:
    names = list(G.state_dict())
    tree = {
        "model": {wrap(name): value for name, value in G.state_dict().items()},
        "optimizer": named_states(OPT_G.state_dict(), names),
    }
    checkpoint = open_checkpoint(saved(tmp_path, tree))
    assert all(
        is_same(checkpoint.parameters[wrap(n)].states["exp_avg"], OPT_G.state[p]["exp_avg"])
        for n, p in G.named_parameters()
    )


def test_names_that_several_submodules_have_are_told_by_shapes_or_not_at_all(tmp_path: Path) -> None:
    opt_g, opt_d = (named_states(o.state_dict(), list(m.state_dict())) for o, m in ((OPT_G, G), (OPT_D, D)))
    tree = {"G": G.state_dict(), "D": D.state_dict(), "g_opt": opt_g, "d_opt": opt_d}
    checkpoint = open_checkpoint(saved(tmp_path, tree))
    assert has_states(checkpoint, G, OPT_G, "G.")
    assert has_states(checkpoint, D, OPT_D, "D.")
    alike = {"student": G.state_dict(), "teacher": TWIN.state_dict(), "opt": opt_g}
    checkpoint = open_checkpoint(saved(tmp_path, alike))
    assert not checkpoint.groups
    assert "several submodules" in notices_of(checkpoint)
    assert lost(alike, checkpoint) == []


def test_an_optimizer_elsewhere_does_not_take_the_names_of_the_models_own(tmp_path: Path) -> None:
    other = {"state": {0: {"exp_avg": torch.rand(9)}}, "param_groups": [{"params": [0]}]}
    tree = {"model": G.state_dict(), "optimizer": OPT_G.state_dict(), "callbacks": {"x": {"optimizer": other}}}
    checkpoint = open_checkpoint(saved(tmp_path, tree))
    assert has_states(checkpoint, G, OPT_G)
    assert "callbacks.x.optimizer" in notices_of(checkpoint)
    assert lost(tree, checkpoint) == []


# Flattened, and spread over ranks


def flattened(prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, parameter in G.named_parameters():
        flat |= {f"{prefix}state.{name}.{k}": v for k, v in OPT_G.state[parameter].items()}
        flat |= {f"{prefix}param_groups.{name}.lr": 0.1}
    return flat


@pytest.mark.quick(100)
@pytest.mark.parametrize(
    "tree",
    [
        {**G.state_dict(), **flattened()},
        {"model": {**G.state_dict(), **flattened()}},
        {"model": G.state_dict(), "optimizer": flattened()},
        {"model": G.state_dict(), **flattened("optimizer.")},
        {**{f"model.{k}": v for k, v in G.state_dict().items()}, **flattened("optimizer.")},
    ],
    ids=["merged", "in the model", "apart", "prefix", "prefixes"],
)
def test_a_flattened_optimizer_beside_the_models_names_is_no_model(tree: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, tree))
    prefix = "model." if "model.0.weight" in tree else ""
    assert weights(checkpoint) == {prefix + name for name in G.state_dict()}
    assert has_states(checkpoint, G, OPT_G, prefix)
    assert checkpoint.groups[0].options == {"lr": 0.1}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_dcp_of_model_and_flattened_optimizer_in_one_dict_has_states(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({**G.state_dict(), **flattened()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    checkpoint = open_checkpoint(tmp_path / "dcp")
    assert weights(checkpoint) == set(G.state_dict())
    assert has_states(checkpoint, G, OPT_G)
    assert ckpt("convert", tmp_path / "dcp", tmp_path / "again", "--to", "dcp").code == 0
    loaded = {
        **{k: torch.zeros_like(v) for k, v in G.state_dict().items()},
        "state.0.weight.exp_avg": torch.zeros(8, 4),
    }
    dcp.load(loaded, checkpoint_id=str(tmp_path / "again"), no_dist=True)
    assert raw(loaded["state.0.weight.exp_avg"]) == raw(OPT_G.state[G[0].weight]["exp_avg"])


def test_open_reads_a_module_called_state(tmp_path: Path) -> None:
    tree = {"state.weight": torch.rand(2, 3), "state.bias": torch.rand(2), "encoder.weight": torch.rand(2, 2)}
    assert weights(open_checkpoint(saved(tmp_path, tree))) == set(tree)
    only = {key: value for key, value in tree.items() if key.startswith("state.")}
    assert weights(open_checkpoint(saved(tmp_path, only))) == set(only)


# Steps


def test_steps_and_epochs_that_contradict_each_other_are_said(tmp_path: Path) -> None:
    tree = {"model": G.state_dict(), "step": 10, "train_state": {"step": 8}, "epoch": 2, "trainer": {"epoch": 3}}
    checkpoint = open_checkpoint(saved(tmp_path, tree))
    assert checkpoint.origin.step == 10
    assert "step 10, train_state.step 8" in notices_of(checkpoint)
    assert "epoch 2, trainer.epoch 3" in notices_of(checkpoint)
    agreeing = {"model": G.state_dict(), "step": 10, "train_state": {"step": 10}, "optimizer": OPT_G.state_dict()}
    assert "more than one" not in notices_of(open_checkpoint(saved(tmp_path, agreeing)))


# One rank's part


W = torch.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
@pytest.mark.parametrize(
    "wrap",
    [lambda w: {"model": {"w": w}}, lambda w: {"w": w}, lambda w: [{"w": w}]],
    ids=["a model", "a dict", "a list"],
)
def test_open_takes_dtensors_of_one_rank_for_no_model(command: str, wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    with being(1, 2):
        path = saved(tmp_path, wrap(rows(W, 2)), "model_rank1.pt")
    ran = ckpt(command, path, *([tmp_path / "target"] if command == "convert" else []))
    assert (ran.code, "model_rank0.pt" in ran.err) == (UNSUPPORTED, True), ran.err


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_open_takes_sharded_tensors_of_one_rank_for_no_model(tmp_path: Path) -> None:
    with being(1, 3):
        blocks = [ShardMetadata([2 * i, 0], [2, 3], f"rank:{i}/cpu") for i in range(3)]
        whole = ShardedTensorMetadata(blocks, torch.Size((6, 3)), TensorProperties(dtype=torch.float32))
        own = ShardedTensor._init_from_local_shards_and_global_metadata([Shard(W[:2], blocks[1])], whole)
        path = saved(tmp_path, {"w": own}, "epoch2-rank1.pt")
    ran = ckpt("inspect", path)
    assert ran.code == UNSUPPORTED
    assert "epoch2-rank0.pt, epoch2-rank2.pt" in ran.err


@pytest.mark.parametrize("name", ["_flat_param", "layers.0._flat_param"])
def test_open_takes_flat_parameters_for_no_model(name: str, tmp_path: Path) -> None:
    ran = ckpt("inspect", saved(tmp_path, {"state_dict": {name: torch.ones(8)}}))
    assert (ran.code, "flat parameter" in ran.err) == (UNSUPPORTED, True)


def test_dtensors_that_one_rank_has_all_of_are_tensors(tmp_path: Path) -> None:
    with being(1, 2):
        path = saved(tmp_path, {"model": {"w": spread(W, [0, 1], [Replicate()]), "b": torch.ones(2)}})
    checkpoint = open_checkpoint(path)
    assert is_same(checkpoint.parameters["w"].states[MODEL], W)
    with being(0, 1):
        path = saved(tmp_path, {"w": rows(W, 1)})
    assert is_same(open_checkpoint(path).parameters["w"].states[MODEL], W)


def test_rank_files_of_model_and_optimizer_have_states(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        optimizer = {"state": {0: {"exp_avg": rows(W * 2, 2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        ema = {"w": rows(W * 3, 2)}
        return {"model": {"w": rows(W, 2)}, "optimizer": optimizer, "ema": ema, "epoch": 3}

    checkpoint = open_checkpoint(write(tmp_path / "ranks", 2, model=state))
    assert weights(checkpoint) == {"w"}
    states = checkpoint.parameters["w"].states
    assert is_same(states[MODEL], W)
    assert is_same(states["exp_avg"], W * 2)
    assert is_same(checkpoint.parameters["ema/w"].states[MODEL], W * 3)
    assert checkpoint.extras["epoch"] == 3


@pytest.mark.parametrize(("second", "unsure"), [(W, True), (W[:2], False)], ids=["alike", "another size"])
def test_slices_that_were_named_by_their_order_alone_are_said(second: Any, unsure: bool, tmp_path: Path) -> None:
    whole = (W, second)

    def model(rank: int) -> Any:
        return {name: rows(tensor, 2) for name, tensor in zip("ab", whole, strict=True)}

    def optimizer(rank: int) -> Any:
        slices = {i: {"exp_avg": t.reshape(2, -1)[rank].clone() * 2} for i, t in enumerate(whole)}
        return {"state": slices, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}

    checkpoint = open_checkpoint(write(tmp_path / "ranks", 2, model=model, optim=optimizer))
    assert is_same(checkpoint.parameters["b"].states["exp_avg"], second * 2)
    assert ("several orders" in notices_of(checkpoint)) == unsure


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({f"model.layers.{i}.w": torch.ones(2) for i in range(4, 8)}, "begin with number 0"),
        ({"model": G.state_dict(), "pp_rank": 1}, "pp_rank 1"),
        ({"model": G.state_dict(), "args": {"tensor_model_parallel_size": 2}}, "tensor_model_parallel_size 2"),
        ({"model": G.state_dict(), "args": {5: 1, "tp_rank": 1}}, "tp_rank 1"),
    ],
    ids=["layers", "rank", "size", "beside a number"],
)
def test_notes_name_what_looks_like_a_stage_or_a_shard(tree: Any, says: str, tmp_path: Path) -> None:
    assert says in ckpt("inspect", saved(tmp_path, tree)).err


def test_layers_that_have_no_weights_are_not_missed(tmp_path: Path) -> None:
    model = {"layers.1.weight": torch.ones(2), "layers.3.weight": torch.ones(2), "h.0.w": torch.ones(1)}
    assert notices_of(open_checkpoint(saved(tmp_path, {"model": model, "tp_size": 1, "pp_rank": 0}))) == ""


# The law


_NAMES = """model state_dict net G D ema weights opt optimizer optim state params w a.b a b rng extras ckpt loss 0 queue
param fp32 scheduler module value"""
KEYS = st.sampled_from(_NAMES.split())
STATES = st.sampled_from(["exp_avg", "exp_avg_sq", "step", "param", "fp32", "momentum_buffer", "x.y", "b"])
SIZES = st.sampled_from([(), (1,), (2,), (3,), (2, 3), (3, 2), (0,)])
LEAVES = SIZES | st.integers(0, 9) | st.none() | st.lists(SIZES, max_size=2)
MODELS = st.dictionaries(KEYS, SIZES, min_size=1, max_size=5)


@st.composite
def optimizers(draw: st.DrawFn) -> Any:
    keys = draw(st.lists(KEYS, max_size=3, unique=True) | st.lists(st.integers(0, 4), max_size=3, unique=True))
    kept = {key: draw(st.dictionaries(STATES, SIZES, max_size=3)) for key in keys}
    if draw(st.booleans()) and all(isinstance(key, str) for key in keys):
        flat: dict[Any, Any] = {f"state.{key}.{s}": v for key, own in kept.items() for s, v in own.items()}
        return flat | {f"param_groups.{key}.lr": 0.1 for key in keys}
    groups = [{"lr": 0.1, "params": keys}] if draw(st.booleans()) else [{"lr": 0.1}]
    return {"state": kept, "param_groups": groups, **draw(st.dictionaries(KEYS, SIZES, max_size=1))}


JOINED = st.tuples(MODELS, optimizers()).map(lambda pair: {**pair[0], **pair[1]})
TREES = st.recursive(
    MODELS | optimizers() | LEAVES,
    lambda inner: st.dictionaries(KEYS, inner, max_size=4) | st.lists(inner, max_size=2) | JOINED,
    max_leaves=6,
)


def planted(tree: Any, count: Iterator[int]) -> Any:
    """The tree with a tensor of its own numbers for each shape in it."""
    if isinstance(tree, tuple):
        return torch.full(tree, next(count), dtype=torch.float32)
    if isinstance(tree, dict):
        return {key: planted(value, count) for key, value in tree.items()}
    return [planted(value, count) for value in tree] if isinstance(tree, list) else tree


@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=4))
@settings(max_examples=examples(25))
def test_every_tensor_of_a_tree_is_a_weight_a_state_or_an_extra_there_and_back(shapes: dict[str, Any]) -> None:
    tree = planted(shapes, count(1))
    with TemporaryDirectory() as folder:
        path = saved(Path(folder), tree)
        try:
            checkpoint = open_checkpoint(path)
        except CkptError:
            return  # no model in it, or names that meet
        assert lost(tree, checkpoint) == []
        save(checkpoint, Path(folder) / "universal", Universal(), resources=Execution(1, 1 << 20))
        universal = open_checkpoint(Path(folder) / "universal")
        assert lost(tree, universal) == []
        save(universal, Path(folder) / "ours.pt", Torch(), resources=Execution(1, 1 << 20))
        assert lost(tree, open_checkpoint(Path(folder) / "ours.pt")) == []
        save(universal, Path(folder) / "back.pt", Torch(original=True), resources=Execution(1, 1 << 20))
        back = torch.load(Path(folder) / "back.pt")
        assert {(place, raw(t)) for place, t in tensors_in(back)} == {(place, raw(t)) for place, t in tensors_in(tree)}
