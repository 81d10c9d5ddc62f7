"""Tables with more rows, or fewer: a vocabulary that is padded, or one that got new tokens."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np

from ckpt.combine.average_blob import BLOCK, round_once
from ckpt.combine.whole_tensor import Once
from ckpt_codecs import Rounded
from ckpt_formats.core.arguments import Positive, checked
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Edit, Parameter
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.dtypes import DType, is_float
from ckpt_formats.core.edits import edited
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, slab, slabs
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.quantised.weights import check_not_quantised
from ckpt_formats.core.tensor import Array, Blob, BlockBlob, Fragment, Tensor, ZeroBlob, read
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, is_natural

Fill = Literal["zero", "mean"]
"""What new rows of weights are: zeros, or the mean of the rows that were there."""

_TABLE = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.weight$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|output_layer|embed_out|output)\.(?:weight|bias)$")
_CONFIG = "hf/config.json"
_MAX_ROW = 1 << 20
"""Elements of a row whose mean is held in memory."""


@dataclass(frozen=True)
class Resize(Edit):
    """Tables with other numbers of rows, by name."""

    rows: Mapping[str, int]
    fill: str


@checked
def resize(
    source: Checkpoint,
    rows: Mapping[str, int] = {},
    *,
    pad_vocab: Positive | None = None,
    fill: Fill = "zero",
    cut: bool = False,
) -> Checkpoint:
    """The checkpoint whose tensors of these names have so many rows; their optimizer states, too. No data is read.

    `pad_vocab` pads the embedding of the tokens and the head to the next multiple of a number, as Megatron and vLLM
    do. `fill` states what new rows of weights are: zero, or the mean of all rows, summed in float64 and rounded once;
    new rows of the optimizer's states are zero. Fewer rows need `cut`. A tied tensor stays tied. The entry
    `vocab_size` of a config.json follows if it was the number of rows. Notices say what was changed.

    Raises `NoMatchError` for a name that no tensor has, or if no tensor has the name of a vocabulary table;
    `InvalidArgumentError` for fewer rows without `cut`; `UnsupportedError` for tensors without rows, quantised weights
    and states that have no row for each row of the weight.
    """
    wanted = {**(_padded(source, pad_vocab) if pad_vocab is not None else {}), **_by_holder(source, rows)}
    check_not_quantised(source, "resized", {name.rpartition(".")[0] or name for name in wanted})
    parameters = dict(source.parameters)
    sizes: dict[int, int] = {}
    notices: list[Notice] = []
    for name, count in wanted.items():
        old = parameters[name]
        if not old.shape or not old.shape[0]:
            raise UnsupportedError(f"`{printable(name)}` of shape {list(old.shape)} has no rows", where=source.path)
        if count == old.shape[0]:
            continue
        if count < old.shape[0] and not cut:
            raise InvalidArgumentError(
                f"`{printable(name)}` has {old.shape[0]:,} rows: {count:,} would cut {old.shape[0] - count:,} of them",
                where=source.path,
                hint="If they may be lost, allow it: `cut` (--allow-cut).",
            )
        parameters[name] = _resized(source, old, count, fill)
        if len(old.shape) > 1:
            sizes[old.shape[0]] = count
        notices.append(_notice(name, old, count, fill))
    changed = {name: parameters[name].shape[0] for name in wanted if parameters[name] is not source.parameters[name]}
    extras, notice = _with_vocabulary(source.extras, sizes)
    return edited(
        source,
        Resize(changed, fill),
        parameters=parameters,
        extras=extras,
        notices=tuple(dict.fromkeys((*source.notices, *notices, *notice))),
        digests={key: digest for key, digest in source.digests.items() if key[0] not in changed},
        errors={key: figures for key, figures in source.errors.items() if key[0] not in changed},
    )


def _by_holder(source: Checkpoint, rows: Mapping[str, int]) -> dict[str, int]:
    """The rows by names of parameters, not of what is tied to them."""
    wanted: dict[str, int] = {}
    for given, count in rows.items():
        name = source.aliases.get(given, given)
        if name not in source.parameters:
            raise NoMatchError(f"no tensor is called `{printable(given)}`", hint="`ckpt inspect` lists the names.")
        if not is_natural(count) or not count:
            raise InvalidArgumentError(f"`{printable(given)}` needs at least one row")
        if wanted.setdefault(name, count) != count:
            raise InvalidArgumentError(
                f"`{printable(given)}` is tied to `{printable(name)}`, so both have as many rows"
            )
    return wanted


def _padded(source: Checkpoint, multiple: int) -> dict[str, int]:
    """The tables of the vocabulary, with their rows as a multiple of a number."""
    weights = {name: one for name, one in source.parameters.items() if one.role != "extra" and one.shape}
    tables = [name for name, one in weights.items() if _TABLE.search(name) and len(one.shape) == 2]
    if not tables:
        raise NoMatchError(
            "no tensor has the name of a vocabulary table",
            where=source.path,
            hint="Name the tables with their rows: --resize NAME=ROWS.",
        )
    heights = {weights[name].shape[0] for name in tables}
    heads = [name for name, one in weights.items() if _HEAD.search(name) and one.shape[0] in heights]
    return {name: -(-weights[name].shape[0] // multiple) * multiple for name in (*tables, *heads)}


def _resized(source: Checkpoint, old: Parameter, count: int, fill: Fill) -> Parameter:
    states: dict[str, Tensor] = {}
    best = old.states.get(MASTER, old.states.get(MODEL))
    mean = None if fill == "zero" or best is None else _mean_of(old.name, best)
    for state, tensor in old.states.items():
        rows = old.shape[0]
        if tensor.shape == old.shape or (tensor.shape == (rows,) and state.endswith("_row")):
            is_weight = state in (MASTER, MODEL)
            states[state] = _with_rows(tensor, count, mean if is_weight else None)
        elif tensor.size == 1 or (state.endswith("_col") and tensor.shape != (rows,)):
            states[state] = tensor
        else:
            raise UnsupportedError(
                f"the state {printable(state)} of `{printable(old.name)}` has the shape {list(tensor.shape)}, so its "
                "rows are not those of the weight",
                where=source.path,
                hint="Leave the optimizer's states out: --model-only.",
            )
    return replace(old, states=states)


def _with_rows(tensor: Tensor, count: int, mean: "MeanRow | None") -> Tensor:
    """A tensor with so many rows; new ones are zero, or `mean` in its type."""
    old = tensor.shape[0]
    if count <= old:
        return tensor.crop(slab(tensor.shape, 0, 0, count))
    added = slab((count, *tensor.shape[1:]), 0, old, count)
    blob: Blob = ZeroBlob(added.shape, tensor.dtype)
    if mean is not None:
        blob = MeanRowBlob(mean.of, mean.dtype, Box.whole(added.shape))
        if mean.dtype != tensor.dtype:  # the copy of the model is the master, rounded
            blob = DerivedBlob(Rounded(), blob, tensor.dtype)
    parts = (Fragment(Box.whole(tensor.shape), tensor), Fragment(added, blob))
    return Tensor((count, *tensor.shape[1:]), tensor.dtype, parts)


@dataclass(frozen=True)
class MeanRow:
    """The mean of a table's rows, and the type to which it is rounded."""

    of: Once[Array]
    dtype: DType


@dataclass(frozen=True)
class SumRows:
    """Called with a reader, gives the mean of a table's rows: float64, of the shape of a row."""

    table: Blob

    def __call__(self, reader: Reader) -> Array:
        total = np.zeros(self.table.shape[1:], np.float64)
        for box in slabs(self.table.shape, BLOCK):
            with np.errstate(all="ignore"):
                values = read(self.table.crop(box), reader).astype(np.float64)
                total[box.index[1:]] += np.add.reduce(values, axis=0)
        with np.errstate(all="ignore"):
            return np.asarray(total / self.table.shape[0])


@dataclass(frozen=True)
class MeanRowBlob(BlockBlob):
    """A block of rows that all are the mean, rounded once to `dtype`."""

    mean: Once[Array]
    dtype: DType
    box: Box

    def read_into(self, out: Array, reader: Reader) -> None:
        part = np.ascontiguousarray(self.mean.get(reader)[self.box.index[1:]])
        out[...] = round_once(part.reshape(-1), self.dtype).reshape(part.shape)


def _mean_of(name: str, table: Tensor) -> MeanRow:
    if not is_float(table.dtype) or table.dtype.itemsize == 1 or prod(table.shape[1:]) > _MAX_ROW:
        raise UnsupportedError(
            f"`{printable(name)}` of {table.dtype.name} {list(table.shape)} has no mean row", hint="Fill with zeros."
        )
    return MeanRow(Once(SumRows(table)), table.dtype)


def _notice(name: str, old: Parameter, count: int, fill: Fill) -> Notice:
    had = old.shape[0]
    if count < had:
        return Notice(f"rows {count:,} to {had - 1:,} are cut", (name,), Weight.LOST)
    new = "zero" if fill == "zero" else "the mean of the others"
    states = any(state not in (MASTER, MODEL) for state in old.states)
    also = "; new rows of the optimizer's states are zero" if states and fill == "mean" else ""
    return Notice(f"{count:,} rows instead of {had:,}: new rows are {new}{also}", (name,))


def _with_vocabulary(extras: Mapping[str, Value], sizes: Mapping[int, int]) -> tuple[Mapping[str, Value], list[Notice]]:
    """The extras with a configuration that states the new rows where it stated the old ones, and what to say of it."""
    config = extras.get(_CONFIG)
    if not isinstance(config, dict) or not sizes:
        return extras, []
    changed = dict(_entries_with_vocabulary(config, sizes))
    if changed == config:
        text = "config.json does not state the rows that the tables had as vocab_size: it stays as it is"
        return extras, [Notice(text, weight=Weight.UNSURE)]
    return {**extras, _CONFIG: changed}, [Notice("vocab_size of config.json is the new number of rows")]


def _entries_with_vocabulary(config: Mapping[Any, Any], sizes: Mapping[int, int]) -> Iterator[tuple[Any, Any]]:
    for key, value in config.items():
        if key == "vocab_size" and is_natural(value):
            yield key, sizes.get(value, value)
        elif key == "text_config" and isinstance(value, dict):
            yield key, dict(_entries_with_vocabulary(value, sizes))
        else:
            yield key, value
