"""Open a checkpoint of any format."""

from collections.abc import Mapping, Sequence

from ckpt_formats.core.arguments import StrPath, checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.layout import Layout, Rule
from ckpt_formats.core.rules import rules_of
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.stores.location import source_path


@checked
def open(
    path: StrPath,
    *,
    rules: StrPath | Sequence[Rule] = (),
    order: Sequence[str] = (),
    orders: Mapping[str, Sequence[str]] | None = None,
    shapes: Checkpoint | None = None,
    anonymous: bool = False,
) -> Checkpoint:
    """The checkpoint at a path, or at a URL such as `s3://bucket/run`, whatever its format. Reads headers, no tensor.

    `rules` is a TOML file, or rules, for how tensor-parallel tensors are sharded. `order` lists the parameters that
    an optimizer numbers; `orders` does so for several, by their places in the file. `shapes` is another checkpoint
    of the model, for files that hold flat slices without their shapes. `anonymous`: ask a store without credentials,
    for what is public. A state of a chain is `run.chain@1234`.

    Raises `CkptError` of the kind that fits: `NotFoundError`, `CorruptError`, `IncompleteError`, `UnsafeError`,
    `UnsupportedError`, `RulesError`.
    """
    numbered = {place: tuple(names) for place, names in (orders or {}).items()}
    return open_checkpoint(source_path(path, anonymous), ReadOptions(rules_of(rules), tuple(order), numbered, shapes))


def effective_layout(checkpoint: Checkpoint, own: Sequence[Rule] = ()) -> Layout:
    """The rules by which the format read the tensors, or by which its engine shards them. `own` rules come first."""
    if checkpoint.layout.rules:
        return checkpoint.layout
    if checkpoint.origin.engine == "megatron":
        from ckpt_formats.engines.megatron.shared.rules import layout_of

        return layout_of(checkpoint, tuple(own))
    return Layout(tuple(own))
