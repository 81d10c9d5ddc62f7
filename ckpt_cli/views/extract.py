"""Write one tensor as a file, or print it if it is small."""

import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from ckpt.job import Job, load_kernels
from ckpt.job.extraction import ExtractedTensor, as_checkpoint, find_tensor, npy_dtype, write_npy
from ckpt.pipeline import Execution
from ckpt_cli import notes
from ckpt_cli.progress import progress_bar
from ckpt_cli.views import job
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.tensor import checked_read
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.engines.safetensors import Safetensors
from ckpt_formats.registry.encoded import uses_codecs

_MAX_PRINTED = 1000
"""Values that are printed."""
_WIDTH = 100


def show(checkpoint: Checkpoint, text: str, target: str | None, resources: Execution, as_json: bool) -> None:
    """Write the tensor to a target by its ending; without a target, print it."""
    extracted = find_tensor(checkpoint, text)
    if uses_codecs(checkpoint):
        load_kernels()
    if target is None:
        _print(extracted, as_json)
        return
    path, started = Path(target), time.monotonic()
    if path.suffix == ".npy":
        dtype = npy_dtype(extracted.tensor.dtype)
        if dtype != extracted.tensor.dtype:
            notes.note(f"NumPy has no {extracted.tensor.dtype.name}: the values are widened to float32, which is exact")
            notes.flush()
        with progress_bar("extracting") as progress:
            nbytes = write_npy(checkpoint, extracted.tensor, path, resources, progress)
        fields = _facts(extracted) | {"dtype": dtype.name}
    elif path.suffix == ".safetensors":
        work = Job(as_checkpoint(checkpoint, extracted), path, Safetensors(single_file=True))
        nbytes = job.run("extracting", work, resources).nbytes
        fields = _facts(extracted)
    else:
        raise InvalidArgumentError(
            f"the target `{printable(target)}` ends neither in .npy nor in .safetensors",
            hint="Choose one of the two endings. `ckpt convert --only` writes other formats.",
        )
    seconds = time.monotonic() - started
    if as_json:
        data(fields | {"target": str(path), "nbytes": nbytes, "seconds": round(seconds, 3)})
    else:
        conclude(f"wrote {printable(target)}: {fields['dtype']} {fields['shape']}, {format_nbytes(nbytes)}")


def _print(extracted: ExtractedTensor, as_json: bool) -> None:
    """Print the values of a small tensor. Raises `InvalidArgumentError` for a large one."""
    tensor = extracted.tensor
    if tensor.size > _MAX_PRINTED:
        raise InvalidArgumentError(
            f"{tensor.size:,} values are too many to be printed",
            where=printable(extracted.chosen),
            hint=f"Name a target, x.npy or x.safetensors; or a block of at most {_MAX_PRINTED:,} values, NAME[0:10].",
        )
    values = checked_read(tensor)
    if as_json:
        data(_facts(extracted) | {"values": _plain(values.astype(npy_dtype(tensor.dtype)))})
        return
    notes.flush()
    click.echo(f"{printable(extracted.name)}  {tensor.dtype.name} {list(tensor.shape)}")
    click.echo(np.array2string(values, max_line_width=_WIDTH, threshold=_MAX_PRINTED + 1, separator=" "))


def _facts(extracted: ExtractedTensor) -> dict[str, Any]:
    tensor = extracted.tensor
    return {"name": extracted.name, "dtype": tensor.dtype.name, "shape": list(tensor.shape)}


def _plain(values: Any) -> list[Any]:
    """The values as a flat list for JSON, in C order: NaN and infinity are texts, a complex number is two numbers."""
    if values.dtype.kind == "c":
        values = values.reshape(-1).view(f"f{values.dtype.itemsize // 2}")
    flat = values.reshape(-1).tolist()
    return [one if isinstance(one, int) or np.isfinite(one) else str(one) for one in flat]
