"""Remove from names the components of wrappers: FSDP1, torch.compile, activation checkpointing and DDP."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
_DDP = "module."


@dataclass(frozen=True)
class WrapperNames:
    """A function that removes the components of wrappers from a name."""

    ddp: bool

    def __call__(self, name: Value) -> Value:
        if not isinstance(name, str):
            return name
        plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        return plain.removeprefix(_DDP) if self.ddp else plain

    def keys(self, tree: Mapping[Value, Value], where: Path) -> dict[Value, Value]:
        """The dict with unwrapped keys. Raises `CorruptError` if two keys become equal."""
        renamed: dict[Value, Value] = {}
        for key, value in tree.items():
            if self(key) in renamed:
                raise CorruptError(
                    f"two tensors are called `{printable(self(key))}` when wrappers are left out", where=where
                )
            renamed[self(key)] = value
        return renamed

    def optimizer(self, tree: Mapping[str, Value], where: Path) -> dict[str, Value]:
        """An optimizer's state dict, nested or flat, with unwrapped names."""
        renamed: dict[str, Value] = {}
        for key, value in self.keys(tree, where).items():
            if key == "state" and isinstance(value, dict):
                value = self.keys(value, where)
            elif key == "param_groups" and isinstance(value, list):
                value = [self._group(group) if isinstance(group, dict) else group for group in value]
            renamed[key] = value
        return renamed

    def _group(self, group: Mapping[str, Value]) -> dict[str, Value]:
        listed = {key: group[key] for key in ("params", "param_names") if isinstance(group.get(key), list)}
        return {**group, **{key: [self(name) for name in names] for key, names in listed.items()}}


def unwrapping(names: Iterable[str]) -> WrapperNames:
    """The function for all names of a model. It removes `module.` only if every name begins with it."""
    plain = [WrapperNames(ddp=False)(name) for name in names]
    return WrapperNames(bool(plain) and all(name.startswith(_DDP) for name in plain))
