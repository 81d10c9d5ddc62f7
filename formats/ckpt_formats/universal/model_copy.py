"""The model's copy of a parameter, held against its master while the master passes by."""

import numpy as np
import xxhash

from ckpt_codecs import NotApplicable, Rounded
from ckpt_codecs.lossy import ErrorStats
from ckpt_codecs.lossy.error_stats import measured
from ckpt_formats.containers.sealed_json import hash_text
from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Array, DerivedBlob, Tensor
from ckpt_formats.core.transfer import Transfer, as_bytes
from ckpt_formats.universal.encode_state import Passing, flat
from ckpt_formats.universal.entry import StateEntry
from ckpt_formats.universal.error_figures import figures


class ModelCopy:
    """Is it the master, rounded? Then nothing of it needs to be stored."""

    def __init__(self, tensor: Tensor, master: Tensor) -> None:
        self.tensor = tensor
        self.derived = True
        self._codec = Rounded()
        self._values = xxhash.xxh3_128()
        only = tensor.fragments[0].blob if len(tensor.fragments) == 1 else None
        held = master.fragments[0].blob if len(master.fragments) == 1 and not master.replicas else master
        made = isinstance(only, DerivedBlob) and only.codec == self._codec
        self._by_definition = made and isinstance(only, DerivedBlob) and (only.base is master or only.base is held)
        self._lost = ErrorStats()

    @classmethod
    def of(cls, parameter: Parameter) -> "ModelCopy | None":
        """None where there are not both, of one shape, or the one cannot be rounded to the other."""
        master, copy = parameter.states.get(MASTER), parameter.states.get(MODEL)
        if master is None or copy is None or master.shape != copy.shape:
            return None
        alike = (master.dtype.kind == "c") == (copy.dtype.kind == "c")
        return cls(copy, master) if alike and Rounded.can_round(master.dtype, copy.dtype) else None

    def compare(self, box: Box, master: Array, transfer: Transfer, tensor: Tensor, kept: Array | None = None) -> None:
        """`kept` is what is kept of the master, where that is not the master itself."""
        if not self.derived:
            return
        if self._by_definition:
            self.derived = self._codec.is_defined(master, self.tensor.dtype)
            values = self._codec.decode(b"", master.shape, self.tensor.dtype, master)
        else:
            values = transfer.fetch(tensor, box, "copy")
            try:
                self._codec.encode(values, master)
            except NotApplicable:
                self.derived = False
        if kept is not None:
            self.derived &= self._codec.is_defined(kept, self.tensor.dtype)
            rounded = np.ascontiguousarray(self._codec.decode(b"", kept.shape, self.tensor.dtype, kept))
            self._lost += measured(values, rounded)
            values = rounded
        self._values.update(as_bytes(values).data)

    def passing(self, transfer: Transfer) -> Passing:
        """For a master that passes by as a vector."""
        copy = flat(self.tensor)
        return lambda box, master: self.compare(box, master, transfer, copy)

    def state(self) -> StateEntry:
        digest = hash_text(self._values.intdigest())
        error = figures(self._lost, changed=False)
        return StateEntry(self.tensor.dtype.name, self.tensor.shape, digest, self._codec.config(), MASTER, error=error)
