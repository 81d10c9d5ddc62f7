"""Check that the masters round to the weights: in one case, DeepSpeed's converter mixes masters up without an error.

With `round_robin_gradients` it takes elements of one parameter for those of another,
because `param_slice_mappings` do not have the order of the data. The model files, which
it copies, contain the right weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import slabs
from ckpt_formats.core.rounded import is_rounded
from ckpt_formats.core.seal_checks import seal_is_valid
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.core.text import list_names

_VALUES = 64


def check_masters(parameters: Mapping[str, Parameter], round_robin: bool, where: Path) -> None:
    """Raise `CorruptError` if the first values of masters do not round to those of the weights, and no checksum is
    wrong.

    With `round_robin`, one wrong master is enough. Otherwise more than half of them must be wrong,
    because `ckpt verify` reports single differences.
    """
    with Reader(check=False) as reader:
        pairs = list(_pairs(parameters))
        wrong = [name for name, master, copy in pairs if not is_rounded(copy, master, reader)]
        wrong = [name for name in wrong if _intact(parameters[name], reader)] if wrong else []
    if round_robin and not pairs:
        raise CorruptError(
            f"{_CONVERTED}, which mixes up the masters of such a run; there are no weights here to check it",
            where=where,
            hint=_INSTEAD,
        )
    if round_robin and wrong:
        raise CorruptError(
            f"{_CONVERTED}: the masters of {len(wrong)} parameters ({list_names(wrong)}) do not round to the weights",
            where=where,
            hint=_INSTEAD,
        )
    if 2 * len(wrong) > len(pairs):
        raise CorruptError(
            f"the masters of {len(wrong)} parameters ({list_names(wrong)}) do not round to the weights in the model's "
            "files",
            where=where,
            hint="Files of several steps or runs were mixed: convert the original checkpoint again.",
        )


_CONVERTED = "made by DeepSpeed's converter from a run with round_robin_gradients"
_INSTEAD = "Convert the original checkpoint instead: `ckpt convert` reads it correctly."


def _pairs(parameters: Mapping[str, Parameter]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each parameter with the first values of its master and of its stored weights."""
    for name, parameter in parameters.items():
        master, copy = parameter.states.get(MASTER), parameter.states.get(MODEL)
        if master is None or copy is None or master.shape != copy.shape or not copy.size:
            continue
        stored = [fragment for fragment in copy.fragments if isinstance(fragment.blob, FileBlob)]
        if stored and master.fragments:
            first = next(slabs(stored[0].box.shape, _VALUES)).shift(stored[0].box.start)
            yield name, master.crop(first), replace(copy, replicas=()).crop(first)


def _intact(parameter: Parameter, reader: Reader) -> bool:
    """Are the checksums of the parameter right? If not, the reader of all values reports the damage."""
    raws = (raw for state in (MASTER, MODEL) for raw in parameter.states[state].sources())
    return all(seal_is_valid(seal, reader) for seal in {raw.seal for raw in raws if raw.seal is not None})
