"""The layout rules of Megatron's models."""

import re
from collections.abc import Iterable, Mapping
from functools import cache

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.layout import Layout, Rule
from ckpt_formats.core.rules import rule_set
from ckpt_formats.core.values import Record
from ckpt_formats.engines.megatron.shared.arguments import Arguments, sizes_of

SETS = ("megatron-core", "megatron-moe", "megatron-mla", "megatron-mamba", "megatron-legacy")
"""Rule sets of all kinds of models. They match different names, so all can be used together."""
_SHARED_FFN = re.compile(r".*\.mlp\.shared_experts\.linear_fc2\.weight")
_DOWN_PROJECTION = re.compile(r".*\.self_attention\.linear_(q|kv)_down_proj\.weight")


def rules_for(own: tuple[Rule, ...] = ()) -> tuple[Rule, ...]:
    """The user's rules, followed by the shipped ones: the first that matches applies."""
    return (*own, *_shipped())


def layout_of(checkpoint: Checkpoint, own: tuple[Rule, ...] = ()) -> Layout:
    """The layout of a Megatron model, from the arguments in its extras. The checkpoint may have any format."""
    args = checkpoint.extras.get("args")
    version = checkpoint.extras.get("checkpoint_version", 0)
    sizes = sizes_of(Arguments(args, checkpoint.path), version) if isinstance(args, Record) else {}
    whole = ((name, p.weight.shape) for name, p in checkpoint.parameters.items() if p.role != "extra")
    return Layout(rules_for(own), with_stored_sizes({**sizes, **_stored_cut(checkpoint)}, whole))


def with_stored_sizes(sizes: Mapping[str, int], shapes: Iterable[tuple[str, Shape]], tp: int = 1) -> dict[str, int]:
    """The sizes, completed by those that the shapes of tensors tell. `tp` ranks have shards of these shapes.

    The width of shared experts is taken from their tensors if no argument states it. Whether ranks split the down
    projections of latent attention depends on the class of the layers and on Megatron's version: the tensors tell.
    """
    completed = dict(sizes)
    for name, shape in shapes:
        if "shared_ffn" not in sizes and _SHARED_FFN.fullmatch(name) and len(shape) == 2:
            completed["shared_ffn"] = shape[1] * tp
        elif tp > 1 and shape and (match := _DOWN_PROJECTION.fullmatch(name)):
            rows = sizes.get("q_rank") if match[1] == "q" else _kv_rows(sizes)
            if rows in (shape[0], shape[0] * tp):
                completed["cut_down_proj"] = int(rows != shape[0])
    return completed


def _kv_rows(sizes: Mapping[str, int]) -> int | None:
    return sizes["kv_rank"] + sizes["rope_dim"] if {"kv_rank", "rope_dim"} <= sizes.keys() else None


def _stored_cut(checkpoint: Checkpoint) -> dict[str, int]:
    """How the ranks of a Megatron source had the down projections; {} if it had one rank, which does not tell."""
    tp = checkpoint.origin.layout.get("tp")
    is_known = checkpoint.origin.engine == "megatron" and tp != 1 and "cut_down_proj" in checkpoint.layout.sizes
    return {"cut_down_proj": checkpoint.layout.sizes["cut_down_proj"]} if is_known else {}


@cache
def _shipped() -> tuple[Rule, ...]:
    return tuple(rule for name in SETS for rule in rule_set(name))
