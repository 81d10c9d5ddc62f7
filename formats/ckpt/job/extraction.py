"""Take one tensor out of a checkpoint, or a block of it: find it by its name, and write it as a file."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.job import AnyProgress, count_to
from ckpt.pipeline import Resources
from ckpt.pipeline.interrupts import interruptible
from ckpt.pipeline.target import exists
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Edit, Parameter
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.edits import edited
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import block_of_key
from ckpt_formats.core.identity import check_unchanged
from ckpt_formats.core.locking import check_folder_of, unwritable
from ckpt_formats.core.publish import flush, rename_new
from ckpt_formats.core.similar_names import similar_names
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import PARTIAL, printable
from ckpt_formats.core.transfer import Transfer, as_bytes
from ckpt_formats.core.views import with_shape

_SLICES = re.compile(r"(.*?)\[([-\d:,.\s]*)\]", re.DOTALL)
_INDEX = re.compile(r"-?\d{1,18}")
_RANGE = re.compile(r"(-?\d{1,18})?\s*:\s*(-?\d{1,18})?")


@dataclass(frozen=True)
class Extract(Edit):
    """One tensor of a checkpoint, or a block of it."""

    tensor: str


@dataclass(frozen=True)
class ExtractedTensor:
    """A tensor that was chosen by its name."""

    name: str
    """The parameter's name, and that of the state if it is not the weight's."""
    tensor: Tensor
    chosen: str
    """The text by which it was chosen."""


def find_tensor(source: Checkpoint, text: str) -> ExtractedTensor:
    """The tensor that a text names: `NAME` is the weight, `NAME.STATE` another state, `NAME[0:10, 3]` a block of it.

    Ranges and numbers in brackets mean what they mean in NumPy; ranges have no step. Reads nothing.

    Raises `NoMatchError` for a name that is not there, `InvalidArgumentError` for brackets that are no block of it.
    """
    match = _SLICES.fullmatch(text)
    stated = _state_of(source, text)
    if stated is None and match is not None:
        stated = _state_of(source, match[1])
        if stated is not None:
            return ExtractedTensor(stated[0], _block(stated[1], match[2], text), text)
    if stated is None:
        raise _not_there(source, text if match is None else match[1])
    return ExtractedTensor(*stated, text)


def as_checkpoint(source: Checkpoint, extracted: ExtractedTensor) -> Checkpoint:
    """The tensor as a checkpoint of its own, which every format can hold."""
    parameter = Parameter(extracted.name, "parameter", {MODEL: extracted.tensor})
    return replace(
        edited(source, Extract(extracted.chosen), parameters={extracted.name: parameter}),
        groups=(),
        extras={},
        aliases={},
        suspicions=(),
        notices=(),
        errors={},
        digests={},
        seals=(),  # they cover whole files, of which only this block is read
    )


def npy_dtype(dtype: DType) -> DType:
    """The type that a `.npy` file has for values of `dtype`: NumPy has no bfloat16 and no 8-bit floats.

    They are widened to float32, which holds each of their values.
    """
    return dtype if dtype.kind in "biufc" and dtype.isbuiltin == 1 else np.dtype(np.float32)


def write_npy(
    source: Checkpoint,
    tensor: Tensor,
    target: Path,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> int:
    """Write a tensor as `.npy`, block by block, completely or not at all. Returns the bytes of the file.

    Raises `OutputError` if something is at the target, and never replaces it; `NoSpaceError` if the disk is full.
    """
    if os.path.lexists(target):
        raise exists(target)
    check_folder_of(target, "file")
    dtype, draft = npy_dtype(tensor.dtype), target.with_name(f".{target.name}.{os.getpid()}{PARTIAL}")
    budget = (resources or Resources.of_machine()).slab
    try:
        try:
            with (
                draft.open("xb") as file,
                Reader(check=False) as reader,
                interruptible(count_to(tensor.nbytes, progress)) as count,
                Transfer(reader, budget, count) as transfer,
            ):
                description = {"descr": dtype.str, "fortran_order": False, "shape": tensor.shape}
                np.lib.format.write_array_header_2_0(file, description)
                for _, values in transfer.slabs(tensor):
                    with np.errstate(invalid="ignore"):  # NaN of bfloat16 and 8-bit floats
                        widened = values.astype(dtype, copy=False)
                    file.write(as_bytes(np.ascontiguousarray(widened)).data)
                nbytes = file.tell()
            check_unchanged(source.identities)
            flush(draft)
            rename_new(draft, target)
        finally:
            draft.unlink(missing_ok=True)
        with suppress(OSError):  # the file is there; only its name may be lost if the machine fails now
            flush(target.parent)
    except FileExistsError:
        raise exists(target) from None
    except OSError as error:
        raise unwritable(error, target) from error
    return nbytes


def _state_of(source: Checkpoint, text: str) -> tuple[str, Tensor] | None:
    """The name and the tensor of `NAME` or `NAME.STATE`; None if there is none. A whole name comes first."""
    if text in source:
        return text, source[text].weight
    for point in re.finditer(r"\.", text):
        name, state = text[: point.start()], text[point.end() :]
        if name in source and state in source[name].states:
            return text, source[name].states[state]
    return None


def _block(tensor: Tensor, brackets: str, text: str) -> Tensor:
    keys = [_key(part.strip(), text) for part in brackets.split(",") if part.strip()]
    try:
        box, remainder = block_of_key(tuple(keys), tensor.shape)
    except IndexError as error:
        raise InvalidArgumentError(f"{printable(text)}: {error}; the shape is {list(tensor.shape)}") from None
    block = tensor.crop(box)
    shape = tuple(size for size, one in zip(box.shape, remainder, strict=True) if not isinstance(one, int))
    return block if shape == block.shape else with_shape(block, shape)


def _key(part: str, text: str) -> Any:
    if part == "...":
        return ...
    if _INDEX.fullmatch(part):
        return int(part)
    if (match := _RANGE.fullmatch(part)) is not None:
        return slice(*(None if bound is None else int(bound) for bound in match.groups()))
    raise InvalidArgumentError(
        f"{printable(text)}: `{printable(part)}` is not a range",
        hint="Write ranges without steps and whole numbers, such as NAME[0:10, 3].",
    )


def _not_there(source: Checkpoint, text: str) -> NoMatchError:
    names = list(dict.fromkeys((*source, *source.aliases)))
    owner = next((name for name in names if text.startswith(f"{name}.")), None)
    if owner is not None:
        states = ", ".join(printable(state) for state in source[owner].states)
        hint = f"`{printable(owner)}` has these states: {states}."
    else:
        similar = similar_names(text, names)
        meant = f"Did you mean {' or '.join(f'`{printable(one)}`' for one in similar)}? " if similar else ""
        hint = f"{meant}`ckpt inspect` lists all names."
    return NoMatchError(f"no tensor is called `{printable(text)}`", where=source.path, hint=hint)
