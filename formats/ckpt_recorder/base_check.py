"""The comparison of the run with the state that its chain has at the step where the log begins."""

from pathlib import Path

import numpy as np
import torch

from ckpt_codecs.base import Array
from ckpt_codecs.optimizers import WEIGHTS
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Blob, FlatRangeBlob
from ckpt_formats.core.text import printable
from ckpt_formats.universal.chain import chain_file, states
from ckpt_recorder.holders import RankPart
from ckpt_recorder.proof import is_equal
from ckpt_training import ranks
from ckpt_training.composite_tensors import is_composite
from ckpt_training.engines.run import TrackedRun, frozen_tensors, is_local, state_names, state_of
from ckpt_training.local_shards import LocalPart

_PIECE = 4 << 20
"""The number of elements that are compared at once."""


def differing_base(run: TrackedRun, share: RankPart, chain: Path, step: int) -> str | None:
    """How the state of the chain at a step differs from that of the run; None if it does not, or if there is none.

    Only states that the log takes from it are compared: those that are replayed, and frozen weights. All ranks must
    call it, and get the same answer.
    """
    try:
        reason = _difference(run, share, chain, step)
    except (CkptError, OSError) as error:
        reason = f"it cannot be read: {error}"
    return next((one for one in ranks.gather(reason) if one is not None), None)


def _difference(run: TrackedRun, share: RankPart, chain: Path, step: int) -> str | None:
    if not (chain / chain_file.NAME).is_file():
        return None
    content = chain_file.load(chain / chain_file.NAME)
    if all(member.step != step for member in content.members):
        return None
    base = states.open_state(chain, content, step)
    with Reader() as reader:
        for number, part, _ in share.replayed:
            names = state_names(run, [number])
            parameter = base.parameters.get(part.name)
            if parameter is None or parameter.weight.shape != part.shape:
                return f"it has no `{printable(part.name)}` of shape {list(part.shape)}"
            for name in names:
                values = state_of(run, number, name)
                assert values is not None
                if not _has(_state(parameter, name), part, values, reader):
                    state = "" if name == WEIGHTS else f"{name!r} of "
                    return f"{state}`{printable(part.name)}` differs"
        # An engine that gathers frozen weights needs all ranks for that.
        return None if run.frozen is not None else _frozen_difference(run, share, base, reader)


def _frozen_difference(run: TrackedRun, share: RankPart, base: Checkpoint, reader: Reader) -> str | None:
    for name, tensor in frozen_tensors(run):
        if name not in share.frozen or not is_local(tensor) or is_composite(tensor):
            continue
        parameter, shape = base.parameters.get(name), tuple(tensor.shape)
        if parameter is None or parameter.weight.shape != shape:
            return f"it has no `{printable(name)}` of shape {list(shape)}"
        whole = LocalPart(name, shape, "", Box.whole(shape), 0, tensor.numel(), 0)
        if not _has(parameter.weight, whole, tensor.detach().reshape(-1), reader):
            return f"`{printable(name)}` differs"
    return None


def _state(parameter: Parameter, name: str) -> Blob | None:
    if name == WEIGHTS:
        return parameter.states.get(MASTER, parameter.states.get(MODEL))
    return parameter.states.get(name)


def _has(stored: Blob | None, part: LocalPart, values: torch.Tensor, reader: Reader) -> bool:
    """Has a stored state the values of a part? A state that is missing has only zeros. `values`: of all its tensor."""
    for start in range(part.start, part.stop, _PIECE):
        stop = min(start + _PIECE, part.stop)
        offset = part.offset + start - part.start
        live: Array = values[offset : offset + stop - start].float().cpu().numpy()
        if stored is None:
            if live.any():
                return False
            continue
        read = np.empty(stop - start, stored.dtype)
        FlatRangeBlob(stored.crop(part.box), start, stop).read_into(read, reader)
        if not is_equal(read.astype(np.float32), live):
            return False
    return True
