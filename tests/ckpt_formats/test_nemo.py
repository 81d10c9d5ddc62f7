"""Models of NeMo: entries of YAML files as PyYAML reads them, and Megatron's arguments that follow from them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_formats.containers.yaml_entries import parse_entries
from ckpt_formats.core.errors import CkptError, CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.names.nemo import arguments_of

HERE = Path("/model.nemo")
PLAIN = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.sampled_from(["rope", "a/b.model", "x y"])
SCALARS = PLAIN | st.floats(allow_nan=True) | st.text(max_size=6)
NESTED = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", min_size=1), inner, max_size=2)
)
KEYS = st.text("abcz_019", min_size=1).map("k{}".format)

LLAMA = {
    "mcore_gpt": True,
    "num_layers": 2,
    "hidden_size": 12,
    "ffn_hidden_size": 20,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": None,
    "encoder_seq_length": 32,
    "normalization": "rmsnorm",
    "layernorm_epsilon": 1e-05,
    "activation": "fast-swiglu",
    "position_embedding_type": "rope",
    "rotary_percentage": 1.0,
    "bias": False,
    "share_embeddings_and_output_weights": False,
    "tokenizer": {"library": "sentencepiece", "model": "nemo:tokenizer.model"},
}


@given(st.dictionaries(KEYS, PLAIN | st.lists(PLAIN, min_size=1), min_size=1))
@example({"k1": "null", "k2": "yes", "k3": "1.5", "k4": "0x1f", "k5": ["true", "~"]})
@example({"k1": 1.5, "k2": -2.0, "k3": 0.02, "k4": [127, 0]})
def test_plain_values_are_read_as_pyyaml_reads_them(values: dict[str, Any]) -> None:
    result = parse_entries(yaml.safe_dump(values), HERE)
    assert not result.unread
    assert repr(result.values) == repr(dict(sorted(values.items())))


@given(st.dictionaries(KEYS, NESTED, min_size=1, max_size=3))
@example({"k1": {"kb": 1}, "k2": 3})
@example({"k1": "a text\nof lines", "k2": "'x' and \"y\"", "k3": float("nan")})
def test_no_value_is_read_otherwise_than_by_pyyaml(values: dict[str, Any]) -> None:
    result = parse_entries(yaml.safe_dump(values), HERE)
    assert result.values.keys() | result.unread == values.keys()
    assert not result.values.keys() & result.unread
    assert all(is_as_in_pyyaml(value, values[key]) for key, value in result.values.items())


def is_as_in_pyyaml(value: Any, truth: Any) -> bool:
    """OmegaConf reads 1e5 as a number, PyYAML as a text."""
    if isinstance(value, list):
        return isinstance(truth, list) and len(value) == len(truth) and all(map(is_as_in_pyyaml, value, truth))
    return repr(value) == repr(truth) or (type(value) is float and type(truth) is str and value == float(truth))


LINES = st.lists(st.text("ab:'\"# -[]{},&*!|>\\ 0.1e~", max_size=12) | st.just("  b: 1") | st.just("- 1"), max_size=5)


@given(LINES.map("\n".join))
@example("a: 'x'\n  'y'")
@example("a: 1\n---\na: 2")
@example('"a": 1')
@example("a: &b 1")
@example("a: 010")
@example("a: [1, 'b, c', 2]")
def test_hostile_text_is_refused_or_read_as_by_pyyaml(text: str) -> None:
    try:
        result = parse_entries(text, HERE)
    except CkptError:
        return
    try:
        truth = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return
    assert result.values.keys() | result.unread == (truth or {}).keys()
    assert all(is_as_in_pyyaml(value, truth[key]) for key, value in result.values.items())


@pytest.mark.parametrize(
    ("text", "error"), [("a: 1\na: 2", CorruptError), ("a: 1\n\tb: 2", CorruptError), ("#" * (1 << 21), UnsafeError)]
)
def test_files_that_no_program_writes_are_refused(text: str, error: type[CkptError]) -> None:
    with pytest.raises(error, match=r"model\.nemo"):
        parse_entries(text, HERE)


def test_arguments_follow_from_the_entries() -> None:
    state = arguments_of(yaml.safe_dump(LLAMA), HERE)
    expected = {
        "num_layers": 2,
        "hidden_size": 12,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "group_query_attention": True,
        "max_position_embeddings": 32,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-05,
        "swiglu": True,
        "bias_gelu_fusion": False,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "untie_embeddings_and_output_weights": True,
        "layernorm_zero_centered_gamma": False,
        "num_experts": None,
    }
    assert {name: state[name] for name in expected} == expected
    assert "kv_channels" not in state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mcore_gpt": False}, "`mcore_gpt` False"),
        ({"activation": "fast-geglu"}, "`activation` 'fast-geglu'"),
        ({"transformer_block_type": "normformer"}, "`transformer_block_type`"),
        ({"name": "megatron_falcon_gpt"}, "`name` 'megatron_falcon_gpt'"),
        ({"apply_embedding_scaling": True}, "`apply_embedding_scaling` True"),
        ({"mcore_customization_config": {"final_logit_softcapping": 30}}, "`mcore_customization_config` in a form"),
        ({"ffn_hidden_size": "${multiply:4, ${.hidden_size}}"}, "`ffn_hidden_size` in a form"),
        ({"normalization": "low_precision_layernorm"}, "`normalization`"),
    ],
)
def test_a_configuration_of_nemo_names_what_arguments_cannot_state(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=r"model_config\.yaml states ") as caught:
        arguments_of(yaml.safe_dump({**LLAMA, **changes}), HERE)
    assert message in caught.value.what
    assert "--config" in str(caught.value.hint)
