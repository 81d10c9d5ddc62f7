"""Check that the files belong to one step of one run: masters must round to the weights, in a few values per file."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ckpt_codecs import Rounded
from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter
from ckpt_formats.core.coming_reads import requested
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, slabs
from ckpt_formats.core.tensor import FileBlob, Tensor, read

_VALUES = 64
_MAX_SAMPLES = 4


def check_same_run(parameters: Mapping[str, Parameter], where: Path) -> None:
    """Raise `CorruptError` if none of the samples of the masters in one file rounds to the weights in another file."""
    with Reader(check=False) as reader:
        for (path, other), samples in requested(_samples(parameters).items(), lambda item: _first_sample(item[1])):
            if not any(_agree(master, copy, box, reader) for master, copy, box in samples):
                raise CorruptError(
                    f"the masters in {path.name} do not belong to the weights in {other.name}",
                    where=where,
                    hint="Files of several steps or runs were mixed: copy all files of one step again.",
                )


def _samples(parameters: Mapping[str, Parameter]) -> dict[tuple[Path, Path], list[tuple[Tensor, Tensor, Box]]]:
    """A few blocks as (master, model's copy, block), by the two files that hold their values."""
    samples: dict[tuple[Path, Path], list[tuple[Tensor, Tensor, Box]]] = {}
    for parameter in parameters.values():
        master, copy = parameter.states.get(MASTER), parameter.states.get(MODEL)
        if master is None or copy is None or master.shape != copy.shape:
            continue
        of_copy = list(_boxes(copy))
        for path, first in _boxes(master) if of_copy else ():
            for other, box in of_copy:
                pair = path, other
                if len(samples.get(pair, ())) < _MAX_SAMPLES and (block := _first(first, box)) is not None:
                    samples.setdefault(pair, []).append((master, copy, block))
    return samples


def _first_sample(samples: list[tuple[Tensor, Tensor, Box]]) -> tuple[Tensor, Tensor]:
    """The values of the first sample, which nearly always agree: then no other one is read."""
    master, copy, box = samples[0]
    return master.crop(box), copy.crop(box)


def _boxes(tensor: Tensor) -> Iterator[tuple[Path, Box]]:
    for fragment in tensor.fragments:
        if isinstance(fragment.blob, FileBlob):
            yield fragment.blob.path, fragment.box


def _first(a: Box, b: Box) -> Box | None:
    """The first `_VALUES` elements of the intersection of two blocks; None if it is empty."""
    shared = a & b
    return None if shared is None else next(slabs(shared.shape, _VALUES)).shift(shared.start)


def _agree(master: Tensor, copy: Tensor, box: Box, reader: Reader) -> bool:
    rounded = Rounded().decode(b"", box.shape, copy.dtype, read(master.crop(box), reader))
    return np.ascontiguousarray(rounded).tobytes() == read(copy.crop(box), reader).tobytes()
