"""Read the tables of this folder: atoms, dialects, families and hyperparameters, as TOML.

Atoms are what a model's layers compute with, dialects how a library names and packs them, families which values and
names are those of one kind of model. Tables are data: their expressions cannot call anything.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ckpt_formats.names.expressions import Expression, parse_expression
from ckpt_formats.names.packings import Node, Packing, atoms_of, parse_packing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Place = Literal["model", "layer", "mtp"]
"""Where blocks are: once in a model, in each layer, or in each layer for multi-token prediction."""
Kind = Literal["count", "natural", "number", "flag", "text", "activation", "pattern", "texts", "naturals"]
Expressions = Mapping[str, Expression]

DIALECTS = ("hf", "hf_memory", "megatron")
_NEVER = re.compile(r"(?!)")
_HERE = Path(__file__).parent
_IGNORED = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""Saved by old versions of transformers, but always computed."""


@dataclass(frozen=True)
class AtomBlock:
    """Atoms that a place has together, and the condition under which it has them."""

    name: str
    place: Place
    when: Expression
    atoms: Mapping[str, tuple[Expression, ...]]
    """The lengths of the axes of each atom."""


@dataclass(frozen=True)
class NamedPacking:
    """A packing, and what is looked up of it often."""

    node: Node
    atoms: frozenset[str]
    is_copy: bool
    """True if it repeats a tensor, and may be missing."""

    @classmethod
    def of(cls, text: str) -> "NamedPacking":
        """Raises `ValueError` if the text is not a packing."""
        node = parse_packing(text)
        return cls(node, frozenset(atoms_of(node)), isinstance(node, Packing) and node.kind == "copy")


@dataclass(frozen=True)
class NameRule:
    """The names of one stored tensor, as patterns with `{layer}`, `{mtp}`, `{expert}`, `{base}`; and its packings."""

    names: tuple[str, ...]
    """The first is written; the others are those of other implementations of the layers."""
    packings: tuple[NamedPacking, ...]
    """The tensor has that packing whose atoms the place has."""
    place: Place

    @property
    def atoms(self) -> frozenset[str]:
        """The atoms that it names, rather than copies."""
        return frozenset(atom for packing in self.packings if not packing.is_copy for atom in packing.atoms)


@dataclass(frozen=True)
class Settings:
    """What a library states of a model, and the hyperparameters: each as expressions of the other."""

    read: Expressions
    """Hyperparameters, as expressions of the library's entries."""
    write: Expressions
    """The library's entries, as expressions of the hyperparameters."""
    defaults: Mapping[str, object]
    """The values of entries that are not stated."""
    plain: Expressions
    """Entries that no hyperparameter states: if they are stated, they must have these values."""


@dataclass(frozen=True)
class Dialect:
    """The names and settings of one library."""

    name: str
    prefixes: Mapping[str, str]
    rules: tuple[NameRule, ...]
    settings: Settings
    other: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further sections, which only this library has."""


@dataclass(frozen=True)
class Family:
    """One kind of model in transformers."""

    name: str
    model_types: tuple[str, ...]
    """The values of `model_type` in a config.json."""
    architectures: tuple[str, ...]
    """The model classes with these tensors. Other classes of the family have other heads."""
    base_prefix: str
    """The prefix of the names that the model without its head does not have."""
    ignored: re.Pattern[str]
    """Names that files may have, but models do not need."""
    only: Expression
    """A condition on the hyperparameters of models that are of this family rather than of one with fewer options."""
    entries: Mapping[str, str]
    """This family's entry of config.json for a usual one; empty: it has none."""
    settings: Settings
    dialects: Mapping[str, Dialect]
    """With the names of this family."""
    text: str = ""
    """The entry of config.json with the configuration of the part for text, in models that have other parts, too."""
    others: re.Pattern[str] = _NEVER
    """The names of the other parts' tensors, which are the same under all names."""


@dataclass(frozen=True)
class Hyperparameter:
    """A number or an option of models."""

    name: str
    kind: Kind
    when: Expression
    default: object = None
    optional: bool = False
    training: bool = False
    noted: bool = False
    """A difference is noted, not refused: its influence is small."""

    @property
    def is_required(self) -> bool:
        return self.default is None and not self.optional


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family of the model with this configuration, or None."""
    stated, model_type = config.get("architectures"), config.get("model_type")
    architectures = stated if isinstance(stated, list) else []
    for name, table in _family_tables().items():
        known = not architectures or any(one in table["architectures"] for one in architectures)
        if isinstance(model_type, str) and model_type in table["model_types"] and known:
            return _family(name)
    return None


@cache
def blocks() -> tuple[AtomBlock, ...]:
    """All blocks, in the order of `atoms.toml`."""
    result = []
    tables = read_table("atoms")
    places: tuple[Place, ...] = ("model", "layer", "mtp")
    for place in places:
        for name, table in tables.pop(place, {}).items():
            when = parse_expression(table.pop("when", "True"))
            atoms = {atom: tuple(map(parse_expression, axes.split(","))) for atom, axes in table.items()}
            result.append(AtomBlock(name, place, when, atoms))
    return tuple(result)


@cache
def places_of_atoms() -> Mapping[str, Place]:
    """The place of each atom."""
    return {atom: block.place for block in blocks() for atom in block.atoms}


@cache
def hyperparameters() -> tuple[Hyperparameter, ...]:
    """All hyperparameters; a condition depends only on those before it."""
    entries = read_table("hyperparameters")
    return tuple(
        Hyperparameter(name, one.pop("kind"), parse_expression(one.pop("when", "True")), **one)
        for name, one in entries.items()
    )


@cache
def dialect(name: str) -> Dialect:
    """The usual names and settings of a library. `name` is one of `DIALECTS`."""
    table = read_table(f"dialects/{name}")
    if like := table.pop("like", None):
        return changed_dialect(dialect(like), name, table)
    prefixes, rules = table.pop("prefixes"), tuple(_rules(table.pop("names")))
    settings = Settings(
        parse_expressions(table.pop("read", {})),
        parse_expressions(table.pop("write", {})),
        table.pop("defaults", {}),
        parse_expressions(table.pop("plain", {})),
    )
    return Dialect(name, prefixes, rules, settings, table)


@cache
def families() -> tuple[Family, ...]:
    """All families, sorted by name."""
    return tuple(map(_family, _family_tables()))


@cache
def _family_tables() -> Mapping[str, dict[str, Any]]:
    """The tables of families by name. Few processes need more than one of them as a `Family`."""
    names = sorted(file.name for file in (_HERE / "families").glob("*.toml"))
    return {name.removesuffix(".toml"): tomllib.loads(_text(f"families/{name}")) for name in names}


@cache
def _family(name: str) -> Family:
    return family_in(name, _family_tables()[name])


def family_in(name: str, entries: Mapping[str, Any]) -> Family:
    """The family in a table. Raises `ValueError` for missing entries, or entries that are not known."""
    table = deepcopy(dict(entries))
    parent = _family(table.pop("like")) if "like" in table else None
    try:
        family = _parsed(name, table, parent)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"family {name}: {error}") from None
    if problems := [*(f"unknown entry `{key}`" for key in table), *_problems(family)]:
        raise ValueError(f"family {name}: {'; '.join(problems)}")
    return family


def _parsed(name: str, table: dict[str, Any], parent: Family | None) -> Family:
    usual = parent.settings if parent else dialect("hf").settings
    settings = Settings(
        {**usual.read, **parse_expressions(table.pop("read", {}))},
        {**usual.write, **parse_expressions(table.pop("write", {}))},
        {**usual.defaults, **table.pop("defaults", {})},
        {**usual.plain, **parse_expressions(table.pop("plain", {}))},
    )
    own = {key: table.pop(key, {}) for key in DIALECTS}
    dialects: dict[str, Dialect] = {}
    for key in DIALECTS:
        base = parent.dialects[key] if parent else dialect(key)
        if key == "hf_memory":  # names differ from the usual ones as in files, and in their own way
            base = changed_dialect(base, key, own["hf"], in_files=True)
        dialects[key] = changed_dialect(base, key, own[key])
    ignored = table.pop("ignored", parent.ignored.pattern if parent else _IGNORED)
    return Family(
        name,
        tuple(table.pop("model_types")),
        tuple(table.pop("architectures")),
        table.pop("base_prefix", parent.base_prefix if parent else "model."),
        re.compile(ignored),
        parse_expression(table.pop("only", "True")),
        {**(parent.entries if parent else {}), **table.pop("entries", {})},
        settings,
        dialects,
        table.pop("text", ""),
        re.compile(table.pop("others", _NEVER.pattern)),
    )


def changed_dialect(base: Dialect, name: str, changes: Mapping[str, Any], *, in_files: bool = False) -> Dialect:
    """A dialect with other names for some atoms, each module in the place of the first rule that it replaces.

    `in_files`: the changes are those of the dialect of files. In memory, they do not apply to experts one by one.
    """
    names = {key: value for key, value in (changes.get("names") or changes).items() if isinstance(value, (str, list))}
    prefixes = {**base.prefixes, **changes.get("prefixes", {})}
    new = [rule for rule in _rules(names) if not (in_files and "{expert}" in rule.names[0])]
    replaced = {atom for rule in new for atom in rule.atoms}
    rules: list[NameRule] = []
    for rule in base.rules:
        atoms = rule.atoms & replaced
        modules = {_module(one, changes) for one in new if one.atoms & atoms}
        rules += [one for one in new if _module(one, changes) in modules]
        new = [one for one in new if _module(one, changes) not in modules]
        if remaining := tuple(packing for packing in rule.packings if packing.is_copy or not atoms & packing.atoms):
            rules.append(NameRule(rule.names, remaining, rule.place))
    return Dialect(name, prefixes, (*rules, *new), base.settings, base.other)


def _module(rule: NameRule, changes: Mapping[str, Any]) -> str:
    """What stays together where names are replaced: a module, or all of a layer if the changes are in order."""
    if rule.place == "model":
        return rule.names[0].rpartition(".")[0]
    return "layer" if changes.get("in_order") and rule.place == "layer" else rule.names[0].partition(".")[0]


def _rules(names: Mapping[str, Any]) -> Iterator[NameRule]:
    for text, packing in names.items():
        packings = tuple(map(NamedPacking.of, [packing] if isinstance(packing, str) else packing))
        places = {places_of_atoms()[atom] for one in packings if not one.is_copy for atom in one.atoms} or {"mtp"}
        if len(places) > 1:
            raise ValueError(f"`{text}` has atoms of several places")
        yield NameRule(tuple(map(str.strip, text.split("|"))), packings, next(iter(places)))


def parse_expressions(table: Mapping[str, str]) -> dict[str, Expression]:
    """The expressions of a table by its keys. Raises `ValueError` for a text that is none."""
    return {key: parse_expression(text) for key, text in table.items()}


def read_table(name: str) -> dict[str, Any]:
    """The entries of a table of this folder, which the caller may change."""
    return tomllib.loads(_text(f"{name}.toml"))


def _text(name: str) -> str:
    return (_HERE / name).read_text("utf-8")


def _problems(family: Family) -> Iterator[str]:
    """The contradictions in a family's tables, as messages."""
    known = {one.name for one in hyperparameters()}
    if strange := sorted(family.settings.read.keys() - known):
        yield f"unknown hyperparameters {strange}"
    for name, own in family.dialects.items():
        atoms = [
            atom for rule in own.rules for packing in rule.packings if not packing.is_copy for atom in packing.atoms
        ]
        if twice := sorted({atom for atom in atoms if atoms.count(atom) > 1}):
            yield f"{name}: atoms in two tensors: {twice}"
