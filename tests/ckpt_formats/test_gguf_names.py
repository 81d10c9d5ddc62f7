"""Models under the names of llama.cpp and back; tokenizers. `golden_gguf/make.py` compares logits with llama.cpp's."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

import ckpt
from ckpt.rename import use_names
from ckpt_formats.containers.gguf import header_bytes, read_header
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Group
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.engines.gguf import tokenizer as tokenizers
from ckpt_formats.names.llama_cpp import from_llama_cpp, to_llama_cpp
from damage import UNSUPPORTED
from damage import ckpt as command
from gguf_models import GOLDEN, write_model


@pytest.mark.parametrize("name", GOLDEN)
def test_gguf_of_a_model_is_the_file_that_llama_cpp_computed(name: str, tmp_path: Path) -> None:
    """And back: every bit of the tensors, and the same model."""
    assert GOLDEN[name]["difference"] <= 2e-5 < GOLDEN[name]["largest"] / 1000
    folder = write_model(tmp_path / "hf", name)
    ckpt.save(ckpt.open(folder), tmp_path / "model.gguf")
    assert xxhash.xxh3_128_hexdigest((tmp_path / "model.gguf").read_bytes()) == GOLDEN[name]["digest"]
    ckpt.save(ckpt.open(tmp_path / "model.gguf"), tmp_path / "back", "hf")
    weights, back = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert weights.keys() == back.keys()
    assert all(weights[one].tobytes() == back[one].tobytes() for one in weights)
    ckpt.save(ckpt.open(tmp_path / "back"), tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_gguf_of_a_run_is_that_of_its_model(tmp_path: Path) -> None:
    """From ZeRO, from DCP, and from a step of a chain."""
    folder = write_model(tmp_path / "hf", "llama")
    source = ckpt.open(folder)

    def at_step(step: int) -> Checkpoint:
        kinds, values = (MODEL, MASTER, "exp_avg", "exp_avg_sq"), {"step": step}
        trained = {
            name: replace(one, states=dict.fromkeys(kinds, one.weight), values=values) for name, one in source.items()
        }
        groups = (Group({"lr": 0.1}, tuple(trained)),)
        return replace(source, parameters=trained, groups=groups, origin=replace(source.origin, step=step))

    ckpt.save(at_step(3), tmp_path / "zero", ckpt.DeepSpeed(dp=2, zero=2))
    ckpt.save(at_step(3), tmp_path / "dcp", ckpt.DCP(dp=2))
    zeros = source.replace({"model.norm.weight": np.zeros_like(source["model.norm.weight"])})
    for step, state in ((3, at_step(3)), (4, zeros)):
        ckpt.save(state, tmp_path / f"state{step}")
        done = command("append", tmp_path / "run.chain", tmp_path / f"state{step}", "--step", step)
        assert done.code == 0, done.err
    for number, one in enumerate(("zero", "dcp", "run.chain@3")):
        file = tmp_path / f"{number}.gguf"
        done = command("convert", tmp_path / one, file, "--config", folder)
        assert done.code == 0, done.err
        assert xxhash.xxh3_128_hexdigest(file.read_bytes()) == GOLDEN["llama"]["digest"], one
    done = command("convert", tmp_path / "run.chain@4", tmp_path / "zeros.gguf", "--config", folder)
    assert not np.asarray(ckpt.open(tmp_path / "zeros.gguf")["output_norm.weight"]).any()


def test_gguf_of_quantised_weights_needs_them_dequantised(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", "llama")
    done = command("convert", folder, tmp_path / "fp8", "--to", "hf", "--quantise", "fp8-block")
    assert done.code == 0, done.err
    for target in (["m.gguf"], ["megatron", "--to", "megatron", "--dp", 1]):
        done = command("convert", tmp_path / "fp8", tmp_path / target[0], *target[1:])
        assert (done.code, "quant" in done.err, "--dtype" in done.err) == (UNSUPPORTED, True, True), done.err
        assert not (tmp_path / target[0]).exists()
    done = command("convert", tmp_path / "fp8", tmp_path / "m.gguf", "--dtype", "fp32")
    assert "dequantised from" in done.err
    assert b"lm_head" not in (tmp_path / "fp8" / "model.safetensors").read_bytes()  # it is tied
    plain = ckpt.open(tmp_path / "fp8").cast("fp32")
    ckpt.save(plain, tmp_path / "plain", "hf")
    ckpt.save(ckpt.open(tmp_path / "plain"), tmp_path / "n.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "n.gguf").read_bytes()


def test_gguf_and_megatron_hold_the_same_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", "qwen3")
    ckpt.save(ckpt.open(folder), tmp_path / "megatron", ckpt.Megatron(dp=1, tp=1, pp=1))
    ckpt.save(ckpt.open(tmp_path / "megatron"), tmp_path / "model.gguf", ckpt.Gguf(config=folder / "config.json"))
    assert xxhash.xxh3_128_hexdigest((tmp_path / "model.gguf").read_bytes()) == GOLDEN["qwen3"]["digest"]
    ckpt.save(ckpt.open(tmp_path / "model.gguf"), tmp_path / "again", ckpt.Megatron(dp=1, tp=1, pp=1))
    first, again = (ckpt.open(tmp_path / name) for name in ("megatron", "again"))
    assert all(read(one.weight).tobytes() == read(again[name].weight).tobytes() for name, one in first.items())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral", {"sliding_window": 3}, "llama.cpp cannot compute a model with window 3"),
        ("llama", {"model_type": "bert"}, "of type bert in other libraries are not known"),
        ("qwen3", {"hidden_act": "gelu"}, "with activation gelu"),
        ("gemma2", {"attn_logit_softcapping": None}, "with attention_softcap None"),
        ("gemma2", {"query_pre_attn_scalar": 13}, "with attention_scale 13"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "with final_softcap 30.0"),
        ("deepseek_v3", {"rope_interleave": False}, "with rope_interleaved False"),
        ("deepseek_v2", {"n_group": 5, "topk_group": 2, "topk_method": "group_limited_greedy"}, "router_group_best 1"),
    ],
)
def test_gguf_refuses_models_that_llama_cpp_does_not_compute(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "hf", name)
    (folder / "config.json").write_text(json.dumps({**GOLDEN[name]["config"], **changes}))
    done = command("convert", folder, tmp_path / "model.gguf")
    assert message in done.err
    assert not (tmp_path / "model.gguf").exists()


def test_gguf_refuses_layers_for_multi_token_prediction_and_says_how_to_leave_them_out(tmp_path: Path) -> None:
    config = {**GOLDEN["deepseek_v3"]["config"], "num_nextn_predict_layers": 1}
    folder = write_model(tmp_path / "hf", "deepseek_v3", config)
    done = command("convert", folder, tmp_path / "model.gguf")
    assert "1 layer for multi-token prediction" in done.err
    skip = r"layers\.(3)\."
    assert f"--skip '{skip}'" in done.err
    done = command("convert", folder, tmp_path / "model.gguf", "--skip", skip)
    assert done.code == 0, done.err
    assert "deepseek2.block_count" in read_header(tmp_path / "model.gguf").values


def test_gguf_of_gemma_adds_one_to_norms_and_not_to_moments(tmp_path: Path) -> None:
    source = use_names(ckpt.open(write_model(tmp_path / "hf", "gemma2")), "hf")
    norm, plain = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"

    def with_states(*states: str) -> Checkpoint:
        own = {one: replace(source[one], states=dict.fromkeys(states, source[one].weight)) for one in (norm, plain)}
        return replace(source, parameters={**source.parameters, **own})

    weight = read(source[norm].weight)
    named = to_llama_cpp(with_states(MODEL, MASTER, "exp_avg"))
    states = {name: read(tensor) for name, tensor in named["output_norm.weight"].states.items()}
    assert np.array_equal(states[MODEL], weight + np.float32(1))
    assert np.array_equal(states[MASTER], states[MODEL])
    assert np.array_equal(states["exp_avg"], weight)
    assert np.array_equal(read(named["blk.0.ffn_up.weight"].states[MASTER]), read(source[plain].weight))
    assert any("+1 added" in notice.text and "output_norm.weight" in notice.names for notice in named.notices)
    back = from_llama_cpp(named)
    assert np.array_equal(read(back[norm].states[MASTER]), weight)
    with pytest.raises(UnsupportedError, match="the state z, which may follow its weight"):
        to_llama_cpp(with_states(MODEL, "z"))


def test_gguf_of_an_unknown_architecture_keeps_its_names_and_is_no_model_of_transformers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", "llama")
    ckpt.save(ckpt.open(folder), tmp_path / "a.gguf")
    data = (tmp_path / "a.gguf").read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0other", 1)
    (tmp_path / "b.gguf").write_bytes(data)
    with pytest.raises(UnsupportedError, match="architecture other are not known"):
        ckpt.save(ckpt.open(tmp_path / "b.gguf"), tmp_path / "out", "hf")
    ckpt.save(ckpt.open(tmp_path / "b.gguf"), tmp_path / "c.gguf")
    assert (tmp_path / "c.gguf").read_bytes() == data


def test_gguf_names_values_that_a_config_does_not_state(tmp_path: Path) -> None:
    ckpt.save(ckpt.open(write_model(tmp_path / "hf", "llama")), tmp_path / "a.gguf")
    header = read_header(tmp_path / "a.gguf")
    values = {**header.values, "llama.logit_scale": np.float32(2)}
    data = (tmp_path / "a.gguf").read_bytes()[header.data :]
    (tmp_path / "b.gguf").write_bytes(header_bytes(values, header.tensors) + data)
    plain, scaled = (ckpt.use_names(ckpt.open(tmp_path / name), "hf") for name in ("a.gguf", "b.gguf"))
    assert not any("does not state" in str(notice) for notice in plain.notices)
    assert any("does not state" in str(notice) and "logit_scale" in str(notice) for notice in scaled.notices)


# Tokenizers

WORDS = tokenizers._pretokenizers()
VOCABULARY = {"a": 0, "b": 1, "ab": 2, "<s>": 3}
ADDED = [{"id": 3, "content": "<s>", "special": True}]
PLAIN: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": VOCABULARY, "merges": ["a b"]},
    "added_tokens": ADDED,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
}
BYTES = {f"<0x{byte:02X}>": 10 + byte for byte in range(256)}
PIECES: dict[str, Any] = {
    "model": {"type": "BPE", "byte_fallback": True, "vocab": {**VOCABULARY, **BYTES}, "merges": [["a", "b"]]},
    "added_tokens": ADDED,
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
    },
}


def values_of(tmp_path: Path, tokenizer: dict[str, Any], rows: int = 300) -> Any:
    """What the header of a file states of a tokenizer."""
    folder = tmp_path / "hf"
    folder.mkdir(exist_ok=True)
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": {"bos_token": "<s>", "chat_template": "{{ x }}"}}
    source = ckpt.open(write_model(tmp_path / "source", "llama"))
    return tokenizers.tokenizer_of(source, files, rows, True).values


def test_gguf_has_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    values = values_of(tmp_path, PLAIN, rows=6)
    prefix = "tokenizer.ggml."
    assert (values[f"{prefix}model"], values[f"{prefix}pre"]) == ("gpt2", "gpt-2")
    assert values[f"{prefix}tokens"] == ["a", "b", "ab", "<s>", "[PAD4]", "[PAD5]"]
    assert values[f"{prefix}token_type"].tolist() == [1, 1, 1, 3, 5, 5]
    assert values[f"{prefix}merges"] == ["a b"]
    assert (values[f"{prefix}bos_token_id"], values[f"{prefix}add_bos_token"]) == (3, False)
    assert values["tokenizer.chat_template"] == "{{ x }}"


def test_gguf_has_scores_for_pieces(tmp_path: Path) -> None:
    values = values_of(tmp_path, PIECES)
    assert (values["tokenizer.ggml.model"], values["tokenizer.ggml.add_space_prefix"]) == ("llama", True)
    assert values["tokenizer.ggml.scores"][:4].tolist() == [0, 0, -1, 0]
    assert np.bincount(values["tokenizer.ggml.token_type"]).tolist() == [0, 3, 0, 1, 0, 300 - 260, 256]
    assert values["tokenizer.ggml.add_bos_token"] is True


def test_gguf_has_the_spaces_of_gemma(tmp_path: Path) -> None:
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    splits = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    values = values_of(tmp_path, {**PIECES, "normalizer": replaces, "pre_tokenizer": splits})
    assert (values["tokenizer.ggml.model"], values["tokenizer.ggml.add_space_prefix"]) == ("llama", False)


@pytest.mark.parametrize("number", range(len(WORDS)), ids=[one.name for one in WORDS])
def test_gguf_names_the_way_in_which_text_is_cut_into_words(number: int, tmp_path: Path) -> None:
    one = WORDS[number]
    forms = {"gpt2": {"type": "ByteLevel"}, "bytes": {"type": "ByteLevel", "use_regex": False}}
    forms["digits"] = {"type": "Digits", "individual_digits": True}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [forms.get(step, {**split, "pattern": {"Regex": step}}) for step in one.steps]
    tokenizer = copy.deepcopy(PLAIN)
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    tokenizer["model"]["ignore_merges"] = one.ignore_merges
    assert values_of(tmp_path, tokenizer)["tokenizer.ggml.pre"] == one.name


REFUSED = {
    "another kind": ({"model": {"type": "Unigram"}}, "of the type Unigram"),
    "other words": ({"pre_tokenizer": {"type": "Whitespace"}}, "no name for: <Whitespace>"),
    "a normalizer": ({"normalizer": {"type": "Lowercase"}}, "normalizes text by Lowercase"),
    "few rows": ({"model": {**PLAIN["model"], "vocab": {"a": 300}}}, "more tokens than the 300 rows"),
    "other tokens around a text": (
        {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a"}}]}},
        "puts other tokens",
    ),
}
REFUSED_PIECES = {
    "a pair that is no merge": (
        {"merges": [["a", "ab"]], "vocab": {**VOCABULARY, **BYTES, "aab": 4, "aa": 5}},
        "all pairs",
    ),
    "an order without scores": (
        {"merges": [["a", "b"], ["b", "a"], ["a", "b"]], "vocab": {**VOCABULARY, **BYTES, "ba": 4}},
        "order that scores",
    ),
    "bytes that are missing": ({"vocab": VOCABULARY}, "for each byte"),
}
DAMAGED = {
    "a number twice": ({"model": {**PLAIN["model"], "vocab": {"a": 1, "b": 1}}}, "same number"),
    "a merge of three": ({"model": {**PLAIN["model"], "merges": ["a b c"]}}, "pair of pieces"),
    "an added token without a number": ({"added_tokens": [{"content": "x"}]}, "no number"),
    "no vocabulary": ({"model": {"merges": []}}, "vocab is not a table"),
}


@pytest.mark.parametrize("what", [*REFUSED, *REFUSED_PIECES, *DAMAGED])
def test_gguf_refuses_tokenizers_that_llama_cpp_does_not_have(what: str, tmp_path: Path) -> None:
    kind: type[Exception] = CorruptError if what in DAMAGED else UnsupportedError
    if what in REFUSED_PIECES:
        changes, message = REFUSED_PIECES[what]
        tokenizer = {**PIECES, "model": {**PIECES["model"], **changes}}
    else:
        changes, message = (REFUSED | DAMAGED)[what]
        tokenizer = {**PLAIN, **changes}
    with pytest.raises(kind, match=message):
        values_of(tmp_path, tokenizer)


def test_gguf_without_tokenizer_states_none(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", "llama")
    (folder / "tokenizer.json").write_text(json.dumps({**PLAIN, "pre_tokenizer": {"type": "Whitespace"}}))
    done = command("convert", folder, tmp_path / "model.gguf")
    assert "no name for: <Whitespace>" in done.err
    assert "--no-tokenizer" in done.err
    assert command("convert", folder, tmp_path / "model.gguf", "--no-tokenizer").code == 0
    values = read_header(tmp_path / "model.gguf").values
    assert values["tokenizer.ggml.model"] == "none"
    assert "tokenizer.ggml.tokens" not in values
