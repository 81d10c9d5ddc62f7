"""The hyperparameters in the arguments of Megatron's checkpoints, and the arguments of a model.

A missing argument has the value of a configuration, if there is one, else what the tensors tell, else the default of
Megatron's own parser, as when Megatron itself loads an old checkpoint. Source: Megatron-LM,
`megatron/training/arguments.py`, `core_transformer_config_from_args`; Megatron core, `TransformerConfig`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from ckpt_formats.core.errors import IncompleteError, UnsupportedError
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Record, Value, is_natural
from ckpt_formats.names.expressions import evaluate, parse_expression
from ckpt_formats.names.hyperparameters import (
    LETTERS,
    Values,
    check_plain,
    differences,
    entries_of,
    located,
    read,
    write,
)
from ckpt_formats.names.tables import dialect

ARGUMENTS = "args"
"""The key of the arguments in a checkpoint's extras."""

_SOURCE = "the run's arguments"
_PLAIN_HINT = "Other formats keep Megatron's names."
_CONFIG_HINT = "Name the model's config.json with --config."
_MAX_LAYERS = 100_000
_TWINS = {"norm_epsilon": "layernorm_epsilon"}
"""An argument, and its name in other versions of Megatron."""


def values_of(record: Record, names: Iterable[str], vocabulary: int, *, partial: bool, where: Path) -> Values:
    """The hyperparameters that arguments and the names of tensors describe. `partial`: some tensors may be left out.

    Raises: UnsupportedError for a model of no known family, CorruptError or IncompleteError for arguments that are
    missing or not valid.
    """
    stated = _entries(record, vocabulary)
    with located(where, _CONFIG_HINT):
        check_plain(dialect("megatron").settings, stated, _SOURCE, _PLAIN_HINT)
        stated |= _evidence(stated, list(names), partial)
        reading = read(dialect("megatron").settings, stated, _SOURCE)
        return {**reading.checked(), "vocabulary": vocabulary}


def compared(values: Values, record: Record, where: Path) -> tuple[str, ...]:
    """The differences between a model and the arguments that are stated: `theta 10000 and 500000`.

    Raises `UnsupportedError` for arguments of no known family.
    """
    stated = _entries(record, values["vocabulary"])
    with located(where):
        check_plain(dialect("megatron").settings, stated, _SOURCE, _PLAIN_HINT)
    reading = read(dialect("megatron").settings, stated, _SOURCE, with_defaults=False)
    if reading.problems:
        raise next(iter(reading.problems.values()))
    return tuple(
        f"{name} {_text(value)} and {_text(other)}"
        for name, value, other in differences(values, reading)
        if name in reading.stated
    )


def to_arguments(values: Values, dtype: str | None) -> dict[str, Value]:
    """The arguments of a model. Raises `UnsupportedError` if Megatron core cannot compute it."""
    megatron = dialect("megatron")
    arguments: dict[str, Any] = write(megatron.settings, values)
    arguments["rotary_base"] = _whole(arguments["rotary_base"])
    for name, text in megatron.other["optional"].items():
        value = evaluate(parse_expression(text), values)
        if value != megatron.settings.defaults.get(name):
            arguments[name] = cast(Value, value)
    if letters := arguments.get(LETTERS):
        arguments[LETTERS] = "".join(letters)
    reading = read(megatron.settings, arguments, "Megatron core")
    for name, value, other in differences(values, reading):
        names = entries_of(megatron.settings, name)
        raise UnsupportedError(
            f"Megatron core cannot compute a model with {name} {_text(value)}: with its arguments ({names}), it would "
            f"have {name} {_text(other)}"
        )
    return {**arguments, **({} if dtype is None else _dtype(dtype))}


def updated(record: Value, arguments: Mapping[str, Value]) -> Record:
    """The record with these arguments. Others are unchanged; without a record they are those of a run on one rank."""
    if isinstance(record, Record) and isinstance(record.state, dict):
        arguments = {name: value for name, value in arguments.items() if _TWINS.get(name) not in record.state}
        return Record(record.cls, record.args, record.kwargs, {**record.state, **arguments}, new=record.new)
    scope = {"positions": arguments["max_position_embeddings"]}
    alone = {
        name: cast(Value, evaluate(parse_expression(text), scope))
        for name, text in dialect("megatron").other["alone"].items()
    }
    return Record(Global("argparse", "Namespace"), state={**alone, **arguments}, new=True)


def arguments_for(name: str) -> str:
    """The arguments that state a hyperparameter, as text."""
    return entries_of(dialect("megatron").settings, name)


def true_vocabulary(record: Value, rows: int) -> int | None:
    """The number of a table's rows that are tokens; None if the arguments do not determine it."""
    if not isinstance(record, Record):
        return None
    padded, stated = record.get("padded_vocab_size"), record.get("vocab_size")
    if is_natural(padded) and rows < padded:
        return rows  # a rule has removed the padding
    # This tokenizer has one token more than the argument states. Other tokenizers ignore the argument, so its value
    # is not reliable then.
    if record.get("tokenizer_type") == "NullTokenizer" and is_natural(stated) and stated + 1 <= rows:
        return cast(int, stated) + 1
    return None


def _entries(record: Record, vocabulary: int) -> dict[str, Any]:
    """The arguments by their present names, those of older versions included."""
    state = record.state if isinstance(record.state, dict) else {}
    entries = {name: value for name, value in state.items() if isinstance(name, str) and value is not None}
    for name, others in dialect("megatron").other["aliases"].items():
        stated = [entries[other] for other in others if other in entries]
        if stated and entries.get(name) in (None, False):
            entries[name] = stated[0]
    if entries.get("use_rotary_position_embeddings"):
        entries["position_embedding_type"] = "rope"
    if entries.get("glu_activation") == "swiglu":
        entries.setdefault("swiglu", True)
    layers = entries.get("num_layers")
    if isinstance(layers, int) and is_natural(layers, _MAX_LAYERS):
        step = entries.get("moe_layer_freq", 1)
        if is_natural(step) and step > 0:
            entries["moe_layer_freq"] = [layer % step == 0 for layer in range(layers)]
        period = entries.get("linear_attention_freq", 0)
        if is_natural(period) and period > 0:
            entries["linear_attention_freq"] = [bool((layer + 1) % period) for layer in range(layers)]
        skipped = entries.get("window_attn_skip_freq", 0)
        if is_natural(skipped):
            entries["window_attn_skip_freq"] = [not skipped or bool((layer + 1) % skipped) for layer in range(layers)]
    return {**entries, "padded_vocab_size": vocabulary}


def _evidence(stated: Mapping[str, Any], names: list[str], partial: bool) -> dict[str, bool]:
    """What the tensors tell where the arguments do not. Raises `IncompleteError` if they may have been left out."""
    result = {}
    for name, part in dialect("megatron").other["evidence"].items():
        if name in stated:
            continue
        result[name] = any(part in one for one in names)
        if partial and not result[name]:
            raise IncompleteError(f"the run's arguments do not state `{name}`")
    return result


def _whole(value: Any) -> Any:
    """An integer where it can be one, as Megatron's parser has it."""
    return int(value) if isinstance(value, float) and value == int(value) else value


def _dtype(name: str) -> dict[str, Value]:
    return {"params_dtype": Global("torch", name), "bf16": name == "bfloat16", "fp16": name == "float16"}


def _text(value: Any) -> str:
    return printable(str(value))[:60]
