"""The tables of names: they contradict neither themselves nor each other, and state what their keys say."""

import sys
from dataclasses import replace
from typing import Any

import pytest

from ckpt_formats.names.config import configured_model
from ckpt_formats.names.expressions import names_of
from ckpt_formats.names.overview import family_summaries
from ckpt_formats.names.tables import (
    DIALECTS,
    blocks,
    dialect,
    families,
    family_in,
    family_of,
    hyperparameters,
    places_of_atoms,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_LINES = 40
MAX_DIALECT_LINES = 70
STATED = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}


# Atoms and hyperparameters


def test_shapes_and_conditions_depend_on_known_hyperparameters_only() -> None:
    known = {one.name for one in hyperparameters()} | {"layer"}
    for block in blocks():
        assert names_of(block.when) <= known, block.name
        for atom, axes in block.atoms.items():
            assert {name for axis in axes for name in names_of(axis)} <= known, atom


def test_a_hyperparameter_depends_on_those_before_it_only() -> None:
    before: set[str] = set()
    for one in hyperparameters():
        assert names_of(one.when) <= before, one.name
        before.add(one.name)


def test_atoms_have_names_of_their_own() -> None:
    assert len(places_of_atoms()) == sum(len(block.atoms) for block in blocks())


# Dialects


def test_megatron_reads_every_hyperparameter_that_it_writes() -> None:
    settings = dialect("megatron").settings
    written = {name for expression in settings.write.values() for name in names_of(expression)}
    read_back = {name for name in written if name in settings.read}
    assert written == read_back


@pytest.mark.parametrize("name", DIALECTS)
def test_usual_names_of_a_dialect_are_unique(name: str) -> None:
    names = [(rule.place, one) for rule in dialect(name).rules for one in rule.names]
    repeated = {one for one in names if names.count(one) > 1}
    assert not repeated


# Families


def test_every_model_type_is_of_one_family() -> None:
    types = [one for family in families() for one in family.model_types]
    assert len(types) == len(set(types))


def test_family_is_that_of_models_whose_tensors_it_lists() -> None:
    assert family_of(STATED) is not None
    assert family_of(STATED | {"architectures": None}) is not None
    assert family_of(STATED | {"architectures": ["LlamaForSequenceClassification"]}) is None
    assert family_of(STATED | {"model_type": ["llama"]}) is None
    assert family_of({}) is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_hidden_layers": None},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": "2"},
        {"num_hidden_layers": True},
        {"num_hidden_layers": 2.0},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**400},
    ],
)
def test_a_configuration_that_does_not_tell_how_many_layers_gives_no_names(fields: dict[str, Any]) -> None:
    configured = configured_model({"model_type": "llama", **fields})
    assert configured is not None
    assert configured.names("hf") is None


def test_names_are_in_the_order_of_the_model() -> None:
    configured = configured_model({"model_type": "llama", "num_hidden_layers": 2})
    assert configured is not None
    names = configured.names("hf")
    assert names is not None
    assert names[:2] == ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")
    assert names[-3:] == ("model.layers.1.post_attention_layernorm.weight", "model.norm.weight", "lm_head.weight")


@pytest.mark.parametrize(("stated", "tied"), [(True, True), (False, False), (None, False), ("yes", False)])
def test_names_are_tied_where_the_configuration_says_so(stated: Any, tied: bool) -> None:
    configured = configured_model(STATED | {"tie_word_embeddings": stated})
    assert configured is not None
    assert bool(configured.tie) == tied


def test_gpt2_is_tied_unless_it_says_otherwise() -> None:
    for config, tied in (({}, True), ({"tie_word_embeddings": False}, False)):
        configured = configured_model({"model_type": "gpt2", **config})
        assert configured is not None
        assert (configured.tie is not None) == tied


GOOD = """
model_types = ["x"]
architectures = ["X"]
[read]
window = "sliding"
[write]
sliding = "window"
[hf]
"attn.k.weight" = "attention.k"
"""
BAD = {
    "an atom that is not known": ("attention.k", "attention.queries"),
    "atoms of several places": ('"attention.k"', '"by(1, attention.k, final.norm)"'),
    "no packing": ('"attention.k"', '"thirds(attention.q)"'),
    "an unknown entry": ("[read]", "more = 1\n[read]"),
    "an unknown hyperparameter": ('window = "sliding"', 'windows = "sliding"'),
    "a call": ('"sliding"', '"open(sliding)"'),
    "no types": ("model_types", "modle_types"),
    "an atom in two tensors": ('= "attention.k"', '= "attention.k"\n"attn.r.weight" = "attention.k"'),
}


def test_a_family_is_parsed() -> None:
    family = family_in("x", tomllib.loads(GOOD))
    names = [name for rule in family.dialects["hf"].rules for name in rule.names]
    at = names.index("attn.k.weight")
    assert names[at + 1] == "self_attn.k_proj.bias"
    assert "self_attn.k_proj.weight" not in names
    assert replace(family, name="y") != family


@pytest.mark.parametrize("kind", BAD)
def test_a_family_that_contradicts_itself_is_refused(kind: str) -> None:
    before, after = BAD[kind]
    assert before in GOOD
    with pytest.raises(ValueError, match=r"x|not allowed|thirds|places"):
        family_in("x", tomllib.loads(GOOD.replace(before, after, 1)))


# The overview


def test_overview_states_what_a_small_model_of_each_family_has() -> None:
    summaries = {one.name: one for one in family_summaries()}
    assert summaries.keys() == {family.name for family in families()}
    assert all({"hf", "hf_memory"} <= set(one.libraries) for one in summaries.values())
    mixtral, llama = summaries["mixtral"], summaries["llama"]
    assert (mixtral.in_megatron, mixtral.has_experts, llama.in_megatron, llama.has_experts) == (True, True, True, False)
