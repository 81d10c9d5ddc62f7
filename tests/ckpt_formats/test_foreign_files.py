"""Files that other libraries wrote (tests/foreign_files): what is not a plain tensor is read as plain values."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.job import save
from ckpt_formats.core.errors import UnsafeError
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Global, Record
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.state_dicts.plain_values import plain_value

FILES = Path(__file__).parents[1] / "foreign_files"
CONFIGURATIONS = {
    "lightning-2.6-omegaconf-2.4.ckpt": {"cfg": {"model": {"lr": 1e-3, "layers": [1, 2, 3]}}, "alpha": 1},
    "omegaconf-2.4-structured.ckpt": {
        "s": {"x": 1, "y": None, "z": [1, 2], "d": {}, "u": 3, "m": "???", "t": (1, 2)},
        "name": "n",
    },
    "addict-2.4.ckpt": {"lr": 1e-3, "net": {"a": [1, 2, {"x": 1}], "n": None}},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_torch_reads_configurations_as_the_dicts_that_they_wrap(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(FILES / name)
    assert checkpoint.extras["hyper_parameters"] == CONFIGURATIONS[name]
    assert {"l.weight", "l.bias"} == set(checkpoint)
    assert sum("configurations" in notice.text for notice in checkpoint.notices) == 1
    save(checkpoint, tmp_path / "out.pt")
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    assert written["extras"]["hyper_parameters"] == CONFIGURATIONS[name]


class AttrDict(dict[str, Any]):
    """As repositories of research have it: its attributes are its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


def test_torch_reads_dicts_that_are_their_own_attributes(tmp_path: Path) -> None:
    shared = AttrDict(b=[1])
    values = AttrDict(a=shared, again=shared, empty=AttrDict())
    torch.save({"model": {"w": torch.ones(2)}, "h": values}, tmp_path / "c.pt")
    extras = open_checkpoint(tmp_path / "c.pt").extras
    assert extras["h"] == {"a": {"b": [1]}, "again": {"b": [1]}, "empty": {}}


def test_torch_returns_a_tensordict_as_it_was(tmp_path: Path) -> None:
    path = FILES / "tensordict-0.15.pt"
    checkpoint = open_checkpoint(path)
    assert {name: parameter.shape for name, parameter in checkpoint.parameters.items()} == {"a": (3, 4), "b.c": (3,)}
    assert "the file is a TensorDict, read as a dict of tensors" in [notice.text for notice in checkpoint.notices]
    assert np.isfinite(read(checkpoint["b.c"].weight)).all()
    assert Record not in map(type, checkpoint.extras.values())


class _Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("value", [{"a": 1}, (1,), _Call(list, ())])
def test_torch_takes_items_of_known_types_only(value: Any, tmp_path: Path) -> None:
    import operator

    torch.save({"model": {"w": torch.ones(2)}, "h": _Call(operator.getitem, value, 0)}, tmp_path / "c.pt")
    with pytest.raises(UnsafeError, match="takes an item"):
        open_checkpoint(tmp_path / "c.pt")


def test_torch_bounds_a_configuration_that_contains_itself() -> None:
    node = Record(Global("omegaconf.dictconfig", "DictConfig"), state={})
    node.state["_content"] = {"a": node, "b": Record(Global("omegaconf.nodes", "AnyNode"), state={"_val": 5})}
    plain = plain_value(node, "here")
    assert plain["b"] == 5
    deep: Any = Record(Global("omegaconf.nodes", "AnyNode"), state={"_val": 1})
    for _ in range(10_000):
        deep = Record(Global("omegaconf.nodes", "AnyNode"), state={"_val": deep})
    plain_value(deep, "here")
