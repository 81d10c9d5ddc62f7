"""A LoRA adapter of PEFT: its configuration and its tensors, sorted."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError, UnsupportedError
from ckpt_formats.core.name_patterns import match_start
from ckpt_formats.core.rules import safe_pattern
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import Value

ADAPTER_CONFIG = "hf/adapter_config.json"
_LORA_NAME = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?"
)
PREFIX = "base_model.model."
BASE_LAYER = ".base_layer."
_USED = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out"}
_USED |= {"modules_to_save", "bias", "init_lora_weights", "target_parameters"}
_WITHOUT_EFFECT = {"auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern"}
_WITHOUT_EFFECT |= {"layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size"}
_WITHOUT_EFFECT |= {"revision", "runtime_config", "target_modules", "task_type", "eva_config"}
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initial values of adapters which leave the model's own weights as they are. PiSSA, OLoRA, LoftQ and others do not."""
MODEL_TYPES = ("float16", "bfloat16", "float32", "float64")
Update = dict[str, Tensor]
"""The tensors of one low-rank update by kind, such as `lora_A`: (rank, in...), (out, rank, 1...), and magnitudes."""


def adapter_config(adapter: Checkpoint) -> Mapping[str, Value]:
    """The adapter's configuration.

    Raises `UnsupportedError` if it has options that are not known to leave weights alone.
    """
    config = adapter.extras.get(ADAPTER_CONFIG)
    if not isinstance(config, dict):
        raise NotFoundError(
            "there is no adapter_config.json", where=adapter.path, hint="Name the folder of a PEFT adapter."
        )
    if config.get("peft_type") != "LORA":
        raise refusal(adapter, f"adapters of the type {shown(config.get('peft_type'))} are not merged, only LORA")
    initial = config.get("init_lora_weights", True)
    if not any(initial is value or (isinstance(initial, str) and initial == value) for value in _INITIAL):
        raise refusal(
            adapter,
            f"`init_lora_weights` is {shown(initial)}: this method changes the model's own weights before training",
            "PEFT can save such an adapter as a plain one: see `path_initial_model_for_weight_conversion`.",
        )
    unknown = [key for key, value in config.items() if key not in _USED | _WITHOUT_EFFECT and value]
    if unknown:
        raise refusal(adapter, f"options of the adapter which are not supported: {list_names(unknown, printable)}")
    return config


def adapter_tensors(adapter: Checkpoint) -> tuple[dict[str, Update], dict[str, Tensor]]:
    """Low-rank updates by module, and full tensors by name; both as PEFT names them, without its prefix."""
    updates: dict[str, Update] = {}
    full: dict[str, Tensor] = {}
    unknown: list[str] = []
    for stored, parameter in adapter.parameters.items():
        if parameter.role == "extra":
            continue
        name = stored.removeprefix(PREFIX)
        match = _LORA_NAME.fullmatch(name)
        if match is not None:
            updates.setdefault(match["module"], {})[match["kind"]] = parameter.weight
        elif ".lora_" in name or ".modules_to_save." in name or ".token_adapter." in name:
            unknown.append(stored)
        else:
            full[name] = parameter.weight
    if unknown:
        bias = " (the adapter was trained with `lora_bias`)" if any(n.endswith("lora_B.bias") for n in unknown) else ""
        raise refusal(
            adapter, f"{len(unknown)} tensors of the adapter are not known: {list_names(unknown, printable)}{bias}"
        )
    if not updates and not full:
        raise IncompleteError("the adapter holds no tensors", where=adapter.path)
    return updates, full


def lora_module(stored: str) -> str | None:
    """The module that a tensor of an adapter updates, without PEFT's prefix; None if it is none of an update."""
    match = _LORA_NAME.fullmatch(stored.removeprefix(PREFIX))
    return None if match is None else match["module"]


@dataclass(frozen=True)
class PrefixChange:
    """How names of the adapter become names of the model: without the prefix `drop`, with the prefix `add`."""

    drop: str = ""
    add: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.drop)


def prefix_change(
    adapter: Checkpoint, modules: Sequence[str], experts: Sequence[str], full: Mapping[str, Tensor], base: Checkpoint
) -> PrefixChange:
    """The one change of prefixes by which the model has all weights that the adapter changes.

    modules, experts: the modules with one weight and those of experts, as the adapter names them. A model with a head
    may lack the prefix of its inner model, or the other way round (`transformer.h.0`, `h.0`).
    Raises `IncompleteError` if there is no such change, `UnsupportedError` if there are several.
    """
    weights = [*(f"{module}.weight" for module in modules), *(f"{root}." for root in experts)]
    weights = weights or [name.replace(BASE_LAYER, ".") for name in full]
    names = {*base.parameters, *base.aliases}
    if experts:
        names |= {name[: dot.end()] for name in base.parameters for dot in re.finditer(r"\.", name)}
    first = weights[0].partition(".")[0] + "."
    added = {name.removesuffix(weights[0]) for name in names if name.endswith(f".{weights[0]}")}
    for changes in ([PrefixChange()], [PrefixChange(drop=first)], [PrefixChange(add=add) for add in sorted(added)]):
        fitting = [change for change in changes if all(change(weight) in names for weight in weights)]
        if len(fitting) > 1:
            candidates = [change(weights[0]) for change in fitting]
            raise refusal(
                adapter,
                f"`{printable(weights[0])}` could be several weights of the model: {list_names(candidates, printable)}",
            )
        if fitting:
            return fitting[0]
    if not modules and not experts:
        return PrefixChange()
    absent = [weight.removesuffix(".") for weight in weights if weight not in names]
    raise IncompleteError(
        f"it has no weights for {len(absent)} modules of the adapter: {list_names(absent, printable)}",
        where=base.path,
        hint="Is this the model that the adapter was trained for?",
    )


def refusal(adapter: Checkpoint, message: str, hint: str = "Merge it with PEFT's own merge_and_unload().") -> CkptError:
    return UnsupportedError(message, where=adapter.path, hint=hint)


def shown(value: Value) -> str:
    return printable(repr(value)[:60])


def pattern_value(adapter: Checkpoint, config: Mapping[str, Value], patterns: str, default: str, module: str) -> float:
    """The number that the first fitting pattern gives to a module, as in PEFT's `get_pattern_key`.

    patterns, default: the entries of the configuration, such as `rank_pattern` and `r`. Raises `CorruptError` for what
    is no number.
    """
    table = config.get(patterns) or {}
    value = config.get(default)
    if not isinstance(table, dict):
        raise CorruptError(f"`{patterns}` is not a table", where=adapter.path)
    for pattern, number in table.items():
        if match_start(_module_pattern(pattern, f"{adapter.path}: {patterns}"), module):
            value = number
            break
    with suppress(OverflowError):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return value
    raise CorruptError(f"`{default}` is not a number: {shown(value)}", where=adapter.path)


@lru_cache(4096)
def _module_pattern(pattern: str, origin: str) -> str:
    """A key of `rank_pattern` or `alpha_pattern` as PEFT reads it. Raises `RulesError` or `UnsafeError`."""
    return safe_pattern(rf"(.*\.)?({pattern})$", origin)
