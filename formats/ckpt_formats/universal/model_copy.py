"""Compare the model's copy of a parameter with its master while the master is written."""

import numpy as np

from ckpt_codecs import NotApplicable, Rounded, candidate_codecs
from ckpt_codecs.lossy import ErrorStats
from ckpt_codecs.lossy.error_stats import measured
from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter
from ckpt_formats.core.computed_blobs import CastBlob, DerivedBlob
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.geometry import Box, flat_boxes
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import Array, Tensor
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal.chunked import ChunkDigests
from ckpt_formats.universal.encode_state import Passing, flat
from ckpt_formats.universal.entry import StateEntry
from ckpt_formats.universal.error_figures import figures
from ckpt_formats.universal.read_states import can_derive

_SAMPLED = 256
"""Values that are compared before a state is taken to be the master."""


class ModelCopy:
    """Finds out whether the model's copy is the rounded master. Then none of its bytes needs to be stored."""

    def __init__(self, tensor: Tensor, master: Tensor, base: str = MASTER) -> None:
        self.tensor = tensor
        self.base = base
        """The state that is the master."""
        self.derived = True
        self._codec = Rounded()
        self._digests = ChunkDigests(tensor)
        blob = tensor.fragments[0].blob if len(tensor.fragments) == 1 else None
        master_blob = master.fragments[0].blob if len(master.fragments) == 1 and not master.replicas else master
        is_rounded = isinstance(blob, DerivedBlob) and blob.codec == self._codec
        self._by_definition = (
            is_rounded and isinstance(blob, DerivedBlob) and (blob.base is master or blob.base is master_blob)
        )
        self._errors = ErrorStats()

    @classmethod
    def of(cls, parameter: Parameter) -> "ModelCopy | None":
        """None if the parameter has not both, of one shape, or if the master cannot be rounded to the copy."""
        return cls(parameter.states[MODEL], parameter.states[MASTER]) if has_copy(parameter) else None

    @classmethod
    def recognised(cls, parameter: Parameter, transfer: Transfer) -> "ModelCopy | None":
        """As `of`; or with the state of an optimizer that seems to be the master, whatever the optimizer calls it.

        A few of its values, rounded, are those of the copy; whether all are is found while it is written.
        """
        if MASTER in parameter.states:
            return cls.of(parameter)
        for state in possible_masters(parameter):
            copy, master = parameter.states[MODEL], parameter.states[state]
            box = Box((0,), (min(copy.size, _SAMPLED),))
            few, values = (transfer.fetch(flat(one), box, "copy", counted=False).copy() for one in (copy, master))
            if np.count_nonzero(values != 0) and _is_rounded(few, values):
                return cls(copy, master, state)
        return None

    def compare(
        self, box: Box, master: Array, transfer: Transfer, tensor: Tensor, decoded: Array | None = None
    ) -> None:
        """Compare the chunks in the flat range `box` of the copy, which is `tensor`, with the same block of the master.

        `master`: the values of the block. `decoded`: those that will be read back, of the same shape and dtype; None
        if they are the same.
        """
        if not self.derived:
            return
        if self._by_definition:
            self.derived = self._codec.is_defined(master, self.tensor.dtype)
            values = self._codec.decode(b"", master.shape, self.tensor.dtype, master)
            self._count(box, master, values, transfer)
            self._add(values, decoded)
        else:
            self._compare(master, transfer.fetch(tensor, box, "copy"), decoded)

    def _count(self, box: Box, master: Array, values: Array, transfer: Transfer) -> None:
        """Count what a cast changes in a block, or in a flat range, of the copy."""
        blob, shape = self.tensor.fragments[0].blob, self.tensor.shape
        if not isinstance(blob, CastBlob):
            return
        if box.shape == master.shape and len(box.start) == len(shape):
            blob.count(box, master, values, transfer.reader)
            return
        at, before, after = 0, master.reshape(-1), values.reshape(-1)
        for block in flat_boxes(shape, box.start[0], box.stop[0]):
            run = slice(at, at + block.size)
            blob.count(block, before[run], after[run], transfer.reader)
            at += block.size

    def _compare(self, master: Array, values: Array, decoded: Array | None) -> None:
        """Compare values of the copy with those of the master, of the same shape."""
        try:
            self._codec.encode(values, master)
        except NotApplicable:
            self.derived = False
        self._add(values, decoded)

    def _add(self, values: Array, decoded: Array | None) -> None:
        if decoded is not None:
            self.derived &= self._codec.is_defined(decoded, self.tensor.dtype)
            rounded = np.ascontiguousarray(self._codec.decode(b"", decoded.shape, self.tensor.dtype, decoded))
            self._errors += measured(values, rounded)
            values = rounded
        self._digests.add(np.ascontiguousarray(values))

    def compare_whole(self, master: Array, transfer: Transfer) -> None:
        """Compare all of a small copy with its master. `master`: its values, (shape) of its dtype."""
        if self._by_definition:
            self.compare(Box.whole(master.shape), master, transfer, self.tensor)
        elif self.derived:
            self._compare(master, transfer.whole(self.tensor, "copy"), None)

    def passing(self, transfer: Transfer) -> Passing:
        """The function that receives the chunks of the master, as vectors, while they are written."""
        copy = flat(self.tensor)
        return lambda box, master: self.compare(box, master, transfer, copy)

    def state(self) -> StateEntry:
        """The entry of the copy in the manifest, after all blocks were compared."""
        error = figures(self._errors, changed=False)
        digests = self._digests.digests()
        return StateEntry(
            self.tensor.dtype.name, self.tensor.shape, digests, None, self._codec.config(), self.base, error=error
        )


def _is_rounded(values: Array, master: Array) -> bool:
    try:
        Rounded().encode(values, master)
    except NotApplicable:
        return False
    return True


def has_copy(parameter: Parameter) -> bool:
    """Whether a parameter has a master and a copy of it, which may turn out to be the rounded master."""
    master, copy = parameter.states.get(MASTER), parameter.states.get(MODEL)
    if master is None or copy is None or master.shape != copy.shape:
        return False
    return can_derive(master.dtype, copy.dtype)


def possible_masters(parameter: Parameter) -> list[str]:
    """States of an optimizer that may be the master of the model's weight, by their types: the first one counts.

    None if there is a master that is known as one. A state that is decoded with another one cannot be a base.
    """
    copy = parameter.states.get(MODEL)
    if copy is None or MASTER in parameter.states or not copy.size or not is_float(copy.dtype):
        return []
    return [
        state
        for state, tensor in parameter.states.items()
        if state != MODEL
        and tensor.shape == copy.shape
        and is_float(tensor.dtype)
        and tensor.dtype.itemsize > copy.dtype.itemsize
        and can_derive(tensor.dtype, copy.dtype)
        and all(one.context is None for one in candidate_codecs(parameter.role, to_stored(state), tensor.dtype))
    ]
