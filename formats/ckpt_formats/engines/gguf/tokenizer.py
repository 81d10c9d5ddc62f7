"""The tokenizer of a model for the header of a `.gguf` file, from the files of transformers next to the model.

llama.cpp has two kinds that tokenizer.json can describe: `gpt2`, which merges bytes in the order of its merges after it
has cut text into words in one of the ways that it knows by name (`pretokenizers.toml`); and `llama`, that of
sentencepiece, which always makes the piece with the best score. What it would compute otherwise than the tokenizer of
the model is refused by name.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.claims import MAX_VALUES
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor, read
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.engines.gguf.read import ENGINE
from ckpt_formats.names.translate import GGUF_VALUES
from ckpt_formats.state_dicts.run_files import PREFIX

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_KIND = "tokenizer.ggml.model"
_HINT = "Leave it out with --no-tokenizer: llama.cpp then takes numbers of tokens."
_SPACE = "\u2581"
_MAX_SHOWN = 120
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""The types of tokens."""
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
"""How tokenizer_config.json and llama.cpp call special tokens. One word is misspelt in llama.cpp."""


@dataclass(frozen=True)
class TokenizerValues:
    """What a header states of a tokenizer."""

    values: Mapping[str, Value]
    files: tuple[str, ...] = ()
    """The extras that it is read from."""
    notices: tuple[Notice, ...] = ()


def tokenizer_of(source: Checkpoint, files: Mapping[str, Value], rows: int, wanted: bool) -> TokenizerValues:
    """The tokenizer of a model with `rows` rows of embeddings. `files`: those next to the model, by name.

    Raises `UnsupportedError` for a tokenizer that llama.cpp does not have, `CorruptError` for a damaged file.
    """
    if not wanted:
        return TokenizerValues({_KIND: "none"})
    stated = source.extras.get(GGUF_VALUES)
    if source.origin.engine == ENGINE or (isinstance(stated, dict) and _KIND in stated):
        return TokenizerValues({})  # the header of the source has what it has
    if TOKENIZER not in files:
        text = f"there is no {TOKENIZER}, so the file has no tokenizer: llama.cpp takes numbers of tokens"
        return TokenizerValues({_KIND: "none"}, (), (Notice(text, weight=Weight.LOST),))
    tokenizer = _json(files[TOKENIZER], TOKENIZER)
    config = _json(files[_CONFIG], _CONFIG) if _CONFIG in files else {}
    model = _table(tokenizer.get("model"), "model")
    if model.get("type", "BPE") != "BPE":
        raise _refused(f"is of the type {printable(str(model.get('type')))[:40]}, not BPE")
    vocabulary = _Vocabulary.of(model, tokenizer, rows)
    is_bytes = not model.get("byte_fallback")
    values = _byte_level(tokenizer, model, vocabulary) if is_bytes else _sentencepiece(tokenizer, model, vocabulary)
    template = _text_of(files[_TEMPLATE]) if _TEMPLATE in files else config.get("chat_template")
    if isinstance(template, str):
        values["tokenizer.chat_template"] = template
    values |= dict(_special(tokenizer, config, vocabulary))
    used = tuple(f"{PREFIX}{name}" for name in (TOKENIZER, _CONFIG, _TEMPLATE) if name in files)
    return TokenizerValues(values, used, tuple(_notices(tokenizer)))


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens by their numbers."""

    numbers: Mapping[str, int]
    types: Mapping[int, int]
    """Of tokens that are not normal."""
    rows: int

    @classmethod
    def of(cls, model: Mapping[str, Any], tokenizer: Mapping[str, Any], rows: int) -> "_Vocabulary":
        numbers = dict(_table(model.get("vocab"), "model.vocab"))
        types: dict[int, int] = {}
        added = tokenizer.get("added_tokens") or []
        if not isinstance(added, list):
            raise _damaged("added_tokens is not a list")
        for one in added:
            entry = _table(one, "added_tokens")
            text, number = entry.get("content"), entry.get("id")
            is_valid = isinstance(text, str) and is_natural(number, MAX_VALUES)
            if text is None or number is None or not is_valid or numbers.get(text, number) != number:
                raise _damaged("an added token has no text, no number, or two numbers")
            numbers[text] = number
            types[number] = _CONTROL if entry.get("special") else _USER_DEFINED
        if not all(is_natural(number, MAX_VALUES) for number in numbers.values()):
            raise _damaged("a token has no number")
        if len(set(numbers.values())) != len(numbers):
            raise _damaged("two tokens have the same number")
        if max(numbers.values(), default=0) >= rows:
            raise _refused(f"has more tokens than the {rows:,} rows of the embeddings")
        unknown = numbers.get(str(model.get("unk_token")))
        return cls(numbers, types if unknown is None else {**types, unknown: _UNKNOWN}, rows)

    def listed(self, types: Mapping[int, int]) -> dict[str, Value]:
        """The lists of a header. Rows without a token have a text that no text becomes."""
        tokens = [f"[PAD{number}]" for number in range(self.rows)]
        kinds = np.full(self.rows, _UNUSED, np.int32)
        for text, number in self.numbers.items():
            tokens[number], kinds[number] = text, types.get(number, _NORMAL)
        return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}


def _byte_level(tokenizer: Mapping[str, Any], model: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Value]:
    steps, ignores = list(_steps(tokenizer.get("pre_tokenizer"))), bool(model.get("ignore_merges"))
    name = next(
        (one.name for one in _pretokenizers() if (list(one.steps), one.ignore_merges) == (steps, ignores)), None
    )
    if name is None:
        shown = printable(" ".join(steps))[:_MAX_SHOWN]
        raise _refused(f"cuts text into words in a way that llama.cpp has no name for: {shown}")
    if (kind := _normalizer(tokenizer)) not in ("", "NFC"):
        raise _refused(f"normalizes text by {kind}, which llama.cpp does not do")
    merges = [f"{left} {right}" for left, right in _merges(model)]
    return {
        _KIND: "gpt2",
        "tokenizer.ggml.pre": name,
        **vocabulary.listed(vocabulary.types),
        "tokenizer.ggml.merges": merges,
    }


def _sentencepiece(tokenizer: Mapping[str, Any], model: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Value]:
    prefix = _space_prefix(tokenizer)
    scores = np.zeros(vocabulary.rows, np.float32)
    for number, rank in _ranks(model, vocabulary).items():
        scores[number] = -rank
    types = dict(vocabulary.types)
    for text, number in vocabulary.numbers.items():
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types[number] = _BYTE
    if sum(kind == _BYTE for kind in types.values()) != 256:
        raise _refused("has no token for each byte")
    return {
        _KIND: "llama",
        "tokenizer.ggml.pre": "default",
        **vocabulary.listed(types),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def _ranks(model: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[int, int]:
    """The rank of each piece that is merged. Raises `UnsupportedError` if ranks do not tell the merges.

    llama.cpp merges any two neighbours that are a piece, the piece with the best score first. That is the same only if
    all pairs that make a piece are merges, and those of a better piece come first.
    """
    pairs: dict[str, set[tuple[str, str]]] = {}
    last = ""
    for left, right in _merges(model):
        piece = left + right
        if piece != last and piece in pairs:
            raise _refused("merges pieces in an order that scores cannot state")
        pairs.setdefault(piece, set()).add((left, right))
        last = piece
    numbers = vocabulary.numbers
    for piece, own in pairs.items():
        if piece not in numbers:
            raise _damaged("a merge makes no token")
        splits = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        if any(left in numbers and right in numbers and (left, right) not in own for left, right in splits):
            raise _refused(f"does not merge all pairs that make `{printable(piece)[:40]}`")
    return {numbers[piece]: rank for rank, piece in enumerate(pairs, 1)}


def _space_prefix(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a space is put before text. Raises `UnsupportedError` for other rules of spaces than llama.cpp's."""
    steps, normalizer = tokenizer.get("pre_tokenizer"), tokenizer.get("normalizer")
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "split": False}
    if isinstance(steps, dict) and normalizer is None and steps.items() >= metaspace.items():
        return bool(steps.get("prepend_scheme", "always") != "never")
    inner = normalizer.get("normalizers") if isinstance(normalizer, dict) else None
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepends = {"type": "Prepend", "prepend": _SPACE}
    # Text without spaces is not split at them.
    splits = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    rules = inner if inner is not None else [normalizer]
    if steps in (None, splits) and rules in ([prepends, replaces], [replaces]):
        return bool(rules == [prepends, replaces])
    raise _refused("treats spaces otherwise than llama.cpp does")


def _steps(table: Value) -> Iterator[str]:
    """The steps of a pre-tokenizer, as `pretokenizers.toml` calls them; others by their types."""
    one = _table(table, "pre_tokenizer")
    kind, pattern = one.get("type"), one.get("pattern")
    is_words = one.get("behavior") == "Isolated" and not one.get("invert")
    is_words |= one.get("behavior") == "Removed" and one.get("invert") is True
    if kind == "Sequence" and isinstance(one.get("pretokenizers"), list):
        for inner in one["pretokenizers"]:
            yield from _steps(inner)
    elif kind == "ByteLevel" and not one.get("add_prefix_space"):
        yield "gpt2" if one.get("use_regex", True) else "bytes"
    elif kind == "Digits" and one.get("individual_digits"):
        yield "digits"
    elif kind == "Split" and is_words and isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        yield pattern["Regex"]
    else:
        yield f"<{kind}>"


def _normalizer(tokenizer: Mapping[str, Any]) -> str:
    """The type of the normalizer; empty if there is none."""
    table = tokenizer.get("normalizer")
    if table is None or (isinstance(table, dict) and table.get("normalizers") == []):
        return ""
    return printable(str(table.get("type") if isinstance(table, dict) else table))[:_MAX_SHOWN]


def _notices(tokenizer: Mapping[str, Any]) -> Iterator[Notice]:
    if _normalizer(tokenizer) == "NFC":
        yield Notice("the tokenizer normalizes text (NFC), and llama.cpp does not", weight=Weight.UNSURE)


def _special(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any], vocabulary: _Vocabulary
) -> Iterator[tuple[str, Value]]:
    """The numbers of special tokens, and which of them surround a text."""
    names = {}
    for name, own in _SPECIAL.items():
        stated = config.get(f"{name}_token")
        text = stated.get("content") if isinstance(stated, dict) else stated
        if isinstance(text, str) and text in vocabulary.numbers:
            names[name] = text
            yield f"tokenizer.ggml.{own}_token_id", np.uint32(vocabulary.numbers[text])
    around = _template(tokenizer.get("post_processor"))
    text_at = around.index("") if "" in around else len(around)
    first, last = around[:text_at], around[text_at + 1 :]
    if first not in ([], [names.get("bos")]) or last not in ([], [names.get("eos")]):
        raise _refused("puts other tokens around a text than its first and last one")
    yield "tokenizer.ggml.add_bos_token", bool(first)
    yield "tokenizer.ggml.add_eos_token", bool(last)


def _template(processor: Value) -> list[str]:
    """The tokens around a text, which is the empty one."""
    if not isinstance(processor, dict):
        return []
    if processor.get("type") == "Sequence" and isinstance(processor.get("processors"), list):
        inner = [_template(one) for one in processor["processors"]]
        return next((one for one in inner if one), [])
    single = processor.get("single")
    if processor.get("type") != "TemplateProcessing" or not isinstance(single, list):
        return []
    return [str(_table(one, "single").get("SpecialToken", {}).get("id", "")) for one in single]


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise _damaged("model.merges is not a list")
    pairs = []
    for one in merges:
        pair = one.split(" ") if isinstance(one, str) else one
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise _damaged("a merge is not a pair of pieces")
        if " " in pair[0] or " " in pair[1]:
            raise _refused("merges pieces with spaces")
        pairs.append((pair[0], pair[1]))
    return pairs


@dataclass(frozen=True)
class _Pretokenizer:
    """A way to cut text into words that llama.cpp has a name for."""

    name: str
    steps: tuple[str, ...]
    ignore_merges: bool


@cache
def _pretokenizers() -> tuple[_Pretokenizer, ...]:
    text = Path(__file__).with_name("pretokenizers.toml").read_text("utf-8")
    entries: Iterable[dict[str, Any]] = tomllib.loads(text)["pretokenizer"]
    return tuple(_Pretokenizer(one["name"], tuple(one["steps"]), one.get("ignore_merges", False)) for one in entries)


def _json(value: Value, name: str) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return parse_json_object(read(value).tobytes(), Path(name))
    return _table(value, name)


def _text_of(value: Value) -> str | None:
    return read(value).tobytes().decode("utf-8", "replace") if isinstance(value, Tensor) else None


def _table(value: Value, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _damaged(f"{name} is not a table")
    return value


def _damaged(what: str) -> CorruptError:
    return CorruptError(what, where=TOKENIZER, hint=_HINT)


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(f"the tokenizer {what}", where=TOKENIZER, hint=_HINT)
