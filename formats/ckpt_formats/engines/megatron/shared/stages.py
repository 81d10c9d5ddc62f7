"""The layers of each pipeline stage: contiguous, interleaved, uneven, or given by a layout string.

Each of P stages has V model chunks. Chunk v of stage p is number v * P + p in the model's order. Source: Megatron
core, `get_num_layers_to_build` and `get_transformer_layer_offset`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ckpt_formats.core.claims import MAX_NUMBER
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.values import Record
from ckpt_formats.engines.megatron.shared.arguments import Arguments

_TOKEN = re.compile(r"(\((?P<group>[^()]*)\)|(?P<letter>[A-Za-z|]))(?:\*(?P<times>\d+))?")
"""A token of a layout string without commas: `t*3`, `(tt|)*29` or `|`."""


@dataclass(frozen=True)
class Stages:
    """The number of layers of each model chunk, in the model's order."""

    counts: tuple[int, ...]
    pp: int

    @property
    def chunks(self) -> int:
        """The number of model chunks of a stage."""
        return len(self.counts) // self.pp

    def layers(self, stage: int, chunk: int) -> range:
        """The layers of a chunk, by their numbers in the full model."""
        place = chunk * self.pp + stage
        first = list(accumulate(self.counts, initial=0))[place]
        return range(first, first + self.counts[place])


def stages_of(args: Arguments, pp: int) -> Stages:
    """The stages that the run's arguments state. Raises `UnsupportedError` if the layers cannot be divided so."""
    layers = args.number("num_layers", "encoder_num_layers")
    drawing = _drawing_of(args)
    if drawing and pp > 1:
        stages = from_layout_string(drawing, pp)
        if sum(stages.counts) != layers:
            raise UnsupportedError(
                f"the pipeline layout has {sum(stages.counts)} layers, but the model has {layers}", where=args.where
            )
        return stages
    chunks = (args.optional("virtual_pipeline_model_parallel_size") if pp > 1 else None) or 1
    first, last = (args.optional(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    if pp > 1 and (first is not None or last is not None):
        return uneven_stages(layers, pp, chunks, first, last)
    embedding, loss = (args.flag(f"account_for_{module}_in_pipeline_split") for module in ("embedding", "loss"))
    return even_stages(layers, pp, chunks, embedding=embedding and pp > 1, loss=loss and pp > 1)


def even_stages(layers: int, pp: int, chunks: int = 1, *, embedding: bool = False, loss: bool = False) -> Stages:
    """Stages with the same number of layers in each chunk.

    If `embedding`, the embedding counts as a layer of the first chunk; if `loss`, the loss as a layer of the last.
    Raises `UnsupportedError` if the number of layers is not divisible.
    """
    places = pp * chunks
    counted = layers + embedding + loss
    if places < 1 or counted % places or counted // places < embedding + (loss and places == 1):
        raise UnsupportedError(
            f"{counted} layers cannot be divided evenly over {pp} pipeline stages of {chunks} model chunks",
            hint="Choose degrees that divide the number of layers, or uneven stages.",
        )
    counts = [counted // places] * places
    counts[0] -= embedding
    counts[-1] -= loss
    return Stages(tuple(counts), pp)


def uneven_stages(layers: int, pp: int, chunks: int, first: int | None, last: int | None) -> Stages:
    """Stages with `first` and `last` layers on the first and the last stage; the others share the rest evenly.

    Raises `UnsupportedError` if the remaining layers are not divisible.
    """
    middle = pp - (first is not None) - (last is not None)
    remaining = layers - (first or 0) - (last or 0)
    if remaining < 0 or middle < 0 or (remaining % (middle * chunks) if middle else remaining):
        raise UnsupportedError(
            f"{layers} layers, with {first} on the first and {last} on the last of {pp} stages, cannot be divided"
        )
    stages = [remaining // middle if middle else 0] * pp
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    if any(count % chunks for count in stages):
        raise UnsupportedError(f"stages of {stages} layers cannot be divided into {chunks} model chunks each")
    return Stages(tuple(count // chunks for _ in range(chunks) for count in stages), pp)


def from_layout_string(layout: str | Sequence[Sequence[str]], pp: int) -> Stages:
    """The stages of a `--pipeline-model-parallel-layout`.

    The layout is a string such as `Et*3|(tt|)*2,m|L`, or for each chunk a list of the kinds of its layers.
    """
    places = _parsed(layout)
    if pp < 1 or len(places) % pp:
        raise UnsupportedError(f"a pipeline layout of {len(places)} chunks cannot be divided over {pp} stages")
    return Stages(tuple(sum(kind in ("t", "decoder") for kind in place) for place in places), pp)


def has_mtp_elsewhere(args: Arguments) -> bool:
    """True if a layout string puts layers for multi-token prediction into another chunk than the last."""
    drawing = _drawing_of(args)
    return bool(drawing) and any({"m", "mtp"} & set(place) for place in _parsed(drawing)[:-1])


def _drawing_of(args: Arguments) -> Any:
    drawing = args.record.get("pipeline_model_parallel_layout")
    return drawing.get("input_data") if isinstance(drawing, Record) else drawing


def _parsed(layout: str | Sequence[Sequence[str]]) -> list[list[str]]:
    if not isinstance(layout, str):
        return [list(map(str, place)) for place in layout]
    flat = _expanded(layout.replace(",", "").replace(" ", ""))
    return [list(part) for part in flat.split("|")]


def _expanded(text: str) -> str:
    parts, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise UnsupportedError(f"the pipeline layout has an unknown part, from {text[at : at + 20]!r} on")
        times = int(match["times"] or 1)
        inner = match["letter"] or _expanded(match["group"])
        if times * len(inner) > MAX_NUMBER:
            raise UnsupportedError("the pipeline layout has too many layers")
        parts.append(inner * times)
        at = match.end()
    return "".join(parts)
