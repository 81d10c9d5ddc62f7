"""Are the files of one step of one run? Masters must round to the weights; a few values of every file tell."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ckpt_codecs import Rounded
from ckpt_formats.base import MASTER, MODEL, Parameter
from ckpt_formats.errors import Corrupt
from ckpt_formats.files import Reader
from ckpt_formats.geometry import Box, slabs
from ckpt_formats.tensor import Raw, Tensor, read

_VALUES = 64
_SAMPLES = 4


def check_one_run(parameters: Mapping[str, Parameter], where: Path) -> None:
    """Raises `Corrupt` if nothing that we sample of a file's masters rounds to the weights."""
    with Reader(check=False) as reader:
        for path, samples in _samples(parameters).items():
            if not any(_agree(master, copy, box, reader) for master, copy, box in samples):
                raise Corrupt(
                    f"the masters in {path.name} are not those of the weights in the model file",
                    where=where,
                    hint="Files of several steps or runs were mixed: copy all files of one step again.",
                )


def _samples(parameters: Mapping[str, Parameter]) -> dict[Path, list[tuple[Tensor, Tensor, Box]]]:
    found: dict[Path, list[tuple[Tensor, Tensor, Box]]] = {}
    for parameter in parameters.values():
        master, copy = parameter.states.get(MASTER), parameter.states.get(MODEL)
        if master is None or copy is None or master.shape != copy.shape:
            continue
        if not all(isinstance(fragment.blob, Raw) for fragment in copy.fragments):
            continue
        for path, box in _boxes(master):
            if len(samples := found.setdefault(path, [])) < _SAMPLES:
                samples.append((master, copy, box))
    return found


def _boxes(master: Tensor) -> Iterator[tuple[Path, Box]]:
    """The first few values of each fragment."""
    for fragment in master.fragments:
        if isinstance(fragment.blob, Raw):
            first = next(slabs(fragment.box.shape, _VALUES))
            yield fragment.blob.path, first.shift(fragment.box.start)


def _agree(master: Tensor, copy: Tensor, box: Box, reader: Reader) -> bool:
    rounded = Rounded().decode(b"", box.shape, copy.dtype, read(master.crop(box), reader))
    return np.ascontiguousarray(rounded).tobytes() == read(copy.crop(box), reader).tobytes()
