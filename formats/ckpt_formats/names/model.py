"""The stored tensors of a model in a dialect: their names, shapes and packings, from its hyperparameters."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby

from ckpt_formats.core.claims import MAX_EXPECTED_NAMES
from ckpt_formats.core.errors import UnsafeError, UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.names.expressions import Expression, InnerScope, Scope, evaluate, natural
from ckpt_formats.names.hyperparameters import Values
from ckpt_formats.names.packings import Node, Packing, atoms_of
from ckpt_formats.names.tables import Dialect, NameRule, Place, blocks, dialect, places_of_atoms

AtomKey = tuple[str, int | None, int | None]
"""An atom of a model: its name, its layer (layers for multi-token prediction come last), its expert."""

_PlaceKey = tuple[Place, int | None]
_HEAD, _EMBEDDING = "head.tokens", "embedding.tokens"
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Tie:
    """Two names of one tensor, in models that tie the head to the embedding."""

    alias: str
    """The name that files omit."""
    name: str


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of a model in a dialect."""

    names: tuple[str, ...]
    """Its possible names; the first is written."""
    packing: Node
    scope: Scope
    """The hyperparameters, and the numbers of the layer and the expert."""
    keys: tuple[AtomKey, ...]
    """Its atoms, in the order of its packing."""

    @property
    def is_copy(self) -> bool:
        """True if it repeats a tensor, and may be missing."""
        return isinstance(self.packing, Packing) and self.packing.kind == "copy"


@dataclass(frozen=True)
class Model:
    """A model by its hyperparameters."""

    values: Values
    base_prefix: str = "model."
    dialects: Mapping[str, Dialect] | None = None
    """The dialects of its family; None: the usual ones."""

    def stored(self, name: str) -> tuple[ModelTensor, ...]:
        """All tensors of the model in a dialect, in the order in which the library registers them.

        They include the second name of a tied tensor. Raises `UnsupportedError` if the dialect has no name for an
        atom, `UnsafeError` if they are too many.
        """
        own = self._dialect(name)
        self._check_count(own)
        return tuple(self._stored(own))

    def of_present(self, name: str, names: Collection[str]) -> "Model":
        """The model without layers for multi-token prediction, unless some of these names of a dialect are in them.

        transformers leaves these layers out of its files, although their configuration states them.
        """
        if not self.values["mtp_layers"]:
            return self
        first = self.values["layers"]
        in_them = (one for one in self.stored(name) if any((layer or 0) >= first for _, layer, _ in one.keys))
        if any(text in names for one in in_them for text in one.names):
            return self
        return replace(self, values={**self.values, "mtp_layers": 0})

    def names(self, name: str) -> tuple[str, ...]:
        """The names that are written in a dialect, in its order."""
        return tuple(one.names[0] for one in self.stored(name))

    def shape(self, atom: str, scope: Scope) -> Shape:
        """The shape of an atom."""
        return tuple(natural(axis, scope) for axis in _axes()[atom])

    def tie(self, name: str) -> Tie | None:
        """The tied names of the model in a dialect, or None."""
        if not self.values["tied"]:
            return None
        own, ends = self._dialect(name), frozenset(self._atoms("model", None))
        rules = [rule for rule in own.rules if rule.place == "model"]
        stored = self._of_place(own, rules, "model", None, ends)
        names = {atom: one.names[0] for one in stored for atom in atoms_of(one.packing)}
        return Tie(names[_HEAD], names[_EMBEDDING])

    @cached_property
    def _blocks(self) -> Mapping[_PlaceKey, frozenset[str]]:
        """The atoms of each place, by its kind and layer."""
        layers, mtp = self.values["layers"], self.values["mtp_layers"]
        keys: list[_PlaceKey] = [("model", None), *(("layer", i) for i in range(layers))]
        keys += [("mtp", layers + i) for i in range(mtp)]
        return {key: frozenset(self._atoms(*key)) for key in keys}

    def _atoms(self, place: Place, layer: int | None) -> Iterator[str]:
        # A layer for multi-token prediction is like the last one of the model.
        scope: Scope = self.values
        if layer is not None:
            scope = InnerScope(scope, {"layer": min(layer, self.values["layers"] - 1)})
        for block in blocks():
            is_there = block.place == place or (place, block.place) == ("mtp", "layer")
            if is_there and evaluate(block.when, scope):
                yield from block.atoms

    def _stored(self, own: Dialect) -> Iterator[ModelTensor]:
        """In the order of the rules: rules of layers that follow each other are repeated together for each layer."""
        present = {key: atoms for key, atoms in self._blocks.items() if key[0] != "mtp" or own.prefixes["mtp"]}
        named: dict[_PlaceKey, set[str]] = {key: set() for key in present}
        for is_of_model, run in groupby(own.rules, lambda rule: rule.place == "model"):
            rules = list(run)
            for key in present:
                if (key[0] == "model") == is_of_model:
                    for one in self._of_place(own, rules, *key, present[key]):
                        named[key].update(atoms_of(one.packing))
                        yield one
        for key, atoms in present.items():
            if missing := sorted(atoms - named[key]):
                raise UnsupportedError(f"{own.name} has no name for `{missing[0]}`, which the model has")

    def _of_place(
        self, own: Dialect, rules: Sequence[NameRule], place: Place, layer: int | None, present: frozenset[str]
    ) -> Iterator[ModelTensor]:
        scope: Scope = self.values
        numbers = {"base": own.prefixes.get("base", self.base_prefix)}
        if layer is not None:
            number = layer - self.values["layers"]
            scope = InnerScope(scope, {"layer": layer, "mtp": number})
            numbers |= {"layer": str(layer), "mtp": str(number)}
        for rule in rules:
            for packing in rule.packings:
                if not (place == "mtp" if packing.is_copy else packing.atoms <= present):
                    continue  # second copies are only in layers for multi-token prediction
                is_inside = rule.place == "layer" or packing.is_copy
                patterns = [own.prefixes[place] + name if is_inside else name for name in rule.names]
                for expert in range(self.values["experts"]) if "{expert}" in rule.names[0] else (None,):
                    filled = {**numbers, "expert": str(expert)}
                    inner = scope if expert is None else InnerScope(scope, {"expert": expert})
                    names = tuple(_filled(pattern, filled) for pattern in patterns)
                    yield ModelTensor(names, packing.node, inner, tuple(_keys(packing.node, inner)))

    def _dialect(self, name: str) -> Dialect:
        return dialect(name) if self.dialects is None else self.dialects[name]

    def _check_count(self, own: Dialect) -> None:
        layers = self.values["layers"] + self.values["mtp_layers"]
        each = sum(self.values["experts"] or 1 if "{expert}" in rule.names[0] else 1 for rule in own.rules)
        if layers * each > MAX_EXPECTED_NAMES:
            raise UnsafeError(f"a model of {layers:,} layers with {self.values['experts'] or 0:,} experts in each")


def _filled(pattern: str, numbers: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: numbers[match[1]], pattern)


def _keys(node: Node, scope: Scope) -> Iterator[AtomKey]:
    if isinstance(node, Packing) and node.kind == "each":
        assert node.size is not None
        for expert in range(natural(node.size, scope)):
            for part in node.parts:
                yield from _keys(part, InnerScope(scope, {"expert": expert}))
        return
    if isinstance(node, Packing):
        for part in node.parts:
            yield from _keys(part, scope)
        return
    yield key_of(node.name, scope)


def key_of(atom: str, scope: Scope) -> AtomKey:
    """The key of an atom in the scope of its layer and expert."""
    if atom == _HEAD and scope.get("tied"):
        atom = _EMBEDDING  # one tensor, however many names and copies it has
    layer = None if places_of_atoms()[atom] == "model" else scope.get("layer")
    expert = scope.get("expert") if atom.startswith("experts.") else None
    return atom, layer if isinstance(layer, int) else None, expert if isinstance(expert, int) else None


@cache
def _axes() -> Mapping[str, tuple[Expression, ...]]:
    return {atom: axes for block in blocks() for atom, axes in block.atoms.items()}
