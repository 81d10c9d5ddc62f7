"""Trees of state dicts: what is written as one is read as what it was, however it is keyed."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_formats.core.checkpoint import Checkpoint, Origin
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError, RulesError
from ckpt_formats.core.tensor import Tensor, read
from ckpt_formats.core.values import TensorName
from ckpt_formats.engines.dcp.nesting import flattened
from ckpt_formats.state_dicts.keys import STYLES, StateKeys, keys_of
from ckpt_formats.state_dicts.read import training_state
from ckpt_formats.state_dicts.record import KEY
from ckpt_formats.state_dicts.write import added_options, state_tree
from held import array, checkpoint, contents, everything, parameter, plain, tensor

F32 = DTYPES["float32"]
WHERE = Path("/tree")


def again(source: Checkpoint, keys: StateKeys, **changes: Any) -> Checkpoint:
    """A checkpoint that went through a tree."""
    state = training_state({**state_tree(source, keys), **changes}, WHERE)
    origin = state.origin or Origin("none")
    return Checkpoint(
        path=WHERE,
        origin=origin,
        parameters=state.parameters,
        groups=state.groups,
        extras=state.extras,
        aliases=state.aliases,
    )


def described(source: Checkpoint) -> Any:
    """All of a checkpoint but its tensors."""
    layout = {key: value for key, value in source.origin.layout.items() if key != "keys"}
    return plain(
        {
            "roles": {p.name: p.role for p in source.parameters.values()},
            "values": {p.name: dict(p.values) for p in source.parameters.values()},
            "groups": [[dict(g.options), list(g.names)] for g in source.groups],
            "extras": dict(sorted(source.extras.items())),
            "aliases": dict(source.aliases),
            "origin": [source.origin.engine, source.origin.version, source.origin.step, layout],
        }
    )


@pytest.mark.parametrize("keys", STYLES.values(), ids=list(STYLES))
def test_a_checkpoint_survives_being_a_tree(keys: StateKeys) -> None:
    source = everything()
    restored = again(source, keys)
    assert contents(restored) == contents(source)
    assert described(restored) == described(source)


@pytest.mark.parametrize("keys", [keys for keys in STYLES.values() if not keys.megatron_fsdp], ids=str)
def test_training_state_has_masters_counters_and_groups_without_a_record(keys: StateKeys) -> None:
    source = everything()
    tree = state_tree(source, keys)
    del tree[KEY]
    model = tree if keys.model is None else tree[keys.model]
    assert contents(checkpoint_of(model["layers.0.w"])) == contents(
        checkpoint_of(source.parameters["layers.0.w"].states["master"])
    )
    assert model["head.w"] is model["layers.0.w"]
    optimizer = tree[str(keys.optimizer)]
    step = optimizer["state.alone.step"] if keys.flat else optimizer["state"]["alone"]["step"]
    assert (step.shape, step.dtype) == ((), F32)
    state = training_state(tree, WHERE)
    assert state.keys == keys
    assert [set(group.names) for group in state.groups] == [{"layers.0.w", "alone"}, {"layers.1.w"}]
    assert state.groups[1].options["lr"] == 0.5


def checkpoint_of(one: Tensor) -> Checkpoint:
    from ckpt_formats.core.checkpoint import Parameter

    return checkpoint([Parameter("one", "parameter", {"model": one})])


def test_a_flat_optimizer_takes_the_longest_name_that_the_model_has() -> None:
    values = {name: tensor(array(F32, (2,), i)) for i, name in enumerate(("a", "a.b", "a.b.c"))}
    optimizer = {
        "state.a.exp_avg": tensor(array(F32, (2,), 3)),
        "state.a.b.inner.exp_avg": tensor(array(F32, (2,), 4)),
        "state.a.b.c.exp_avg": tensor(array(F32, (2,), 5)),
        "param_groups.a.lr": 1.0,
        "param_groups.a.b.lr": 2.0,
        "param_groups.a.b.c.lr": 1.0,
    }
    state = training_state({**values, "optimizer": optimizer, "train_state": {"step": 9}}, WHERE)
    assert {name: set(p.states) for name, p in state.parameters.items()} == {
        "a": {"model", "exp_avg"},
        "a.b": {"model", "inner.exp_avg"},
        "a.b.c": {"model", "exp_avg"},
    }
    assert [group.names for group in state.groups] == [("a", "a.b.c"), ("a.b",)]
    assert (state.step, state.keys) == (9, StateKeys(None, "optimizer", True))


def test_a_flat_optimizer_of_states_alone_needs_no_groups_to_be_one() -> None:
    optimizer = {"state.a.b.exp_avg": tensor(array(F32, (2,), 3)), "state.a.b.exp_avg_sq": tensor(array(F32, (2,), 4))}
    state = training_state({"model": {"a.b": tensor(array(F32, (2,)))}, "optimizer": optimizer}, WHERE)
    assert set(state.parameters["a.b"].states) == {"model", "exp_avg", "exp_avg_sq"}
    assert state.extras == {}


def test_numbers_are_named_by_the_order_that_the_user_gives() -> None:
    model = {name: tensor(array(F32, (3,), i)) for i, name in enumerate("abc")}
    moments = [tensor(array(F32, (3,), 10 + i)) for i in range(2)]
    optimizer = {"state": {i: {"exp_avg": m} for i, m in enumerate(moments)}, "param_groups": [{"params": [0, 1]}]}
    tree = {"model": model, "optimizer": optimizer}
    unnamed = training_state(tree, WHERE)
    assert not unnamed.groups
    assert unnamed.notices
    assert "optimizer" in unnamed.extras
    state = training_state(tree, WHERE, ("c", "a"))
    assert state.groups[0].names == ("c", "a")
    assert state.parameters["c"].states["exp_avg"] is moments[0]


@pytest.mark.parametrize(
    ("order", "says"),
    [(("a",), "names 1"), (("a", "nothing"), "does not exist"), (("a", "long"), "has \\[3\\]")],
    ids=str,
)
def test_an_order_that_cannot_be_is_an_error(order: tuple[str, ...], says: str) -> None:
    model = {name: tensor(array(F32, (3,))) for name in "ab"} | {"long": tensor(array(F32, (4,)))}
    states = {i: {"exp_avg": tensor(array(F32, (3,)))} for i in range(2)}
    tree = {"model": model, "optimizer": {"state": states, "param_groups": [{"params": [0, 1]}]}}
    with pytest.raises(RulesError, match=says):
        training_state(tree, WHERE, order)


def test_numbers_that_became_texts_are_numbers_again() -> None:
    w = tensor(array(F32, (3,)))
    optimizer = {"state": {"0": {"exp_avg": w}}, "param_groups": [{"params": [0]}]}
    state = training_state({"model": {"w": w}, "optimizer": optimizer}, WHERE, ("w",))
    assert (state.groups[0].names, state.notices) == (("w",), ())
    assert state.parameters["w"].states["exp_avg"] is w


def test_scripts_find_what_they_saved_beside_model_and_optimizer() -> None:
    beside = {"ema": {"layers.0.w": 0.5, "b": [1, {"x.y": None}]}, "loader": {"rank_0": b"pickled"}}
    tree = state_tree(checkpoint([], extras=beside), STYLES["nested"])
    assert {key: value for key, value in tree.items() if key not in (KEY, "model")} == beside


@pytest.mark.parametrize(
    "clash", [{"a": {"b": {"c": 1}, "b.c": 2}}, {"a": {"b": 1}, "a.b": 2}, {"model": 1}, {"model.w": 1}], ids=str
)
def test_names_that_clash_when_flattened_are_carried_in_the_record(clash: dict[str, Any]) -> None:
    w = parameter("w", {"model": array(F32, (2,))})
    source = checkpoint([w], extras=clash)
    tree = state_tree(source, STYLES["nested"])
    names = [name for name, _, _ in flattened(tree)]
    assert len(names) == len(set(names))
    assert again(source, STYLES["nested"]).extras == clash


@pytest.mark.parametrize(
    "groups",
    [
        [{"params": [[0]]}],
        [{"params": [{}]}],
        [{"params": 3}],
        [{}],
        [{"params": [0], "param_names": [[]]}],
        [{"params": ["unknown"]}],
        [{"params": [5]}],
        [{"params": ["w", 0]}],
    ],
    ids=str,
)
def test_an_optimizer_that_cannot_be_told_to_names_is_carried_as_it_is(groups: Any) -> None:
    w = tensor(array(F32, (2,)))
    optimizer = {"state": {0: {"exp_avg": w}}, "param_groups": groups}
    state = training_state({"model": {"w": w}, "optimizer": optimizer}, WHERE)
    assert (state.groups, set(state.extras)) == ((), {"optimizer"})
    assert state.notices


def test_a_dict_of_tensors_beside_a_model_at_the_top_is_no_part_of_it() -> None:
    w, cpu = tensor(array(F32, (2,))), tensor(array(DTYPES["uint8"], (5,)))
    optimizer = {"state": {"w": {"exp_avg": w}}, "param_groups": [{"params": ["w"]}]}
    state = training_state({"w": w, "optimizer": optimizer, "rng": {"cpu": cpu}}, WHERE)
    assert {name: p.role for name, p in state.parameters.items()} == {"w": "parameter", "rng/cpu": "extra"}


@pytest.mark.parametrize("field", json.loads(state_tree(everything(), STYLES["nested"])[KEY]["record"]))
@pytest.mark.parametrize("value", [None, 3, "text", [1], [["x"]], {"w": 1}, {"layers.0.w": [2]}], ids=repr)
def test_a_record_with_other_things_in_it_is_an_error_or_harmless(field: str, value: Any) -> None:
    entry = state_tree(everything(), STYLES["nested"])[KEY]
    record = json.loads(entry["record"]) | {field: value}
    with suppress(CorruptError):
        restored = again(everything(), STYLES["nested"], **{KEY: {**entry, "record": json.dumps(record)}})
        assert all(isinstance(name, str) for group in restored.groups for name in group.names)
        contents(restored)


def test_a_record_whose_group_has_other_than_names_is_an_error() -> None:
    entry = state_tree(everything(), STYLES["nested"])[KEY]
    record = json.loads(entry["record"])
    record["groups"][0][1].append(3)
    with pytest.raises(CorruptError, match="not one that ckpt writes"):
        again(everything(), STYLES["nested"], **{KEY: {**entry, "record": json.dumps(record)}})


@pytest.mark.parametrize("broken", ['{"version": 2}', "{}", "[", '{"version": 1, "origin": 3}'])
def test_a_damaged_record_is_an_error(broken: str) -> None:
    with pytest.raises(CorruptError):
        again(everything(), STYLES["nested"], **{KEY: {"record": broken}})


def test_options_are_added_for_adam_of_other_engines_alone() -> None:
    moments = {"model": array(F32, (2,)), "exp_avg": array(F32, (2,)), "exp_avg_sq": array(F32, (2,))}
    from ckpt_formats.core.checkpoint import Group
    from held import parameter

    group = Group({"lr": 0.1, "amsgrad": True}, ("w",))
    foreign = checkpoint([parameter("w", moments, step=1)], (group,))
    assert "amsgrad" not in added_options(foreign)
    assert "fused" in added_options(foreign)
    options = state_tree(foreign, STYLES["nested"])["optim"]["param_groups"][0]
    assert options["amsgrad"] is True
    assert options["decoupled_weight_decay"] is True
    ours = checkpoint([parameter("w", moments)], (group,), origin=Origin("dcp", layout={"keys": StateKeys().to_json()}))
    assert added_options(ours) == ()


def test_values_between_tensors_are_carried_when_the_model_has_no_dict_of_its_own() -> None:
    one, other = tensor(array(F32, (2,))), tensor(array(F32, (3,)))
    state = training_state({"a": {"w": one, "n": 5, "pair": (other, 7), "none": {"x": 1}}, "top": 5}, WHERE)
    assert [name for name, p in state.parameters.items() if p.role != "extra"] == ["a.w"]
    assert plain(state.extras) == plain({"top": 5, "a.n": 5, "a.pair": (TensorName("a.pair/0"), 7), "a.none": {"x": 1}})
    assert state.parameters["a.pair/0"].weight is other


def test_several_optimizers_are_carried_whole() -> None:
    def optimizer() -> dict[str, Any]:
        return {"state": {0: {"exp_avg": tensor(array(F32, (2,)))}}, "param_groups": [{"lr": 0.1, "params": [0]}]}

    tree = {name: {"w": tensor(array(F32, (2,)))} for name in ("generator", "discriminator")}
    state = training_state({**tree, "opt_g": optimizer(), "opt_d": optimizer()}, WHERE)
    assert [n for n, p in state.parameters.items() if p.role != "extra"] == ["generator.w", "discriminator.w"]
    for key in ("opt_g", "opt_d"):
        assert state.extras[key]["param_groups"] == [{"lr": 0.1, "params": [0]}]
        assert state.extras[key]["state"] == {0: {"exp_avg": TensorName(f"{key}/state/0/exp_avg")}}


def test_optimizers_of_a_submodule_each_are_told_by_how_many_parameters_they_have() -> None:
    """Each alone fits several tensors, and both together fit the model in two ways; one submodule fits each."""
    tensors = {"gen.w": (2,), "dis.w": (2,), "dis.v": (2,)}
    model = {name: tensor(array(F32, shape, i)) for i, (name, shape) in enumerate(tensors.items())}

    def optimizer(count: int) -> dict[str, Any]:
        states = {i: {"exp_avg": tensor(array(F32, (2,), 10 * count + i))} for i in range(count)}
        return {"state": states, "param_groups": [{"lr": 0.1, "params": [*states]}]}

    state = training_state({"model": model, "opt_d": optimizer(2), "opt_g": optimizer(1)}, WHERE)
    held = {name: read(p.states["exp_avg"]).tobytes() for name, p in state.parameters.items() if "exp_avg" in p.states}
    assert held == {
        "gen.w": array(F32, (2,), 10).tobytes(),
        "dis.w": array(F32, (2,), 20).tobytes(),
        "dis.v": array(F32, (2,), 21).tobytes(),
    }


@pytest.mark.parametrize("other", [None, 3, {}, {"model": 1, "optimizer": None, "flat": False}, {"model": "m"}])
def test_keys_of_no_known_form_are_none(other: Any) -> None:
    assert keys_of(other) is None
    assert keys_of(StateKeys().to_json()) == StateKeys()
