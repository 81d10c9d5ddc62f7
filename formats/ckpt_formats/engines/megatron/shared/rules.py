"""The layout rules of Megatron's models."""

from functools import cache

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.layout import Layout, Rule
from ckpt_formats.core.rules import rule_set
from ckpt_formats.core.values import Record
from ckpt_formats.engines.megatron.shared.arguments import Arguments, sizes_of

SETS = ("megatron-core", "megatron-moe", "megatron-mla", "megatron-mamba", "megatron-legacy")
"""Rule sets of all kinds of models. They match different names, so all can be used together."""


def rules_for(own: tuple[Rule, ...] = ()) -> tuple[Rule, ...]:
    """The user's rules, followed by the shipped ones: the first that matches applies."""
    return (*own, *_shipped())


def layout_of(checkpoint: Checkpoint, own: tuple[Rule, ...] = ()) -> Layout:
    """The layout of a Megatron model, from the arguments in its extras. The checkpoint may have any format."""
    args = checkpoint.extras.get("args")
    version = checkpoint.extras.get("checkpoint_version", 0)
    sizes = sizes_of(Arguments(args, checkpoint.path), version) if isinstance(args, Record) else {}
    return Layout(rules_for(own), sizes)


@cache
def _shipped() -> tuple[Rule, ...]:
    return tuple(rule for name in SETS for rule in rule_set(name))
